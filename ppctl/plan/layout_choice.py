"""The layout: the config's, checked against pp, vpp and the model, or the even split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ppctl.config.argv import PLACE
from ppctl.config.parallel_rules import LAYERS as OFFLOADED_LAYERS
from ppctl.config.parallel_rules import SWITCH as OFFLOADING
from ppctl.errors import LayoutError
from ppctl.layout import PipelineParallelLayerLayout, even_layout
from ppctl.layout.letters import LayerType
from ppctl.plan.sizes import TOO_MUCH, nearest_divisors
from ppctl.plan.split_options import compile_split, used_options
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues, Overrides, Violation, Violations, parse_overrides

AUTO = "auto"
"""The value of `parallel.layout` for which a layout is searched."""

MOST_LAYERS_SEARCHED, MOST_STAGES_SEARCHED, MOST_HOMES_SEARCHED = 256, 64, 2**17
"""The largest sizes that `auto` searches within seconds. The last is layers x stages x pp, since pp stages may hold the
MTP layers."""

LAYERS = ("model.num_layers", "model.mtp_num_layers")
RECOMPUTED = "train.recompute_stages"


@dataclass(frozen=True, slots=True)
class LayoutCut:
    """The layout of a run, and the equations of derived values."""

    layout: PipelineParallelLayerLayout
    derived: tuple[Derived, ...]

    @property
    def vpp(self) -> int:
        """Chunks per pp_rank."""
        return self.layout.virtual_pipeline_model_parallel_size


def derive_cut(values: ConfigValues, violations: Violations, chunks: tuple[int, str] | None = None) -> LayoutCut | None:
    """The layout; None, with the reasons in `violations`, if none fits. `chunks` is the number of chunks per rank that
    the schedule asks for, and why; the even split has as many if vpp is not set."""
    split = compile_split(values, violations)
    if split is not None:
        return _split_cut(values, split, violations)
    if used_options(values):
        return None  # the options do not fit; `compile_split` has added why
    text = values["layout"]
    # For `auto` the even split is used until `auto_layout.balanced_cut` replaces it, once the schedule is known.
    return _even_cut(values, violations, chunks) if text in (None, AUTO) else _configured_cut(values, text, violations)


def check_offloading(values: ConfigValues, stages: Sequence[Sequence[LayerType]], violations: Violations) -> None:
    """Add a violation if more layers are offloaded than any stage of the layout has."""
    number, most = values[OFFLOADED_LAYERS], max(stage.count(LayerType.decoder) for stage in stages)
    if values[OFFLOADING] and number > most:
        message = f"{OFFLOADED_LAYERS}={number} counts decoder layers of one stage, but no stage has more than {most}"
        place = values.cite(OFFLOADED_LAYERS, "pp", "vpp", "model.num_layers")
        ways = {OFFLOADED_LAYERS: most}, {OFFLOADING: False, OFFLOADED_LAYERS: 0}
        violations.append(Violation("PP-E226", OFFLOADED_LAYERS, message, place, *ways))


def check_search(values: ConfigValues, num_stages: int, violations: Violations) -> None:
    """Add a violation if the search for a layout would take more than seconds."""
    layers = values["model.num_layers"]
    homes = layers * num_stages * values["pp"] if values["model.mtp_num_layers"] else 0
    if layers > MOST_LAYERS_SEARCHED or num_stages > MOST_STAGES_SEARCHED or homes > MOST_HOMES_SEARCHED:
        message = (
            f"layout=auto searches for layouts of at most {MOST_LAYERS_SEARCHED} decoder layers on at most "
            f"{MOST_STAGES_SEARCHED} stages, and with multi-token prediction of at most {MOST_HOMES_SEARCHED} layers x "
            f"stages x pp; here there are {layers} layers on {num_stages} stages and pp {values['pp']}"
        )
        place = values.cite("layout", *LAYERS, "pp", "vpp")
        violations.append(Violation(TOO_MUCH, "search", message, place, {"layout": None}))


def _split_cut(values: ConfigValues, split: tuple[str, Derived], violations: Violations) -> LayoutCut | None:
    """The cut of the layout that Megatron's or NeMo's options were compiled to; None, with violations, if it breaks a
    rule of layouts."""
    text, equation = split
    layout = PipelineParallelLayerLayout(text, values["pp"])
    if wrong := layout.problems(values["model.num_layers"], values["model.mtp_num_layers"]):
        _adopt(violations, LayoutError(wrong), values)
        return None
    derived = [equation]
    if values["vpp"] is None:
        count, pp = len(layout.stages), values["pp"]
        derived.append(Derived("vpp", count // pp, f"vpp {count // pp} = {count} stages of the layout / pp {pp}"))
    return LayoutCut(layout, tuple(derived))


def _even_cut(values: ConfigValues, violations: Violations, chunks: tuple[int, str] | None) -> LayoutCut | None:
    """The even split; vpp is 1 unless it is set, or the schedule asks for more."""
    wanted, asks = chunks or (1, "neither a layout nor virtual_pipeline_model_parallel_size was given")
    layers, pp, vpp = values["model.num_layers"], values["pp"], values["vpp"] or wanted
    # If the sizes allow no layout at all, one of these is a typing error.
    fewer = ({"pp": min(pp, layers), "vpp": 1}, {"model.num_layers": pp * vpp})
    try:
        text = even_layout(layers, pp * vpp, values["model.mtp_num_layers"] or 0)
        layout = PipelineParallelLayerLayout(text, pp)
    except LayoutError as error:
        _adopt(violations, error, values, *fewer)
        return None
    stages = f"{pp * vpp} stage{'' if pp * vpp == 1 else 's'}"
    why = f"even split of {layers} layers over {stages} (pp {pp} x vpp {vpp})"
    idle = pp * vpp - layers
    if idle > 0:
        why += f"; {idle} {'stage has' if idle == 1 else 'stages have'} no decoder layer"
    source = values.source("layout")
    if source.startswith("derived: "):
        why += f"; {source.removeprefix('derived: ')}"
    derived = [Derived("layout", text, f"layout {text}: {why}")]
    if values["vpp"] is None:
        derived.append(Derived("vpp", vpp, f"vpp {vpp}: {asks}"))
    return LayoutCut(layout, tuple(derived))


def _configured_cut(values: ConfigValues, text: Any, violations: Violations) -> LayoutCut | None:
    """The cut of the config's layout; None, with violations, if it does not fit pp, vpp or the model."""
    pp, vpp = values["pp"], values["vpp"]
    try:
        count = len(PipelineParallelLayerLayout(text, 1).stages)
    except LayoutError as error:
        _adopt(violations, error, values)
        return None
    if count != pp * vpp if vpp is not None else count % pp:
        violations.append(_disagreement(values, count))
    layout = PipelineParallelLayerLayout(text, pp if count % pp == 0 else 1)
    problems = layout.problems(values["model.num_layers"], values["model.mtp_num_layers"])
    # Until the stages fit pp, the rule that MTP belongs in a rank's last chunk has no meaning.
    wrong = [problem for problem in problems if count % pp == 0 or problem.code != "PP-E018"]
    if wrong:
        _adopt(violations, LayoutError(wrong), values)
    if count % pp or wrong or (vpp is not None and count != pp * vpp):
        return None
    derived: tuple[Derived, ...] = ()
    if vpp is None:
        derived = (Derived("vpp", count // pp, f"vpp {count // pp} = {count} stages of the layout / pp {pp}"),)
    return LayoutCut(layout, derived)


def _adopt(violations: Violations, error: LayoutError, values: ConfigValues, *more: Overrides) -> None:
    """Add the problems of a layout error as violations, with the layout's source; their own remedies come first, then
    `more`."""
    for problem in error.problems:
        place = "\n".join(filter(None, [problem.place, f"layout from: {values.source('layout')}"]))
        own = [parse_overrides(line) for line in problem.remedy.splitlines()]
        violations.append(
            Violation(problem.code, "layout", problem.message, place, *filter(None, own), *_even(values), *more)
        )


def _disagreement(values: ConfigValues, count: int) -> Violation:
    """The violation of a layout with `count` stages where pp and vpp need another number."""
    pp, vpp = values["pp"], values["vpp"]
    if vpp is None:
        message = (
            f"the layout has {count} stages, which pp {pp} ranks cannot share evenly: vpp = {count} / {pp} is not whole"
        )
    else:
        message = f"the layout has {count} stages, but pp {pp} x vpp {vpp} = {pp * vpp}"
        message += f"; {count} stages on pp {pp} would be vpp={count // pp}" if count % pp == 0 else ""
    return Violation("PP-E220", "layout", message, values.cite("layout", "pp", "vpp"), *_agreements(values, count))


def _agreements(values: ConfigValues, count: int) -> Iterator[Overrides]:
    """Ways to make layout, pp and vpp agree: another vpp, the even split, another pp."""
    pp, vpp = values["pp"], values["vpp"]
    if count % pp == 0:
        yield {"vpp": count // pp}
    yield from _even(values)
    # A typed layout stays; a recipe's layout would be dropped for the new sizes unless it is typed, too.
    keep: Overrides = (
        {}
        if values.source("layout").startswith(PLACE)
        else {"layout": PipelineParallelLayerLayout(values["layout"], 1).canonical()}
    )
    if vpp is not None and count % vpp == 0:
        yield {"pp": count // vpp, **keep}
    for size in nearest_divisors(count, pp):
        yield {"pp": size, "vpp": count // size, **keep}


def _even(values: ConfigValues) -> Iterator[Overrides]:
    """An override that sets the layout to the even split; nothing if the layers have no even split."""
    try:
        stages = values["pp"] * (values["vpp"] or 1)
        yield {"layout": even_layout(values["model.num_layers"], stages, values["model.mtp_num_layers"] or 0)}
    except LayoutError:
        return


def check_recompute(values: ConfigValues, stages: int, violations: Violations) -> None:
    """Add a violation for stages to recompute that the pipeline does not have, or for an empty list."""
    chosen = values[RECOMPUTED]
    if chosen is None:
        return
    missing = [number for number in chosen if not 0 <= number < stages]
    if missing or not chosen:
        what = f"there is no stage {missing[0]}" if missing else "it names no stage"
        message = f"{RECOMPUTED}={chosen}: {what}; the pp x vpp stages are 0 to {stages - 1}"
        place = values.cite(RECOMPUTED, "pp", "vpp")
        violations.append(Violation("PP-E217", RECOMPUTED, message, place, {RECOMPUTED: None}))
