"""Constants of plans with cost.stack=megatron, fitted to published steps, with whole groups of rows held out in turn.

    python benchmarks/calibrate.py            # a minute; prints the tables of benchmarks/results-plan-2026-11-26.md

A row's planned seconds are cut into terms once: along the critical path of its simulated schedule, how much each
constant is worth. A fit then takes no plans. Whole plans, with the constants that stand in `ppctl.host.accelerators`,
are compared at the end. No constant belongs to a model; rows are set aside by the rule of `newest` alone.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from published_rows import Setting, config_of, fitting, newest, settings

from ppctl.config.schema import RunConfig
from ppctl.cost.times import optimizer_seconds
from ppctl.host import accelerators
from ppctl.plan import Plan
from ppctl.plan.memory import device_of
from ppctl.plan.prices import pricer, simulation_costs
from ppctl.schedule.action import Op
from ppctl.schedule.simulate import critical_path, simulate

PRODUCTS = ("matmul", "fp8_matmul")
SCORES = ("attention", "attention_backward")
BLACKWELL = ("b200", "gb200")
AT_MOST = {"products": 0.75, "memory": 0.92, "B200": 1.0, "h100 of 500 W": 1.0}
"""Shares that no kernel passes: of products what cuBLAS reaches on an idle H100, of memory what a copy reaches."""
FITTED = ("products", "attention", "memory", "kernel", "B200", "h100 of 500 W")
AS_LONG = 0.07
"""Errors below this count like squares, larger ones as they are: no single row pulls the fit."""
HELD_TO_START = 0.003
"""Weight of staying at the constants that stand, where rows say nothing."""


class Row(NamedTuple):
    """A published step, and its planned seconds by what they scale with."""

    setting: Setting
    seen: float
    """Measured seconds of a step."""
    planned: float
    tflops: float
    """Of the plan, per device."""
    products: float
    scores: float
    memory: float
    kernels: float
    rest: float


def decomposed(setting: Setting) -> Row:
    """The row's planned seconds along the critical path of its schedule, cut into terms."""
    plan, recompute = fitting(setting)
    config = config_of(setting, recompute)[0]
    seconds = _closed_form(plan, config)
    stands, whole = accelerators.EFFICIENCY[accelerators.MEGATRON], seconds()

    def worth(*fields: str) -> float:
        """Seconds that scale with these constants, by making all of them 2 % slower."""
        slower = {
            name: getattr(stands, name) * 1.02 if name == "kernel" else getattr(stands, name) / 1.02 for name in fields
        }
        accelerators.EFFICIENCY[accelerators.MEGATRON] = stands._replace(**slower)
        try:
            return (seconds() - whole) / 0.02
        finally:
            accelerators.EFFICIENCY[accelerators.MEGATRON] = stands

    terms = [worth(*PRODUCTS), worth(*SCORES), worth("memory"), worth("kernel")]
    tokens = config.train.global_batch_size * config.data.seq_length / plan.sizes.world
    rest = max(0.0, whole - sum(terms))
    return Row(setting, tokens / setting.tokens, plan.step_time_s, plan.timing.tflops_per_device, *terms, rest)


def _closed_form(plan: Plan, config: RunConfig) -> Callable[[], float]:
    """Return a function that prices a step along the critical path of `plan`, with the constants of that moment."""
    path = critical_path(simulate(plan.schedule, simulation_costs(plan.timing.stages, plan.stages)))
    counts = Counter((span.action.op, span.action.stage) for span in path)
    waits = [
        min(before.action.stage, after.action.stage)
        for before, after in pairwise(path)
        if after.start > before.end + 1e-12
    ]
    device, last = device_of(config), len(plan.stages) - 1

    def seconds() -> float:
        price = pricer(config, plan.sizes, config.train.micro_batch_size)
        costs = [price(index, stage.layers, index == last) for index, stage in enumerate(plan.stages)]
        of = {
            Op.F: [cost.forward_s for cost in costs],
            Op.I: [cost.input_grad_s for cost in costs],
            Op.W: [cost.weight_grad_s for cost in costs],
            Op.B: [cost.backward_s for cost in costs],
            Op.REDUCE_GRAD: [cost.reduce_s for cost in costs],
        }
        call = sum(count * of[op][stage] for (op, stage), count in counts.items())
        call += sum(costs[stage].message_s for stage in waits)
        step = max(
            optimizer_seconds(rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes, device, "megatron")
            for rank in plan.pp_ranks
        )
        return plan.gradient_accumulation_steps * call + step

    return seconds


Constants = dict[str, float]


def standing() -> Constants:
    """The constants as they stand."""
    stands = accelerators.EFFICIENCY[accelerators.MEGATRON]
    clocks = [accelerators.DEVICES[name].sustained for name in ("gb200", "h100_500w")]
    return dict(zip(FITTED, (stands.matmul, stands.attention, stands.memory, stands.kernel, *clocks), strict=True))


def predicted(row: Row, slower: Constants) -> float:
    """Seconds of a step if each constant makes its terms so many times slower."""
    clock = slower["B200"] if row.setting.gpu in BLACKWELL else 1.0
    clock *= slower["h100 of 500 W"] if row.setting.gpu == "h100_500w" else 1.0
    computed = clock * (slower["products"] * row.products + slower["attention"] * row.scores)
    return computed + slower["memory"] * row.memory + slower["kernel"] * row.kernels + row.rest


