"""Whether hosts reach each other at all, tried with plain sockets before gloo connects.

Knows addresses and sockets. Must not know the store, runs or configs.

gloo connects ranks while a group is made, or on first use. To a host that drops what comes it waits five times the
group's timeout, meanwhile the ranks that are connected go on, and what any of them says in the end names no rank.
"""

from __future__ import annotations

import errno
import fcntl
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from ppctl.errors import Problem
from ppctl.reach.contact import DeadEdge
from ppctl.reach.gloo_failures import in_words

Address = tuple[str, int]

WAY_OUT = "launch.env.GLOO_SOCKET_IFNAME=eth0"
LIKELY = "a firewall between them, or an interface that they do not share (`ip -br address` lists a host's)"
_SIOCGIFADDR = 0x8915
_WHY = {
    errno.ECONNREFUSED: "the connection was refused",
    errno.EHOSTUNREACH: "there is no route to it",
    errno.ENETUNREACH: "there is no route to it",
    errno.ETIMEDOUT: "nothing answered",
}


def listen() -> tuple[socket.socket, Address]:
    """A socket that others can connect to where they would connect to this process's gloo, and its address.

    The kernel answers by itself; nothing is accepted.
    """
    host = own_address()
    server = socket.socket(_family(host))
    server.bind((host, 0))
    server.listen(socket.SOMAXCONN)
    return server, (host, int(server.getsockname()[1]))


def own_address() -> str:
    """The address that gloo gives to other ranks: its interface's, the host name's, or else the loopback's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)[20:24])
    with suppress(OSError):
        for family, *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as trial:
                trial.bind((address[0], 0))
                return str(address[0])
    return "127.0.0.1"


def unreached(addresses: Mapping[int, Address], limit: float) -> dict[int, str]:
    """Of these, by rank, why one cannot be connected to. All are tried at once, for `limit` seconds."""
    found, trials = {}, selectors.DefaultSelector()
    for rank, address in addresses.items():
        trial = socket.socket(_family(address[0]))
        trial.setblocking(False)
        code = trial.connect_ex(address)
        if code in (0, errno.EINPROGRESS):
            trials.register(trial, selectors.EVENT_WRITE, rank)
        else:
            found[rank] = _why(code)
            trial.close()
    deadline = time.monotonic() + limit
    while trials.get_map() and time.monotonic() < deadline:
        for key, _ in trials.select(deadline - time.monotonic()):
            assert isinstance(key.fileobj, socket.socket)
            code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                found[key.data] = _why(code)
            trials.unregister(key.fileobj)
            key.fileobj.close()
    for key in list(trials.get_map().values()):
        found[key.data] = f"nothing answered for {limit:g} s"
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    trials.close()
    return {rank: why + _only_local(addresses[rank][0]) for rank, why in found.items()}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _why(code: int) -> str:
    return _WHY.get(code, os.strerror(code))


def _only_local(host: str) -> str:
    return f" ({host} is an address that its own machine alone knows)" if host.startswith("127.") else ""


@contextmanager
def connecting(rank: int, host: str, what: str) -> Iterator[None]:
    """Inside, a group of processes is made: where its connections do not come about, DeadEdge (PP-E707) says whose."""
    try:
        yield
    except RuntimeError as error:
        message = f"rank {rank} on {host} could not connect to all ranks of {what}: {in_words(error)}"
        raise DeadEdge(Problem("PP-E707", message, WAY_OUT, LIKELY)) from error
