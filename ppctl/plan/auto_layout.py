"""`layout=auto`: the layout that makes the simulated step shortest within the device's memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from ppctl.geometry.layers import Layer, alike
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.layout.letters import canonical_text
from ppctl.layout.rules import stages_of
from ppctl.plan.layout_choice import LayoutCut
from ppctl.plan.layout_scores import Candidate, StagePrice
from ppctl.plan.layout_search import LayoutSearch, SearchResult, Simulated
from ppctl.plan.memory import held_bytes, rank_pricer
from ppctl.plan.memory_limit import device_limit
from ppctl.plan.prices import pricer
from ppctl.plan.profile import Profile
from ppctl.plan.sizes import BatchSplit
from ppctl.plan.stages import stage_specs
from ppctl.plan.types import Derived
from ppctl.plan.violations import ConfigValues
from ppctl.schedule.action import Schedule
from ppctl.topology import ParallelSizes


def balanced_cut(
    values: ConfigValues,
    cut: LayoutCut,
    batch: BatchSplit,
    schedule: Schedule,
    sizes: ParallelSizes,
    measured: Profile | None = None,
) -> LayoutCut:
    """The best layout of as many stages as `cut` has, with what it was compared with."""
    config, model = values.config, values.config.model
    mtp, known = model.mtp_num_layers or 0, dict[Hashable, StagePrice]()
    last = len(cut.layout.stages) - 1

    def price(stage: int, first: int, count: int, has_mtp: bool) -> StagePrice:
        layers = (
            *([Layer("embedding")] if stage == 0 else []),
            *(Layer("decoder", index) for index in range(first, first + count)),
            *(Layer("mtp", index) for index in range(mtp if has_mtp else 0)),
            *([Layer("loss")] if stage == last else []),
        )
        if (key := alike(model, config.train, stage, layers)) not in known:
            held = held_bytes(config, stage, layers, sizes, batch.micro_batch_size)
            # Gradients are summed once a step: a layout is judged by its microbatches.
            known[key] = priced(stage, layers, False)._replace(reduce_s=0.0), held
        return known[key]

    priced = pricer(config, sizes, batch.micro_batch_size, measured)
    stages = stage_specs(config, cut.layout, batch.micro_batch_size, schedule.placement.kind)
    ranks = rank_pricer(config, stages, sizes, batch.micro_batch_size)(schedule)
    device, limit = device_limit(config, sizes), None
    if device is not None:
        limit = device.available_bytes - max(rank.buffer_bytes + rank.message_bytes for rank in ranks)
    result = LayoutSearch(model.num_layers, mtp > 0, schedule, stages, price, limit).run()
    layout = PipelineParallelLayerLayout(_text(result.best.candidate, mtp), values["pp"])
    derived = Derived("layout", layout.canonical(), _equation(result, mtp, batch))
    return replace(cut, layout=layout, derived=(derived, *(each for each in cut.derived if each.key != "layout")))


def _text(candidate: Candidate, mtp: int) -> str:
    return canonical_text(stages_of(candidate.counts, mtp, candidate.mtp_stage))


def _equation(result: SearchResult, mtp: int, batch: BatchSplit) -> str:
    def timed(other: Simulated) -> str:
        return f"{_text(other.candidate, mtp)} {other.step_time * batch.accumulation:.4g} s"

    beside = [f"even split {timed(result.even)}"]
    if result.runner_up is not None:
        beside.insert(0, f"next best {timed(result.runner_up)}")
    count = f"{result.simulated} layouts simulated" if result.simulated > 1 else "the only one"
    return f"layout {timed(result.best)} a step: {count}; {'; '.join(beside)}"
