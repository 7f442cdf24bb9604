"""Autograd as on CUDA: the nodes of a backward run in a thread of the device's, whichever thread asks for them.

On a CPU torch runs them in the thread that asks. Must not know who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ENGINE = torch.autograd._engine_run_backward
"""What `torch.autograd.backward` and `grad` call."""


class AutogradThread(ThreadPoolExecutor):
    """One device's thread, which computes one backward after the other; one that is held up holds up those behind it.

    `enter` is called once in it. A backward that a node asks for runs at once, as torch's own do.
    """

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        def begin() -> None:
            self._own = threading.get_ident()
            enter()

        self._own = 0
        super().__init__(1, "autograd", begin)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """`ENGINE`, in the thread."""
        if threading.get_ident() == self._own:
            return ENGINE(*args, **kwargs)
        return self.submit(ENGINE, *args, **kwargs).result()
