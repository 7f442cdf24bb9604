"""The layout that is used: the one that was given, held against pp, vpp and the model, or the even split.

Knows how stages, pp and vpp hang together. Must not know the layout language (`ppctl.layout`), the world or costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ppctl.config.argv import PLACE
from ppctl.errors import LayoutError
from ppctl.layout import PipelineParallelLayerLayout, even_layout
from ppctl.plan.findings import Finding, Findings
from ppctl.plan.said import Override, Said, typed
from ppctl.plan.sizes import TOO_MUCH, nearest_divisors
from ppctl.plan.split import Split, compile_split, options_said
from ppctl.plan.types import Derived

AUTO = "auto"
"""The layout that is found by search."""

MOST_LAYERS_SEARCHED, MOST_STAGES_SEARCHED, MOST_HOMES_SEARCHED = 256, 64, 2**17
"""What `auto` searches in seconds. The last: layers x stages x pp_ranks, on each of which the MTP layers may be."""

LAYERS = ("model.num_layers", "model.mtp_num_layers")
RECOMPUTED = "train.recompute_stages"


@dataclass(frozen=True, slots=True)
class Cut:
    """A layout that fits, and what was derived on the way."""

    layout: PipelineParallelLayerLayout
    derived: tuple[Derived, ...]

    @property
    def vpp(self) -> int:
        """Chunks per pp_rank."""
        return self.layout.virtual_pipeline_model_parallel_size


def derive_cut(said: Said, findings: Findings, chunks: tuple[int, str] | None = None) -> Cut | None:
    """The layout. None if there is none that fits; then `findings` say why.

    `chunks` is how many chunks per rank the schedule asks for, and why: the even split's vpp where none was given.
    """
    split = compile_split(said, findings)
    if split is not None:
        return _split_cut(said, split, findings)
    if options_said(said):
        return None  # they do not fit, and it has been told
    given = said["layout"]
    # For `auto` the even split stands until the schedule is known: `auto.balanced_cut` takes its place.
    return _even_cut(said, findings, chunks) if given in (None, AUTO) else _given_cut(said, given, findings)


def check_search(said: Said, num_stages: int, findings: Findings) -> None:
    """Refuse a search for a layout that would take more than seconds."""
    layers = said["model.num_layers"]
    homes = layers * num_stages * said["pp"] if said["model.mtp_num_layers"] else 0
    if layers > MOST_LAYERS_SEARCHED or num_stages > MOST_STAGES_SEARCHED or homes > MOST_HOMES_SEARCHED:
        message = (
            f"layout=auto searches layouts of at most {MOST_LAYERS_SEARCHED} decoder layers on at most "
            f"{MOST_STAGES_SEARCHED} stages, and with multi-token prediction of at most {MOST_HOMES_SEARCHED} layers x "
            f"stages x pp; here {layers} layers on {num_stages} stages and pp {said['pp']}"
        )
        place = said.told("layout", *LAYERS, "pp", "vpp")
        findings.append(Finding(TOO_MUCH, "search", message, place, (("layout", None),)))


def _split_cut(said: Said, split: Split, findings: Findings) -> Cut | None:
    """The layout that Megatron's or NeMo's options were compiled to; it is printed, and held to all rules."""
    layout = PipelineParallelLayerLayout(split.layout, said["pp"])
    if wrong := layout.problems(said["model.num_layers"], said["model.mtp_num_layers"]):
        _adopt(findings, LayoutError(wrong), said)
        return None
    derived = [split.derived]
    if said["vpp"] is None:
        count, pp = len(layout.stages), said["pp"]
        derived.append(Derived("vpp", count // pp, f"vpp {count // pp} = {count} stages of the layout / pp {pp}"))
    return Cut(layout, tuple(derived))


def _even_cut(said: Said, findings: Findings, chunks: tuple[int, str] | None) -> Cut | None:
    """The even split; vpp is 1 unless it was given, or the schedule asks for more."""
    wanted, asks = chunks or (1, "neither a layout nor virtual_pipeline_model_parallel_size was given")
    layers, pp, vpp = said["model.num_layers"], said["pp"], said["vpp"] or wanted
    # What no layout can hold is a typing error in one of these.
    fewer = ((("pp", min(pp, layers)), ("vpp", 1)), (("model.num_layers", pp * vpp),))
    try:
        text = even_layout(layers, pp * vpp, said["model.mtp_num_layers"] or 0)
        layout = PipelineParallelLayerLayout(text, pp)
    except LayoutError as error:
        _adopt(findings, error, said, *fewer)
        return None
    stages = f"{pp * vpp} stage{'' if pp * vpp == 1 else 's'}"
    why = f"even split of {layers} layers over {stages} (pp {pp} x vpp {vpp})"
    idle = pp * vpp - layers
    if idle > 0:
        why += f"; {idle} {'stage has' if idle == 1 else 'stages have'} no decoder layer"
    source = said.source("layout")
    if source.startswith("derived: "):
        why += f"; {source.removeprefix('derived: ')}"
    derived = [Derived("layout", text, f"layout {text}: {why}")]
    if said["vpp"] is None:
        derived.append(Derived("vpp", vpp, f"vpp {vpp}: {asks}"))
    return Cut(layout, tuple(derived))


def _given_cut(said: Said, given: Any, findings: Findings) -> Cut | None:
    pp, vpp = said["pp"], said["vpp"]
    try:
        count = len(PipelineParallelLayerLayout(given, 1).stages)
    except LayoutError as error:
        _adopt(findings, error, said)
        return None
    if count != pp * vpp if vpp is not None else count % pp:
        findings.append(_disagreement(said, count))
    layout = PipelineParallelLayerLayout(given, pp if count % pp == 0 else 1)
    problems = layout.problems(said["model.num_layers"], said["model.mtp_num_layers"])
    # Where the stages do not fit pp, the rule that MTP belongs in a rank's last chunk has no meaning yet.
    wrong = [problem for problem in problems if count % pp == 0 or problem.code != "PP-E018"]
    if wrong:
        _adopt(findings, LayoutError(wrong), said)
    if count % pp or wrong or (vpp is not None and count != pp * vpp):
        return None
    derived: tuple[Derived, ...] = ()
    if vpp is None:
        derived = (Derived("vpp", count // pp, f"vpp {count // pp} = {count} stages of the layout / pp {pp}"),)
    return Cut(layout, derived)


def _adopt(findings: Findings, error: LayoutError, said: Said, *more: tuple[Override, ...]) -> None:
    """The layout's own problems, with the source of the layout; their own remedies come first, then `more`."""
    for problem in error.problems:
        place = "\n".join(filter(None, [problem.place, f"layout from: {said.source('layout')}"]))
        own = [typed(line) for line in problem.remedy.splitlines()]
        findings.append(
            Finding(problem.code, "layout", problem.message, place, *filter(None, own), *_even(said), *more)
        )


