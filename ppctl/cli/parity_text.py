"""The text of `ppctl parity`: two jobs' steps side by side, and where they first differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppctl.cli import ckpt_text
from ppctl.cli.console import aligned, folded, prose
from ppctl.errors import some
from ppctl.plan import Plan

NAMES = {"one-process": "one process", "cut": "the cut"}
_SHOWN_PARAMETERS = 5


def sizes_text(plan: Plan) -> str:
    """`pp 2 x vpp 2 x dp 2, 4 ranks, 1f1b`, with the axes that divide anything."""
    sizes = plan.sizes
    axes = [
        f"{axis} {size}" for axis in ("pp", "vpp", "tp", "cp", "ep", "etp", "dp") if (size := getattr(sizes, axis)) > 1
    ]
    ranks = f"{sizes.world} rank{'s' * (sizes.world > 1)}"
    return ", ".join([*([" x ".join(axes)] if axes else []), ranks, plan.schedule.name])


def text(report: Mapping[str, Any], columns: int) -> str:
    """The law, a table of steps, what differs, and the verdict at the end, in at most `columns` columns."""
    rows: list[tuple[str, ...]] = [("step", "loss A", "loss B", "", "gradient norm", "gradients")]
    rows += [_row(step) for step in report["steps"]]
    lines = []
    for step in report["steps"]:
        lines += _differences(step)
    lines += [f"{name} did not finish: {why}" for name, why in zip("AB", report["failures"], strict=True) if why]
    if report.get("checkpoints"):
        checkpoints = report["checkpoints"]
        lines += [
            f"checkpoints of step {checkpoints['step']}:",
            *ckpt_text.differences(checkpoints, _SHOWN_PARAMETERS),
            "",
        ]
    table = aligned(folded(rows, columns, ", "), 4)
    return "\n\n".join([prose(_head(report), columns), table, prose([*lines, _verdict(report)], columns)])


def _head(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, cut, path in zip("AB", report["cuts"], report["runs"], strict=True):
        lines += [f"{name}  {cut}", *([] if path is None else [f"   {path}"])]
    if keys := report.get("keys"):
        shown = some(keys, _SHOWN_PARAMETERS)
        lines.append(f"the runs compute different things: {shown} (`ppctl runs compare A B`)")
    return [*lines, _law(report)]


def _law(report: Mapping[str, Any]) -> str:
    if not report["axes"]:
        return "the same sums in the same order: every bit must be equal"
    first = report["steps"][0]["tolerance"] if report["steps"] else 0.0
    return (
        f"{', '.join(report['axes'])}: sums in another order; gradients of the first step may differ by {first:.0e} of "
        "their largest value, those of later steps by a thousand times that"
    )


def _apart(values: Sequence[float | None]) -> str:
    one, other = values
    if one is None or other is None:
        return "" if one is other else "one is missing"
    return "equal" if one == other else f"{other - one:+.2e}"


def _row(step: Mapping[str, Any]) -> tuple[str, ...]:
    losses = ["" if loss is None else f"{loss:.7f}" for loss in step["loss"]]
    gradients = step.get("gradients")
    kept = "not kept" if gradients is None else f"{gradients['equal']} equal"
    if gradients is not None:
        if step["tolerance"]:
            kept = f"{gradients['equal']} within, apart at most {gradients['largest']:.1e}"
        if gradients["different"]:
            kept += f", {len(gradients['different'])} differ"
    return (str(step["step"]), *losses, _apart(step["loss"]), _apart(step["grad_norm"]), kept)


def _differences(step: Mapping[str, Any]) -> list[str]:
    gradients, lines = step.get("gradients"), []
    if gradients is None:
        return []
    if gradients["action"] is not None:
        each = gradients["action"]
        how = "in bits alone" if each["relative"] == 0 else f"by {_share(each['relative'])} of its norm"
        lines.append(f"  first action: {each['action']}, stage {each['stage']} ({_ranks(each['ranks'])}), {how}")
    for each in gradients["different"][:_SHOWN_PARAMETERS]:
        a, b = each["values"]
        lines.append(
            f"  gradient of {each['name']}, stage {each['stage']} ({_ranks(each['ranks'])} of {each['of']}): apart by "
            f"{_share(each['relative'])} of its largest value; at {list(each['at'])} "
            f"{_number(a)} in A, {_number(b)} in B"
        )
    if len(gradients["different"]) > _SHOWN_PARAMETERS:
        lines.append(f"  and {len(gradients['different']) - _SHOWN_PARAMETERS} more gradients")
    lines += [
        f"  {run}: {name} and {owner} are the same parameter, but their gradients differ"
        for run, name, owner in gradients["unlike"]
    ]
    lines += [f"  only in one of the two: {name}" for name in gradients["missing"][:_SHOWN_PARAMETERS]]
    return [f"step {step['step']}:", *lines, ""] if lines else []


def _share(relative: float | None) -> str:
    return "more than any share" if relative is None else f"{relative:.1e}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(ranks, 8)}"


def _verdict(report: Mapping[str, Any]) -> str:
    steps = report["steps"]
    if report["same"]:
        how = "equal to the bit" if not report["axes"] else "equal within what the order of sums allows"
        count = sum("gradients" in step for step in steps)
        kept = f", and gradients of {count}" if count else "; gradients were not kept (log.gradients=1:4 keeps them)"
        return f"equal: losses and norms of {len(steps)} steps{kept}: {how}"
    wrong = next((step for step in steps if not step["same"]), None)
    if wrong is None and any(report["failures"]):
        return "different: equal as far as both went, and one of them did not finish"
    if wrong is None:
        return f"different: checkpoints of step {report['checkpoints']['step']}"
    first = f"step {wrong['step']}: loss {_apart(wrong['loss'])}"
    gradients = wrong.get("gradients")
    if gradients and (action := gradients["action"]):
        first += f"; {action['action']} on stage {action['stage']} is the first action that differs"
    if gradients and gradients["different"]:
        each = gradients["different"][0]
        first += f"; gradient of {each['name']} differs, first in stage {each['stage']} ({_ranks(each['ranks'])})"
    elif gradients and gradients["unlike"]:
        _, name, owner = gradients["unlike"][0]
        first += f"; {name} and {owner} are one parameter, and their gradients differ"
    later = [step["step"] for step in steps if step["loss"][0] != step["loss"][1]]
    if later and not report["axes"]:
        first += f"; losses differ from step {later[0]} on"
    return f"different: {first}"
