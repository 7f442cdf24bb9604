"""`ppctl plan --lost 1,2,4`: what a run would go on with if it lost so many nodes, as a table, data and problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ppctl.cli.console import aligned, prose, width
from ppctl.cli.plan_text import room
from ppctl.cli.search_text import number
from ppctl.config.argv import PLACE, SHORT
from ppctl.config.metadata import MOST_RANKS
from ppctl.errors import ConfigError, Problem
from ppctl.launch.planning import patience_asked
from ppctl.plan import Plan
from ppctl.plan.memory_limit import GIB
from ppctl.plan.violations import ConfigValues, overrides_text
from ppctl.search.remaining import Remaining, Whole, least_nodes, remaining


class Loss(NamedTuple):
    """A number of lost nodes with what the rest would do."""

    lost: int
    found: Remaining | None
    """None if nothing fits."""
    least: int
    """The least number of nodes on which something fits, if nothing fits those that remain; else 0."""

    def to_json(self, whole: Whole) -> dict[str, Any]:
        """The figures of the plan for the rest; without one the least number of nodes for which there is one."""
        facts: dict[str, Any] = {"lost": self.lost, "fits": self.found is not None}
        if self.found is None:
            return facts | {"least_nodes": self.least}
        nodes, words, plan, why = self.found
        report = plan.report()
        return facts | {
            "nodes": nodes,
            "words": words,
            "why": why,
            "parallel": report["parallel"],
            "num_microbatches": plan.num_microbatches,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "tokens_per_s": plan.timing.tokens_per_s,
            "of_the_whole": whole.plan.step_time_s / plan.step_time_s,
            "peak_bytes": plan.peak_bytes,
            "available_bytes": None if plan.limit is None else plan.limit.available_bytes,
        }


def numbers(option: str, text: str, example: str) -> list[int]:
    """The numbers of an option that takes several, such as `--nodes 4,8,16`. Raises ConfigError (PP-E105)."""
    words = text.split(",")
    sound = all(word.isdecimal() and 0 < int(word) <= MOST_RANKS for word in words)
    if not sound or len({*map(int, words)}) < len(words):
        wrong = "one number stands twice" if sound else "whole numbers with commas"
        raise ConfigError(Problem("PP-E105", f"{option} {text or repr(text)}: {wrong}", f"{option} {example}", PLACE))
    return [int(word) for word in words]


def losses(asked: str, values: ConfigValues, plan: Plan) -> tuple[list[dict[str, Any]], str, list[Problem]]:
    """The plans for the rest after each loss that was `asked` about, as data and as text, and what is wrong: the plan
    has too few nodes (PP-E105), or nothing fits the rest (PP-E230)."""
    whole = Whole(values, plan)
    try:
        lost = numbers("--lost", asked, "1,2")
    except ConfigError as error:
        return [], "", list(error.problems)
    if max(lost) >= whole.nodes:
        message = f"--lost {asked}: the plan has {number(whole.nodes, 'node')}, and one must be left"
        remedy = f"--lost {whole.nodes - 1}" if whole.nodes > 1 else ""
        return [], "", [Problem("PP-E105", message, remedy, values.cite("nodes", "gpus_per_node") or PLACE)]
    with patience_asked():
        answers = _answers(lost, whole)
    return [each.to_json(whole) for each in answers], _text(answers, whole, width()), _problems(answers, whole)


def _answers(lost: Sequence[int], whole: Whole) -> list[Loss]:
    found, least, answers = None, 0, dict[int, Loss]()
    for each in sorted(lost):
        left = whole.nodes - each
        if not least and (found is None or found.nodes > left):  # else the same nodes remain, or nothing fits fewer
            found = remaining(whole, left)
            least = 0 if found else least_nodes(whole, left)
        answers[each] = Loss(each, found, least)
    return [answers[each] for each in lost]


def _problems(losses: list[Loss], whole: Whole) -> list[Problem]:
    """One problem for the least loss after which nothing fits."""
    beyond = [loss for loss in losses if loss.found is None]
    if not beyond:
        return []
    loss = min(beyond)
    left, most = number(whole.nodes - loss.lost, "node"), whole.nodes - loss.least
    message = f"nothing fits the {left} that remain without {loss.lost:,} of {whole.nodes:,}"
    message += f": at least {loss.least:,} are needed for the global batch of {whole.values['gbs']:,} samples"
    remedy = f"--lost {most}" if most else ""
    return [Problem("PP-E230", message, remedy, whole.values.cite("nodes", "gpus_per_node", "gbs"))]


def _text(losses: list[Loss], whole: Whole, columns: int) -> str:
    """A row for each loss, and below the table what changes, and why there are not more replicas."""
    head = ["lost", "nodes", "dp", "pp", "microbatches", "tokens/s", "of the whole", "peak GiB", "room"]
    rows, below = [head], list[str]()
    for lost, found, least in losses:
        left = whole.nodes - lost
        if found is None:
            rows.append([f"{lost:,}", f"0 of {left:,}", *[""] * 7])
            below.append(f"  {lost:,} lost: nothing fits; {least:,} nodes are needed")
            continue
        plan = found.plan
        calls = f"{plan.gradient_accumulation_steps} x " * (plan.gradient_accumulation_steps > 1)
        figures = [f"{calls}{plan.num_microbatches}", f"{plan.timing.tokens_per_s:,.0f}"]
        figures += [f"{whole.plan.step_time_s / plan.step_time_s:.1%}", f"{plan.peak_bytes / GIB.size:.2f}"]
        nodes = f"{found.nodes:,}" + f" of {left:,}" * (found.nodes < left)
        rows.append([f"{lost:,}", nodes, str(plan.sizes.dp), str(plan.sizes.pp), *figures, room(plan)])
        words = overrides_text({SHORT.get(key, key): value for key, value in found.words.items()})
        below.append(f"  {lost:,} lost: {words}" + f"; {found.why}" * bool(found.why))
    title = f"if nodes are lost, with the global batch of {whole.values['gbs']:,} samples"
    return "\n".join([title, aligned(rows, len(head)), *prose(below, columns).splitlines()])
