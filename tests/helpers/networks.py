"""Hosts with networks of their own on this machine: namespaces on one switch, from which each can be cut off."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PATIENCE = 5
"""`tcp_retries2` of hosts: how often TCP sends again before a connection is lost, here for about ten seconds. By
default that is 15 times, and a quarter of an hour."""


def missing() -> str | None:
    """Why there are no such hosts here, or None."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return "network namespaces want root, and iproute2"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True)
class Networks:
    """Namespaces `NAME-0`, `NAME-1` and so on, with an interface `eth0` each, and the switch's `NAME-switch`."""

    name: str

    def address(self, host: int) -> str:
        """A host's address."""
        return f"10.87.0.{host + 1}"

    def within(self, host: int) -> tuple[str, ...]:
        """The words before a command that is to run on a host."""
        return ("ip", "netns", "exec", f"{self.name}-{host}")

    def cut_off(self, host: int) -> None:
        """From now on nothing reaches a host, nor leaves it; connections stay as they are, and learn nothing of it."""
        _ip("-n", f"{self.name}-switch", "link", "set", f"port{host}", "down")


@contextmanager
def networks(count: int) -> Iterator[Networks]:
    """So many hosts, while the body runs."""
    name = f"ppctl-{os.getpid()}"
    own, switch = Networks(name), f"{name}-switch"
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for host in range(count):
            space, port = f"{name}-{host}", f"port{host}"
            _ip("netns", "add", space)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "addr", "add", f"{own.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _ip("-n", space, "link", "set", link, "up")
            setting = f"echo {_PATIENCE} >/proc/sys/net/ipv4/tcp_retries2"
            subprocess.run([*own.within(host), "sh", "-c", setting], check=True)
        yield own
    finally:
        for space in (switch, *(f"{name}-{host}" for host in range(count))):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
