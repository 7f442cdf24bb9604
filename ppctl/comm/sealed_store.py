"""Values of ours in the store that all ranks share, each with a proof that a rank of this start wrote it.

Whoever reaches the port of torch's store reads and writes in it. So every value of ours is JSON, and stands behind an
HMAC over the start, the key and the value; its secret is known to the ranks alone (`ppctl.run_starts`). Counts (`add`)
carry no proof: whoever changes one can delay or end a start, and nothing else. What torch itself keeps in the store is
not sealed (SECURITY.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ppctl.errors import Problem, TrainingError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PROOF = 64
"""Hexadecimal digits of an HMAC with SHA-256."""


class SealedStore:
    """JSON values by key in `plain`, torch's store of the start with the number `start`. No secret: no proofs."""

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
        """The value, once it is there. Raises TrainingError (PP-E776) where no rank of this start wrote it."""
        proof, text = halves(self.plain.get(key))
        if not hmac.compare_digest(proof.encode(), self._proof(key, text).encode()):
            raise TrainingError(unproved(key))
        return json.loads(text)

    def add(self, key: str, amount: int) -> int:
        """Add to a count; returns the sum."""
        return self.plain.add(key, amount)

    def wait(self, keys: Sequence[str], limit: timedelta) -> None:
        """Wait until all keys are there. Raises RuntimeError after `limit`."""
        self.plain.wait(list(keys), limit)

    def has(self, key: str) -> bool:
        """Whether the key is there now."""
        return self.plain.check([key])

    def key_for(self, purpose: str) -> bytes:
        """A key that the ranks of this start have in common, for one purpose; empty without a secret."""
        return b"" if self._secret is None else hmac.digest(self._secret, purpose.encode(), "sha256")

    def _proof(self, key: str, text: str) -> str:
        if self._secret is None:
            return "-" * _PROOF
        said = json.dumps([self._start, key, text]).encode()  # no two triples give one text
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()


def unproved(key: str) -> Problem:
    """The problem of a value that no rank of this start has written."""
    message = f"the value of {key!r} in the rendezvous store is from nobody who knows this start's secret"
    return Problem("PP-E776", message, "ppctl explain PP-E776")


def halves(data: bytes) -> tuple[str, str]:
    """The proof and the text of a value as it stands in the store."""
    text = data.decode("latin-1")  # one character a byte, whatever stands there
    return text[:_PROOF], text[_PROOF:]
