"""`ppctl plan --lost 1,2,4`: the plan that a run would go on with after losing so many nodes, as text and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppctl.cli.console import aligned, number, prose, width
from ppctl.config.argv import PLACE, SHORT
from ppctl.config.metadata import MOST_RANKS
from ppctl.errors import ConfigError, Problem
from ppctl.launch.planning import patience_asked
from ppctl.plan import Plan
from ppctl.plan.memory_limit import GIB
from ppctl.plan.violations import ConfigValues, overrides_text
from ppctl.search.remaining import Whole, least_nodes, nothing_fits, remaining


def numbers(option: str, text: str, example: str) -> list[int]:
    """The numbers of an option that takes several, such as `--nodes 4,8,16`. Raises ConfigError (PP-E105)."""
    words = text.split(",")
    sound = all(word.isdecimal() and 0 < int(word) <= MOST_RANKS for word in words)
    if not sound or len({*map(int, words)}) < len(words):
        wrong = "one number stands twice" if sound else "takes whole numbers from 1 on, with commas between"
        example = ",".join(dict.fromkeys(str(int(word)) for word in words)) if sound else example
        raise ConfigError(Problem("PP-E105", f"{option} {text or repr(text)}: {wrong}", f"{option} {example}", PLACE))
    return [int(word) for word in words]


def losses(asked: str, values: ConfigValues, plan: Plan) -> tuple[list[dict[str, Any]], str, list[Problem]]:
    """(data, text, problems) of the plans for the remaining nodes after each loss in `asked`. Problems: the plan has
    too few nodes (PP-E105), or nothing fits the remaining nodes (PP-E230)."""
    whole = Whole(values, plan)
    try:
        lost = numbers("--lost", asked, "1,2" if whole.nodes > 2 else "1")
    except ConfigError as error:
        return [], "", list(error.problems)
    if max(lost) >= whole.nodes:
        message = f"--lost {asked}: the plan has {number(whole.nodes, 'node')}, but one must be left"
        remedy = f"--lost {whole.nodes - 1}" if whole.nodes > 1 else ""
        return [], "", [Problem("PP-E105", message, remedy, values.cite("nodes", "gpus_per_node") or PLACE)]
    with patience_asked():
        rows = _rows(lost, whole)
    beyond = [row for row in rows if not row["fits"]]
    wrong = [nothing_fits(whole, whole.nodes - min(row["lost"] for row in beyond))] if beyond else []
    return rows, _text(rows, whole, width()), wrong


def _rows(lost: Sequence[int], whole: Whole) -> list[dict[str, Any]]:
    """The plan's figures for the remaining nodes after each loss; without a plan, the fewest nodes that have one."""
    found, least, rows = None, 0, dict[int, dict[str, Any]]()
    for each in sorted(lost):
        left = whole.nodes - each
        # otherwise the plan found last fits, too, or nothing fits so few nodes
        if not least and (found is None or found.nodes > left):
            found = remaining(whole, left)
            least = 0 if found else least_nodes(whole, left)
        rows[each] = {"lost": each, "left": left, "fits": found is not None}
        if found is None:
            rows[each] |= {"least_nodes": least}
            continue
        plan = found.plan
        rows[each] |= {
            **{"nodes": found.nodes, "words": found.words, "why": found.why, "parallel": plan.report()["parallel"]},
            "num_microbatches": plan.num_microbatches,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps,
            "tokens_per_s": plan.timing.tokens_per_s,
            "of_the_whole": whole.plan.step_time_s / plan.step_time_s,
            "peak_bytes": plan.peak_bytes,
            "available_bytes": None if plan.limit is None else plan.limit.available_bytes,
        }
    return [rows[each] for each in lost]


def _text(rows: Sequence[dict[str, Any]], whole: Whole, columns: int) -> str:
    """A row for each loss; below the table the changes, and what limits the number of replicas."""
    head = ["lost", "nodes", "dp", "pp", "microbatches", "tokens/s", "of the whole", "peak GiB", "room"]
    table, below = [head], list[str]()
    for row in rows:
        lost, left = f"{row['lost']:,}", f" of {row['left']:,}"
        if not row["fits"]:
            table.append([lost, f"0{left}", *[""] * 7])
            below.append(f"  {lost} lost: nothing fits; {row['least_nodes']:,} nodes are needed")
            continue
        calls, most = row["gradient_accumulation_steps"], row["available_bytes"]
        nodes = f"{row['nodes']:,}" + left * (row["nodes"] < row["left"])
        cells = [lost, nodes, *(str(row["parallel"][axis]) for axis in ("dp", "pp"))]
        cells += [f"{calls} x " * (calls > 1) + str(row["num_microbatches"]), f"{row['tokens_per_s']:,.0f}"]
        cells += [f"{row['of_the_whole']:.1%}", f"{row['peak_bytes'] / GIB.size:.2f}"]
        table.append([*cells, "" if most is None else f"{1 - row['peak_bytes'] / most:.0%}"])
        words = overrides_text({SHORT.get(key, key): value for key, value in row["words"].items()})
        below.append(f"  {lost} lost: {words}" + f"; {row['why']}" * bool(row["why"]))
    title = f"if nodes are lost, with the global batch of {whole.values['gbs']:,} samples"
    return "\n".join([title, aligned(table, len(head)), *prose(below, columns).splitlines()])
