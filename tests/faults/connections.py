"""A dead edge, made for real: this process stops hearing what another one sends over gloo. Both stay alive.

gloo's thread waits on an epoll descriptor. Taken out of it, a connection stays open and the kernel still accepts what
comes, as on a network that loses everything: neither end sees an error. The store's connections are left alone.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress
from pathlib import Path

_ESTABLISHED, _LISTEN = "01", "0A"  # of /proc/net/tcp


def go_deaf(pid: int) -> int:
    """Hear nothing more from a process; returns how many connections that were."""
    found = _shared_with(pid)
    for epoll, descriptor in found:
        select.epoll.fromfd(os.dup(epoll)).unregister(descriptor)
    return len(found)


def hear_no_newcomer() -> int:
    """Answer nobody who connects from now on: the kernel still accepts, as on a host that is cut off. Returns at how
    many sockets gloo listened."""
    listening = _addresses(_LISTEN)
    mine = {descriptor for descriptor, inode in _sockets(os.getpid()).items() if inode in listening}
    found = [(epoll, descriptor) for epoll, descriptor in _watched() if descriptor in mine]
    for epoll, descriptor in found:
        select.epoll.fromfd(os.dup(epoll)).unregister(descriptor)
    return len(found)


def cut(pid: int) -> int:
    """Shut all of gloo's connections with a process down: both ends see that at once. Returns how many that were."""
    found = _shared_with(pid)
    for _, descriptor in found:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    return len(found)


def sibling(rank: int) -> int:
    """The process with the same parent whose RANK is `rank`."""
    parent = os.getppid()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            ) == parent and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                return int(entry.name)
    raise LookupError(f"no sibling is rank {rank}")


def _shared_with(pid: int) -> list[tuple[int, int]]:
    """(epoll descriptor, descriptor) of the connections with `pid` that gloo's thread waits on."""
    mine, addresses = _sockets(os.getpid()), _addresses()
    others = {addresses[inode] for inode in _sockets(pid).values() if inode in addresses}
    own = {descriptor: addresses[inode] for descriptor, inode in mine.items() if inode in addresses}
    return [(epoll, fd) for epoll, fd in _watched() if fd in own and own[fd][::-1] in others]


def _sockets(pid: int) -> dict[int, str]:
    """Descriptor -> inode of a process's sockets."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                found[int(entry.name)] = target[8:-1]
    return found


def _addresses(state: str = _ESTABLISHED) -> dict[str, tuple[str, str]]:
    """Inode -> (local address, remote address) of all sockets in a state, by default connections."""
    found = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                found[fields[9]] = (fields[1], fields[2])
    return found


def _watched() -> list[tuple[int, int]]:
    """(epoll descriptor, watched descriptor) of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry) == "anon_inode:[eventpoll]":
                lines = Path(f"/proc/self/fdinfo/{entry.name}").read_text().splitlines()
                found += [(int(entry.name), int(line.split()[1])) for line in lines if line.startswith("tfd:")]
    return found
