"""How many connections a rank of a large job has, and may have.

Knows gloo's variable and the process's limit. Must not know which groups there are.

By itself gloo connects every rank of a group with every other one: 2,047 sockets a rank in a world of 2,048, more than
the usual limit of 1,024, and addresses of them all that go through rank 0's store (16 KiB a rank, which every rank
reads: 69 GB). What the world says to each other goes round a ring, or to rank 0.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LAZY = "TORCH_GLOO_LAZY_INIT"


def raise_file_limit() -> None:
    """From now on this process may open as many files and sockets as its hard limit allows.

    Rank 0 holds two sockets for every rank: its store's, and in a gather to it gloo's.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS allows fewer than the limit that it tells
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def connecting_on_first_use() -> Iterator[None]:
    """A gloo group that is made inside connects two ranks when they first have something to say to each other.

    For groups whose members speak in collectives alone: there a send waits until the other end turns to this rank as
    well, also one that is to return at once, and no time limit ends that wait if the other end has stopped. (Seen in
    torch 2.13; gloo#520.) The user's own setting of the variable stays.
    """
    own = os.environ.get(_LAZY)
    os.environ.setdefault(_LAZY, "1")
    try:
        yield
    finally:
        if own is None:
            del os.environ[_LAZY]