def fit(rows: Sequence[Row]) -> Constants:
    """How many times slower than they stand the constants make their terms, by least absolute relative errors."""
    stands = standing()
    least = np.array([np.log(stands[name] / AT_MOST[name]) if name in AT_MOST else -2.0 for name in FITTED])
    seen, logs = np.log([row.seen for row in rows]), np.zeros(len(FITTED))

    def errors(logs: np.ndarray) -> np.ndarray:
        slower = dict(zip(FITTED, np.exp(logs), strict=True))
        return np.log([predicted(row, slower) for row in rows]) - seen

    for _ in range(40):
        error, small = errors(logs), 1e-4
        slopes = np.array([(errors(logs + small * unit) - error) / small for unit in np.eye(len(logs))]).T
        weights = 1 / np.maximum(np.abs(error), AS_LONG)
        hessian = slopes.T @ (slopes * weights[:, None]) + HELD_TO_START * len(rows) * np.eye(len(logs))
        gradient = slopes.T @ (weights * error) + HELD_TO_START * len(rows) * logs
        free = ~((logs <= least + 1e-9) & (gradient > 0))
        step = np.zeros(len(logs))
        step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
        logs = np.maximum(logs - 0.7 * step, least)
    return dict(zip(FITTED, map(float, np.exp(logs)), strict=True))


Predict = Callable[[Sequence[Row]], Callable[[Row], float]]
"""Rows to learn from -> a function from a row to its seconds."""


def by_fit(rows: Sequence[Row]) -> Callable[[Row], float]:
    """Seconds by the constants fitted to `rows`."""
    slower = fit(rows)
    return lambda row: predicted(row, slower)


def by_rate(rows: Sequence[Row]) -> Callable[[Row], float]:
    """Seconds by one rate in TFLOPS for each (GPU, precision, dense or MoE); where `rows` have no such, of the same
    precision and kind on any GPU, then of the same kind."""

    def kind(row: Row) -> tuple[str, str, bool]:
        return row.setting.gpu, row.setting.precision, row.setting.model.startswith("llama")

    def seconds(row: Row) -> float:
        work = row.tflops * row.planned
        for skipped in range(3):
            like = [each for each in rows if kind(each)[skipped:] == kind(row)[skipped:]]
            if like:
                return work / statistics.median(each.tflops * each.planned / each.seen for each in like)
        return row.seen

    return seconds


def folds(rows: Sequence[Row], by: Callable[[Row], str], learn: Predict) -> dict[str, list[float]]:
    """Held-out group -> the relative errors of its tokens per second, learned from all other groups."""
    found: dict[str, list[float]] = {}
    for name in sorted({by(row) for row in rows}):
        seconds = learn([row for row in rows if by(row) != name])
        found[name] = [row.seen / seconds(row) - 1 for row in rows if by(row) == name]
    return found


GROUPS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.setting.model,
    "device": lambda row: row.setting.gpu,
    "release": lambda row: row.setting.release,
}


def words(errors: Iterable[float]) -> str:
    """Cells of a table: number, median and worst error, share within 25 %."""
    sizes = [abs(error) for error in errors]
    near = sum(size <= 0.25 for size in sizes) / len(sizes)
    return f"{len(sizes)} | {statistics.median(sizes):.1%} | {near:.0%} | {max(sizes):.0%}"


def main() -> int:
    found, missed = settings()
    chosen = newest(found)
    rows = [decomposed(setting) for setting in chosen]
    shown = Counter(missed.values())
    print(
        f"{len(found) + len(missed)} rows, {len(found)} with a plan, {len(rows)} of them the newest of their setting."
    )
    print("\nNot planned:\n")
    for reason, count in shown.items():
        names = sorted({name.split(" DGX")[0].rsplit(" ", 1)[0] for name, why in missed.items() if why == reason})
        print(f"* {count}: {reason} ({', '.join(names)})")
    slower = fit(rows)
    print("\n| constant | stands | fitted to all rows |\n|---|--:|--:|")
    for name, value in standing().items():
        by = slower[name] if name == "kernel" else 1 / slower[name]
        print(f"| {name} | {value:.3g} | {value * by:.3g} |")
    print("\n| held out | by | rows | median | within 25 % | worst |\n|---|---|--:|--:|--:|--:|")
    for group, by_name in GROUPS.items():
        for title, learn in (("fit", by_fit), ("baseline", by_rate)):
            errors = folds(rows, by_name, learn)
            print(f"| each {group} | {title} | {words(error for each in errors.values() for error in each)} |")
            if title == "fit":
                for name, each in errors.items():
                    print(f"| {name} | fit | {words(each)} |")
    print("\nWhole plans with the constants that stand:\n")
    print("| row | measured | planned | error | held out by model |\n|---|--:|--:|--:|--:|")
    held = {id(row): error for row, error in _one_by_one(rows)}
    for row in rows:
        error, tokens = row.seen / row.planned - 1, row.setting.tokens
        numbers = f"{tokens:,.0f} | {tokens * (1 + error):,.0f} | {error:+.1%} | {held[id(row)]:+.1%}"
        print(f"| {row.setting.name} | {numbers} |")
    print(f"\nAll: {words(row.seen / row.planned - 1 for row in rows)}")
    return 0


def _one_by_one(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    errors = folds(rows, GROUPS["model"], by_fit)
    return [(row, errors[row.setting.model].pop(0)) for row in rows]


if __name__ == "__main__":
    raise SystemExit(main())
