"""The store through which ranks find each other, and ppctl's authenticated values in it.

Any process that reaches the port of torch's store can read and write in it. So every value of ppctl's is JSON, preceded
by an HMAC over the start, the key and the value; only the ranks know its secret (`ppctl.runs.run_starts`). Counts
(`add`) have no proof: changing one can only delay or end a start. torch's own values in the store are not sealed
(SECURITY.md).
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
import socket
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, Queue
from struct import pack
from threading import Thread
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import FileStore, TCPStore

from ppctl.errors import ConfigError, Problem, TrainingError, pasted
from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.reach.hosts import family_of, own_address
from ppctl.runs.heartbeat import host_name

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_AGENT = "TORCHELASTIC_USE_AGENT_STORE"
_MORE = 5.0
"""Seconds after its limit within which torch itself reports that it has not connected."""


def connect(rank: int, world: int, patience: timedelta) -> Store:
    """The store of the ranks: in the directory of ppctl's launcher, else at MASTER_ADDR, MASTER_PORT.

    Raises TrainingError within `patience`: PP-E708 if the store is not reached, PP-E709 if other ranks do not
    come; ConfigError (PP-E605) if rank 0 cannot have the port.
    """
    if NODE_DIRECTORY in os.environ:
        return file_store(Path(os.environ[NODE_DIRECTORY]), world)
    try:
        return _at_port(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world, patience)
    except RuntimeError as error:
        problem = _why_no_store(str(error), rank, patience.total_seconds())
        if problem is None:
            raise
        raise TrainingError(problem) from error


def file_store(directory: Path, world: int) -> Store:
    """A store in a directory of this user's that all ranks see, on one machine: no socket."""
    return FileStore(str(directory / "store"), world)


def _at_port(host: str, port: int, rank: int, world: int, patience: timedelta) -> Store:
    """The store at an address, served by torchrun's agent or by rank 0."""
    if rank != 0 or os.environ.get(_AGENT) == str(True):
        return join(host, port, world, patience)
    listening = listen_as(host, port)
    address = listening.getsockname()[0]
    return TCPStore(address, port, world, True, patience, multi_tenant=True, master_listen_fd=listening.detach())


def join(host: str, port: int, world: int | None, patience: timedelta) -> TCPStore:
    """The store that another process serves; with a `world`, once all its ranks have come. Raises RuntimeError after
    `patience` for each, also if what listens there never answers, for which torch's constructor would wait for ever."""
    found, waits = Queue[TCPStore | RuntimeError](), world is not None

    def ask() -> None:
        try:
            found.put(TCPStore(host, port, world, False, patience, waits))
        except RuntimeError as error:
            found.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        store = found.get(timeout=(1 + waits) * patience.total_seconds() + _MORE)
    except Empty:
        raise RuntimeError(f"trying to connect to {host}:{port}: who listens there does not answer") from None
    if isinstance(store, RuntimeError):
        raise store
    return store


def limit_answers(port: int, limit: timedelta) -> None:
    """Make questions to the store at `port` fail after `limit` without an answer: torch's would wait for ever."""
    for descriptor in [int(each.name) for each in Path("/dev/fd").iterdir() if each.is_socket()]:  # others would leak
        with suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as own:
            if own.getpeername()[1:2] == (port,):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pack("ll", int(limit.total_seconds()), 0))


def listen_as(host: str, port: int) -> socket.socket:
    """A listening socket on this machine's address that `host` names, never on all addresses.

    If the name means the loopback here (Debian's 127.0.1.1), or a machine in front of this one, gloo's address is used,
    which other hosts must reach as well. Raises ConfigError (PP-E605).
    """
    try:
        return _listening(host, port)
    except (OSError, OverflowError) as error:
        message = f"rank 0 on {host_name()} cannot listen at {host} port {port}: {error}"
        raise ConfigError(Problem("PP-E605", message, "ppctl explain PP-E605", "MASTER_ADDR, MASTER_PORT")) from error


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`, if possible not on loopback. Raises OSError if that is not this machine."""
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    named = list(dict.fromkeys(str(address[0]) for *_, address in rows))
    beyond = [address for address in named if not ip_address(address.partition("%")[0]).is_loopback]
    here = own_address()
    is_name = host not in (*named, "localhost")
    for address in dict.fromkeys([*beyond, *[here] * is_name, *named, here]):
        try:
            return socket.create_server((address, port), family=family_of(address), backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    raise OSError(errno.EADDRNOTAVAIL, f"{host} is no address of this machine")


def _why_no_store(text: str, rank: int, waited: float) -> Problem | None:
    """The problem in an error of the rendezvous; None if it is of another kind (a port in use)."""
    joined = re.search(r"(\d+)/(\d+) clients joined", text)
    if joined is not None:
        message = f"only {joined[1]} of {joined[2]} ranks reached the store on {host_name()} within {waited:g} s"
        return Problem("PP-E709", message, "ppctl explain PP-E709")
    if not re.search(r"trying to connect|failed to connect|Connection refused|resolve|getaddrinfo", text):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    message = f"rank {rank} on {host_name()} did not reach rank 0's store at {host} port {port} within {waited:g} s"
    remedy = pasted("python", "-c", f"import socket; socket.create_connection({(host, port)}, 5)")
    return Problem("PP-E708", message, remedy)


_PROOF = 64
"""Hexadecimal digits of an HMAC with SHA-256."""


class SealedStore:
    """JSON values by key in `plain`, torch's store; if there is a `secret`, with proofs for the start `start`."""

    def __init__(self, plain: Store, secret: bytes | None, start: str) -> None:
        self.plain = plain
        self.has_proofs = secret is not None
        self._secret = secret
        self._start = start

    def set(self, key: str, value: Any) -> None:
        """Write a value that JSON can hold."""
        text = json.dumps(value)
        self.plain.set(key, self._proof(key, text) + text)

    def get(self, key: str) -> Any:
        """Wait for a value and return it. Raises TrainingError (PP-E776) if no rank of this start wrote it."""
        proof, text = halves(self.plain.get(key))
        if not hmac.compare_digest(proof.encode(), self._proof(key, text).encode()):
            raise TrainingError(unproved(key))
        return json.loads(text)

    def key_for(self, purpose: str) -> bytes:
        """A key that the ranks of this start have in common, for one purpose; empty without a secret."""
        return b"" if self._secret is None else hmac.digest(self._secret, purpose.encode(), "sha256")

    def _proof(self, key: str, text: str) -> str:
        if self._secret is None:
            return "-" * _PROOF
        signed = json.dumps([self._start, key, text]).encode()  # different triples give different texts
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()


def unproved(key: str) -> Problem:
    """The problem of a value that no rank of this start has written."""
    message = f"the value of {key!r} in the rendezvous store is from nobody who knows this start's secret"
    return Problem("PP-E776", message, "ppctl explain PP-E776")


def halves(data: bytes) -> tuple[str, str]:
    """(the proof, the text) of a value in the store."""
    text = data.decode("latin-1")  # one character per byte, for any bytes
    return text[:_PROOF], text[_PROOF:]
