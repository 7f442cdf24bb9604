"""The byte-level tokenizer: every byte is a token, so any text of any language has an encoding and none can be missing.

Knows ids and bytes. Must not know files, corpora or the model's (padded) vocabulary size.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint16]
"""Token ids as they are kept in memory: two bytes each."""


class ByteTokenizer:
    """Ids 0..255 are the bytes themselves; three ids beyond them mark documents and padding.

    A model's `vocab_size` must be at least `vocab_size`; the ids between the two are never produced.
    """

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        """The ids of `text`'s UTF-8 bytes; a lone surrogate (JSON allows it) keeps its three bytes."""
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_bytes(self, data: bytes) -> Tokens:
        """The ids of raw bytes, one each; not decoded, hence never invalid."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Marks (bos, eos, pad) vanish; invalid UTF-8 and ids without a meaning become U+FFFD."""
        pieces = (self._piece(int(token)) for token in ids)
        return b"".join(pieces).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if 0 <= token < 256:
            return bytes((token,))
        return b"" if token in (self.bos, self.eos, self.pad) else "\ufffd".encode()
