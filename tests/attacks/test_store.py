"""A stranger who reaches the port of a run's store changes nothing of ours; on one machine there is no such port."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import STARTED, environment, free_port, start

STRANGER = Path(__file__).with_name("stranger_at_store.py")
NOBODY = 65534
TINY = ("+recipe=quickstart", "+scale=smoke", "pp=2", "vpp=1", "checkpoint.interval=1")


def listening(pids: list[int]) -> set[str]:
    """The addresses on which these processes listen, in the kernel's notation: 0100007F is 127.0.0.1."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pids[0]}/net/{kind}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def workers(where: Path) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"ppctl.rank.worker --run {where}"], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def test_a_run_on_one_machine_listens_on_the_loopback_alone_and_meets_where_no_other_user_can_look(tmp_path):
    run = start("train", *TINY, "steps=1000", cwd=tmp_path)
    assert any(line.startswith("step ") for line in run.stdout)
    pids = workers(tmp_path)
    assert len(pids) == 2
    assert listening([*pids, run.pid]) <= {"0100007F"}
    variables = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0")
    (directory,) = (Path(each.partition(b"=")[2].decode()) for each in variables if each.startswith(b"PPCTL_NODE_DIR"))
    assert directory.stat().st_mode & 0o777 == 0o700 and (directory / "store").exists()
    (secret,) = tmp_path.glob("runs/*/*/secret")
    assert secret.stat().st_mode & 0o777 == 0o600
    shown = b"".join(Path(f"/proc/{pid}/{file}").read_bytes() for pid in pids for file in ("cmdline", "environ"))
    assert secret.read_bytes() not in shown
    run.terminate()
    run.communicate(timeout=60)
    assert not directory.exists()


def test_a_stranger_who_writes_the_address_of_a_writer_is_not_connected_to(tmp_path):
    """Ranks of a scheduler, with a store at a port; the stranger is there before them."""
    if os.getuid() != 0:
        pytest.skip("needs root, to be another user")
    port = free_port()
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "ppctl", "train", *TINY, "steps=3", "launch=env"]
    stranger = subprocess.Popen(
        [sys.executable, str(STRANGER), "127.0.0.1", str(port), str(NOBODY)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    STARTED.append(stranger)
    assert stranger.stdout.readline() == "there\n"
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env=environment(**told, RANK=rank), stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    STARTED.extend(ranks)
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    stranger.kill()
    assert "caught" not in stranger.communicate()[0]
    assert any("PP-E776" in text for text in said), said


def hosts_command(*words: str) -> int:
    return subprocess.run(["ip", *words], stderr=subprocess.DEVNULL, check=False).returncode


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with an address each on a common link, 10.77.0.1 and 10.77.0.2: hosts, as ranks see it."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make two hosts")
    names = [f"ppctl-{os.getpid()}-{end}" for end in "ab"]
    made = [hosts_command("netns", "add", name) for name in names]
    link = ("name", "fabric", "netns")
    made.append(hosts_command("link", "add", *link, names[0], "type", "veth", "peer", *link, names[1]))
    for number, name in enumerate(names, 1):
        made.append(hosts_command("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "fabric"))
        made += [hosts_command("-n", name, "link", "set", device, "up") for device in ("lo", "fabric")]
    if not any(made):
        yield names
    for name in names:
        hosts_command("netns", "delete", name)
    if any(made):
        pytest.skip("needs network namespaces")


def test_between_hosts_listeners_have_the_address_of_the_fabric_and_no_process_shows_the_secret(tmp_path, hosts):
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29533"}
    train = [sys.executable, "-m", "ppctl", "train", *TINY, "steps=1000", "launch=env"]
    ranks = []
    for rank, name in enumerate(hosts):
        own = environment(**told, RANK=str(rank), GLOO_SOCKET_IFNAME="fabric", SLURMD_NODENAME=name)
        command = ["ip", "netns", "exec", name, *train]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True))
    STARTED.extend(ranks)
    assert any(line.startswith("step ") for line in ranks[0].stdout)
    for rank, here in zip(ranks, ("01004D0A", "02004D0A"), strict=True):
        assert listening([rank.pid]) == {here}
    (secret,) = tmp_path.glob("runs/*/*/secret")
    text = secret.read_bytes()
    shown = [Path(f"/proc/{rank.pid}/{file}").read_bytes() for rank in ranks for file in ("cmdline", "environ")]
    shown += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != secret]
    assert not any(text in each for each in shown)
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.communicate(timeout=60)
