"""Puts ppctl's functions and communicator in the places where a loaded Megatron-core has its own, and undoes it.

Nothing of Megatron is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from types import ModuleType
from typing import Any, NamedTuple

from ppctl.megatron import forward_backward
from ppctl.megatron.models import misuse
from ppctl.megatron.pipelines import CORE, PipelineSizes, pipeline_sizes
from ppctl.schedule.schedule_request import ScheduleRequest, requested
from ppctl.schedule.simulate import Costs

_SCHEDULES = f"{CORE}.pipeline_parallel.schedules"
_NAMES = (
    "get_forward_backward_func",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
    "P2PCommunicator",
)
"""The functions that are replaced; Megatron's schedules have all of these names."""


class ReplacedName(NamedTuple):
    """A name in a module whose Megatron object was replaced by ppctl's."""

    module: str
    name: str
    what: str
    """The function's name in Megatron, and in ppctl."""


@dataclass(frozen=True)
class Adoption:
    """The result of a call of `adopt`. `print` it for a table."""

    places: tuple[ReplacedName, ...]
    """The names that were replaced."""
    sizes: PipelineSizes | None
    """Megatron's pipeline and virtual pipeline size; None if its groups are not made yet."""
    request: ScheduleRequest
    """The schedule of every training step; empty for Megatron's own choice."""
    again: bool
    """Whether this call replaced an earlier one."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The rows of the table: (label, text)."""
        sizes = "read from Megatron's groups when the first step runs: they are not made yet"
        own, idle = "1f1b, interleaved where there are chunks", ""
        if self.sizes is not None:
            pp, vpp = self.sizes
            sizes = f"pp {pp}" + ("" if vpp is None else f" x vpp {vpp}")
            own = "1f1b" if vpp is None else "interleaved_1f1b"
            idle = " (idle: one rank has no pipeline)" if pp == 1 else ""
        rows = [("sizes", sizes), ("schedule", (str(self.request) if self.request.asks else own) + idle)]
        rows += [("an earlier call", "undone: this one counts")] * self.again
        return rows + [(f"{place.module}.{place.name}", f"ppctl.{place.what}") for place in self.places]

    def __str__(self) -> str:
        width = max(len(left) for left, _ in self.rows)
        return "\n".join(f"{left:<{width}}  {right}" for left, right in self.rows)


_replaced: list[tuple[ModuleType, str, Any, Any]] = []
"""Module, name, what stood there, what was put there."""


def adopt(
    schedule: str | PathLike[str] | None = None, *, memory: float | None = None, costs: Costs | None = None
) -> Adoption:
    """Put ppctl's forward-backward functions and P2PCommunicator in every place that has the originals of
    Megatron-core.

    Call it on every rank, with the same arguments, after Megatron's imports and before `get_forward_backward_func` is
    called: functions that a program has already taken are not replaced. Places are the attributes of all loaded
    modules, the main program's among them. A second call undoes the first.

    `schedule` is a policy (`zb_h1`), `auto`, or the path of a file `....csv`; None is Megatron's own choice, 1F1B or
    interleaved 1F1B. `auto` searches for the schedule with the shortest step for `costs` (by default all stages alike,
    with F, I and W of one length) that holds at most `memory` (1.0) times the activations of 1F1B's first rank.
    Evaluation runs forwards alone. On a V (`zbv_zero_bubble`, `v_half`, `v_min`, `dualpipev`) the model must be built
    for it, or the first step refuses.

    Raises ConfigError (PP-E396) if Megatron's schedules are not loaded, ScheduleError for an unknown schedule (PP-E304)
    or one that does not fit Megatron's sizes, which are checked here if its groups exist, else at the first step
    (PP-E305, PP-E216). Then nothing is replaced.
    """
    request = requested(schedule, memory, costs)
    if sys.modules.get(_SCHEDULES) is None:
        message = "adopt() comes after the imports of Megatron, but megatron.core.pipeline_parallel is not loaded"
        raise misuse(message, "import megatron.core.pipeline_parallel")
    sizes = pipeline_sizes()
    if sizes is not None and sizes.pp > 1:
        request.check(sizes.pp, sizes.vpp or 1)
    again = bool(release())
    forward_backward.use(request)
    return Adoption(tuple(_replace()), sizes, request, again)


def release() -> Sequence[ReplacedName]:
    """Undo `adopt`: put Megatron's functions and communicator back, and use Megatron's schedules. Returns the places;
    none if nothing was adopted. A place that has been reassigned since is left alone.
    """
    restored: list[ReplacedName] = []
    while _replaced:
        module, name, before, after = _replaced.pop()
        place = ReplacedName(module.__name__, name, after.__name__)
        if vars(module).get(name) is after:
            setattr(module, name, before)
            restored.append(place)
    forward_backward.use(ScheduleRequest())
    return restored[::-1]


def _replace() -> Iterator[ReplacedName]:
    """Put ppctl's functions in place of Megatron's in every loaded module, under any name; yields the places, which are
    recorded for `release`."""
    theirs = vars(sys.modules[_SCHEDULES])
    named = {id(theirs[name]): name for name in _NAMES if name in theirs}  # some versions have no communicator
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] == "ppctl":
            continue
        for attribute, value in list(vars(module).items()):
            if (name := named.get(id(value))) is not None:
                ours = getattr(forward_backward, name)
                setattr(module, attribute, ours)
                _replaced.append((module, attribute, value, ours))
                yield ReplacedName(module_name, attribute, name)