def _disagreement(said: Said, count: int) -> Finding:
    """The layout has `count` stages, and pp and vpp want another number."""
    pp, vpp = said["pp"], said["vpp"]
    if vpp is None:
        message = (
            f"the layout has {count} stages, which pp {pp} ranks cannot share evenly: vpp = {count} / {pp} is not whole"
        )
    else:
        message = f"the layout has {count} stages, and pp {pp} x vpp {vpp} = {pp * vpp}"
        message += f"; {count} stages on pp {pp} would be vpp={count // pp}" if count % pp == 0 else ""
    return Finding("PP-E220", "layout", message, said.told("layout", "pp", "vpp"), *_agreements(said, count))


def _agreements(said: Said, count: int) -> Iterator[tuple[Override, ...]]:
    """Ways to make layout, pp and vpp agree: another vpp, the even split, another pp."""
    pp, vpp = said["pp"], said["vpp"]
    if count % pp == 0:
        yield (("vpp", count // pp),)
    yield from _even(said)
    # A layout that was typed stays; another one would give way to the new sizes unless it is typed as well.
    keep = () if said.source("layout").startswith(PLACE) else (("layout", _text(said)),)
    if vpp is not None and count % vpp == 0:
        yield (("pp", count // vpp), *keep)
    for size in nearest_divisors(count, pp):
        yield (("pp", size), ("vpp", count // size), *keep)


def _text(said: Said) -> str:
    """The given layout as a string, whatever it was given as."""
    return PipelineParallelLayerLayout(said["layout"], 1).canonical()


def _even(said: Said) -> Iterator[tuple[Override, ...]]:
    """The even split, typed."""
    try:
        stages = said["pp"] * (said["vpp"] or 1)
        yield (("layout", even_layout(said["model.num_layers"], stages, said["model.mtp_num_layers"] or 0)),)
    except LayoutError:
        return


def check_recompute(said: Said, stages: int, findings: Findings) -> None:
    """Refuse numbers of stages to recompute that the pipeline does not have, and an empty list."""
    chosen = said[RECOMPUTED]
    if chosen is None:
        return
    missing = [number for number in chosen if not 0 <= number < stages]
    if missing or not chosen:
        what = f"stage {missing[0]} is not there" if missing else "no stage is named"
        message = f"{RECOMPUTED}={chosen}: {what}; stages are 0 to {stages - 1}, pp x vpp of them"
        place = said.told(RECOMPUTED, "pp", "vpp")
        findings.append(Finding("PP-E217", RECOMPUTED, message, place, ((RECOMPUTED, None),)))
