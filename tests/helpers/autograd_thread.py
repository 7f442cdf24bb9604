"""Autograd as on CUDA: the nodes of a backward run in a thread of the device's, whichever thread asks for them.

On a CPU torch runs them in the thread that asks. Must not know who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import overrides
from torch.autograd.variable import Variable
from torch.utils import _python_dispatch

ENGINE: Any = Variable._execution_engine
"""What every backward comes down to: torch's functions, and those of ppctl that go round them."""


class AutogradThread(ThreadPoolExecutor):
    """One device's thread, which computes one backward after the other; one that is held up holds up those behind it.

    Stands in for `Variable._execution_engine`. `enter` is called once in the thread. A backward that a node asks for
    runs at once, and nodes find the modes of who asks, as in torch's own threads.
    """

    def __init__(self, enter: Callable[[], object] = lambda: None) -> None:
        def begin() -> None:
            self._own = threading.get_ident()
            enter()

        self._own = 0
        super().__init__(1, "autograd", begin)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's, in the thread."""
        if threading.get_ident() == self._own:
            return ENGINE.run_backward(*args, **kwargs)
        modes = overrides._get_current_function_mode_stack(), _python_dispatch._get_current_dispatch_mode_stack()

        def run() -> Any:
            with _modes(*modes):
                return ENGINE.run_backward(*args, **kwargs)

        return self.submit(run).result()

    def __getattr__(self, name: str) -> Any:
        return getattr(ENGINE, name)


@contextmanager
def _modes(functions: list[Any], dispatches: list[Any]) -> Iterator[None]:
    for mode in functions:
        overrides._push_mode(mode)
    for mode in dispatches:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in dispatches:
            _python_dispatch._pop_mode()
        for _ in functions:
            overrides._pop_mode()
