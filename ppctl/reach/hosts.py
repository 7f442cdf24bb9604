"""Whether hosts reach each other, tried with plain sockets before gloo connects; and what gloo's errors mean.

gloo connects ranks while a group is made, or on first use. If a host drops its packets, gloo waits for five times the
group's timeout; meanwhile connected ranks go on, and in the end no error names a rank.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress

from ppctl.errors import TrainingError

Address = tuple[str, int]

REMEDY = "launch.env.GLOO_SOCKET_IFNAME=eth0"
CAUSES = "a firewall between them, or an interface that they do not share (`ip -br address` lists a host's)"
_SIOCGIFADDR = 0x8915
_REFUSED, _NO_ROUTE = "the connection was refused", "there is no route to it"
_REASONS = {
    errno.ECONNREFUSED: _REFUSED,
    errno.EHOSTUNREACH: _NO_ROUTE,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.ETIMEDOUT: "nothing answered",
}
_GLOO_REASONS = (
    (r"closed by peer|reset by peer|broken pipe", "the other end closed the connection"),
    (r"refused", _REFUSED),
    (r"no route|unreachable", _NO_ROUTE),
    (r"timed? ?out", "nothing answered in time"),
)


class DeadEdge(TrainingError):
    """Two ranks do not reach each other, or one does not answer at all."""


def listen() -> tuple[socket.socket, Address]:
    """(a socket to which others connect as to this process's gloo, its address); the kernel alone answers."""
    host = own_address()
    server = socket.create_server((host, 0), family=family_of(host), backlog=socket.SOMAXCONN)
    return server, (host, int(server.getsockname()[1]))


def own_address() -> str:
    """The address under which gloo publishes itself: its interface's, else the host name's, else the loopback's."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface and sys.platform == "linux":
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    with suppress(OSError):
        for family, *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as trial:
                trial.bind((address[0], 0))
                return str(address[0])
    return "127.0.0.1"


def unreached(addresses: Mapping[int, Address], limit: float) -> dict[int, str]:
    """Rank -> why its address cannot be reached. All are tried together, for `limit` seconds."""
    return asyncio.run(_unreached(addresses, limit))


async def _unreached(addresses: Mapping[int, Address], limit: float) -> dict[int, str]:
    reasons = await asyncio.gather(*(_why_unreached(*address, limit) for address in addresses.values()))
    return {rank: reason for rank, reason in zip(addresses, reasons, strict=True) if reason is not None}


async def _why_unreached(host: str, port: int, limit: float) -> str | None:
    try:
        async with asyncio.timeout(limit):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        # The limit's own TimeoutError has no errno.
        code, reason = error.errno, f"nothing answered for {limit:g} s"
        reason = reason if code is None else _REASONS.get(code, os.strerror(code))
        loopback = f" ({host} is an address that only its own machine can use)" if host.startswith("127.") else ""
        return reason + loopback
    writer.close()
    return None


def family_of(host: str) -> socket.AddressFamily:
    """The kind of an address: IPv6 if it has colons."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def reason_of(error: BaseException) -> str:
    """The reason in gloo's error, with the address that it names; the error's first line if the reason is unknown."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    reason = next((why for pattern, why in _GLOO_REASONS if re.search(pattern, text, re.IGNORECASE)), None)
    if reason is None:
        return text
    remote = re.search(r"\[([0-9a-fA-F.:]+)\]:(\d+)", text)
    return reason + (f" ({remote[1]} port {remote[2]})" if remote else "")
