"""Another user takes names in shared memory, then a command runs.

unshare --mount python squatted_memory.py names|copies COMMAND...

Needs root, and a mount namespace: /dev/shm of this process is a new one, which nobody else sees. A child of uid 65534
makes what a stranger can make there: `names` under the names that ppctl's files for this user have and had, `copies`
under `copies KIND`. Exits with the command's code, or with 99 after naming what it has read, changed or removed.
"""

import os
import stat
import subprocess
import sys
from pathlib import Path

STRANGER = 65534
SHARED, VICTIMS = Path("/dev/shm"), Path("/dev/shm/the victim's own")
COPIES = SHARED / "ppctl"
"""`checkpoint.local`, which a run makes and leaves, empty."""
KINDS = ("fifo", "file", "link", "link to a directory", "directory")
MANY = 10_000
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def take(path: Path, kind: str) -> None:
    """Make an entry of this kind."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(VICTIMS / "file")
    elif kind == "link to a directory":
        path.symlink_to(VICTIMS)
    elif kind == "directory":
        path.mkdir()
        (path / "rank-00000.json").write_text("{}")
        path.chmod(0o777)
    else:
        path.write_bytes(bytes(136))
    if kind in ("fifo", "file"):
        path.chmod(0o666)


def take_names(uid: int) -> None:
    """All kinds under names with and without a random part, and ten thousand more."""
    for number, kind in enumerate(KINDS):
        for end in (f"{number}.beat", f"{number}-0.failure", f"{BOOT}-{number:016x}"):
            take(SHARED / f"ppctl-{uid}-{end}", kind)
    for number in range(16, MANY):
        os.mkfifo(SHARED / f"ppctl-{uid}-{BOOT}-{number:016x}")


def as_stranger(what: str, uid: int) -> None:
    """Take the names in a child that has become another user."""
    child = os.fork()
    if child == 0:
        os.umask(0)
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        if what == "names":
            take_names(uid)
        else:
            for kind in KINDS:
                take(SHARED / f"copies {kind}", kind)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def seen() -> dict[str, object]:
    """What is there; a file's time of access tells whether it was read."""
    found: dict[str, object] = {}
    for path in SHARED.rglob("*"):
        info = path.lstat()
        found[str(path)] = info.st_mode, info.st_uid, info.st_ino, info.st_mtime_ns
        if stat.S_ISREG(info.st_mode):
            found[str(path)] = found[str(path)], info.st_atime_ns
    return found


subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,strictatime", "tmpfs", str(SHARED)], check=True)
VICTIMS.mkdir(0o700)
(VICTIMS / "file").write_text("of the victim's")
as_stranger(sys.argv[1], os.getuid())
before = seen()
code = subprocess.run(sys.argv[2:], timeout=45, check=False).returncode
after = seen()
for name in (before.keys() | after.keys()) - {str(COPIES)}:
    if before.get(name) != after.get(name):
        print("touched:", name, before.get(name), after.get(name), file=sys.stderr)
        code = 99
sys.exit(code)
