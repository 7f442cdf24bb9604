"""`ppctl search`: the fastest configurations of a model on a number of GPUs, with the proof that no other is faster.

Knows the arguments, the progress bar and the files written. Must not know how the search works (`ppctl.search`), nor
the form of the answer (`search_text`).
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any

from ppctl.cli import search_text
from ppctl.cli.console import console, note, number, width
from ppctl.cli.lost import numbers
from ppctl.cli.main import INTERRUPTED
from ppctl.cli.recipes import lines_of
from ppctl.cli.search_page import page
from ppctl.cli.timeline import obstacle
from ppctl.config.argv import PLACE, full_name, normalise
from ppctl.config.checks import beyond_limits, check
from ppctl.config.keys import text_keys
from ppctl.config.mapping import nested
from ppctl.config.metadata import MOST_RANKS
from ppctl.errors import ConfigError, MemoryPlanError, Problem, pasted
from ppctl.host.files import unused, write_atomically
from ppctl.launch.planning import composed, hides_model
from ppctl.plan.layout_choice import AUTO
from ppctl.plan.memory_limit import GRANULARITY, LIMIT, MODULES
from ppctl.plan.profile import KEY as PROFILE
from ppctl.plan.profile import Profile, read_profile
from ppctl.plan.schedule_choice import CSV, SCHEDULE
from ppctl.plan.sizes import SEQUENCE
from ppctl.plan.violations import ConfigValues, Violations, parse_overrides
from ppctl.search.answer import BAND, AnswerRow, against, as_json, moved, rows
from ppctl.search.branch import Search
from ppctl.search.refine import Refinement
from ppctl.search.space import AXES, SEARCHED, SearchSpace, contradictions, planned_problems

_MEASURED = ("tp", "cp", "ep", "mbs", GRANULARITY)
"""Keys that a profile has measured at one value only."""
_SECONDS, _REFINED = 20.0, 3  # the defaults: seconds of work to refine rows, and number of rows
_SECONDS_BETWEEN_LINES = 2.0  # about a search, on a pipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "keys whose value in the recipe stays as well, such as mbs; what is typed always stays"
    parser.add_argument("--keep", nargs="+", default=[], metavar="KEY", help=words)
    words = "numbers of nodes instead of one, such as 4,8,16: the fastest configuration on each"
    parser.add_argument("--nodes", metavar="N,N,...", help=words)
    words = "show where this configuration stands, and what one change would give: 'tp=8 pp=4'"
    parser.add_argument("--against", metavar="'KEY=VALUE ...'", help=words)
    words = f"plan all rows again with layout=auto and more (default: {_REFINED} rows, about {_SECONDS:g} s; 0: none)"
    parser.add_argument("--refine", type=float, metavar="SECONDS", help=words)
    parser.add_argument("--html", metavar="FILE.html", help="draw memory against seconds of a step into a page")
    parser.add_argument("--write", metavar="FILE.yaml", help="write the first configuration as a recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Search. Exit codes: 0 found, 2 problems of the config, 4 nothing fits the memory, 130 interrupted."""
    gc.disable()  # plans are many small tuples without cycles
    if problems := [*_unwritable(args)]:
        raise ConfigError(problems)
    values, measured = _values(args)
    if args.nodes is not None:
        return _frontier(args, values, measured)
    asked = values if args.against is None else _asked(args.against, values)
    search = Search(_space(args, values), measured)
    interrupted = _to_the_end(search)
    if not search.found and not interrupted:
        raise _nothing(args, search)
    listed, firsts = rows(search), dict[tuple[str, ...], int]()
    with suppress(KeyboardInterrupt):  # the answer is complete without refinement
        firsts = {} if interrupted else moved(search, listed)
    lines = [search_text.line(args.line.overrides, search.space, row.planned.configuration) for row in listed]
    changes = against(search, asked) if asked is not values and listed else []
    if not args.json:
        print(search_text.text(search, listed, firsts, lines, width()), flush=True)
        if changes:
            print(f"\n{search_text.compared(search, changes)}", flush=True)
    if args.write and listed:
        write_atomically(Path(args.write), recipe(search))
        note(f"note: wrote {args.write}; `ppctl train +recipe={pasted(args.write)}` trains it")
    if args.html:
        write_atomically(Path(args.html), page(search))
        note(f"note: wrote {args.html}")
    again = _refined(args, search, [] if interrupted else listed)
    if args.json:
        also: dict[str, Any] = {"against": [each._asdict() for each in changes], "refined": again}
        also["moved"] = [{"slower": slower, "first": first + 1} for slower, first in firsts.items()]
        print(json.dumps(as_json(search, listed, lines) | also, indent=1))
    elif again:
        print(f"\n{search_text.refinement(again)}")
    return INTERRUPTED if interrupted else 0


def _refined(args: argparse.Namespace, search: Search, listed: list[AnswerRow]) -> dict[str, Any] | None:
    """Plan the best rows again until --refine's work is used up, or Ctrl-C. Returns `refined` of --json, or None."""
    seconds, most = (_SECONDS, _REFINED) if args.refine is None else (args.refine, len(listed))
    if not seconds or not listed:
        return None
    again, answer = Refinement(search.space, listed[:most], seconds), dict[str, Any](complete=False, best=None)
    note(f"note: refining, work of about {seconds:g} s (--refine SECONDS); Ctrl-C ends it")
    with suppress(KeyboardInterrupt):
        answer["complete"] = again.run()
    answer |= {"rows": len(again.rows), "plans": again.plans}
    if (best := again.best) is not None:
        line = search_text.line(args.line.overrides, search.space, best.planned.configuration, best.words)
        answer["best"] = {"row": best.row + 1, "words": best.words, "line": line}
        answer["best"]["step_time_s"] = seconds = best.planned.plan.step_time_s
        answer["best"]["faster"] = search.found[0].plan.step_time_s / seconds - 1
    return answer


def _frontier(args: argparse.Namespace, values: ConfigValues, measured: Profile | None) -> int:
    """Search on each number of nodes, and print the fastest configuration of each."""
    found: list[tuple[Search, list[AnswerRow]]] = []
    interrupted = False
    for nodes in numbers("--nodes", args.nodes, "4,8,16"):
        search = Search(_space(args, values, nodes), measured)
        interrupted = _to_the_end(search, alone=True)
        found.append((search, rows(search)[:1]))
        if interrupted:
            break
    if not interrupted and not any(listed for _, listed in found):
        raise _nothing(args, max((search for search, _ in found), key=lambda search: search.space.world))
    lines = [
        [search_text.line(_on(args, of.space.values["nodes"]), of.space, row.planned.configuration) for row in listed]
        for of, listed in found
    ]
    if args.json:
        each = [as_json(*answer, own) for answer, own in zip(found, lines, strict=True)]
        print(json.dumps(each, indent=1))
    else:
        print(search_text.frontier(found, width()), *chain(*lines), sep="\n")
    return INTERRUPTED if interrupted else 0


def _on(args: argparse.Namespace, nodes: int) -> list[str]:
    """The typed words, with another number of nodes."""
    return [*(word for word in args.line.overrides if not word.startswith("launch.nodes=")), f"launch.nodes={nodes}"]


def _asked(text: str, values: ConfigValues) -> ConfigValues:
    """`values` with the overrides of --against. Raises ConfigError with all problems if a rule forbids them."""
    try:
        line = normalise(shlex.split(text), {}, "search")
    except ValueError as error:  # an unclosed quote
        raise ConfigError(Problem("PP-E105", f"--against {text!r}: {error}", "--against 'tp=8 pp=4'", PLACE)) from None
    asked = parse_overrides(" ".join(line.overrides))
    searched = {full_name(key) for key in (*SEARCHED, SEQUENCE, MODULES)}
    sizes = {full_name(key) for key in (*AXES, "vpp", "mbs")}
    wrong = [f"{key} is not searched" for key in asked if key not in searched]
    for key in sizes & {*asked}:
        if asked[key] is not None and not (type(asked[key]) is int and 1 <= asked[key] <= MOST_RANKS):
            wrong.append(f"{key} must be a whole number from 1 on")
    if line.problems or line.rest or wrong or not asked:
        message = f"--against {text!r}: {next(iter(wrong), 'it has words that are no KEY=VALUE')}"
        raise ConfigError([*line.problems, Problem("PP-E105", message, "--against 'tp=8 pp=4'", PLACE)])
    follows = {SEQUENCE: asked[tp] != 1} if (tp := full_name("tp")) in asked else {}
    changed = values.overridden({**follows, **asked})
    if problems := check(changed.config, changed.provenance) or planned_problems(changed):
        raise ConfigError(problems)
    return changed


def _to_the_end(search: Search, *, alone: bool = False) -> bool:
    """Search and draw the progress; `alone` leaves out other divisions of the ranks. Returns whether interrupted."""
    try:
        with _progress() as show:
            for _ in search.run():
                show(search)
            for _ in chain(() if alone else search.other_divisions(BAND), search.simpler()):
                show(search)
    except KeyboardInterrupt:
        return True
    return False


@contextmanager
def _progress() -> Iterator[Callable[[Search], None]]:
    """Yield a function that shows how many configurations are decided, and the best, as a bar or (in a file) lines."""
    if not sys.stderr.isatty():
        last = monotonic()

        def tell(search: Search) -> None:
            nonlocal last
            if monotonic() - last >= _SECONDS_BETWEEN_LINES:
                note(search_text.so_far(search))
                last = monotonic()

        yield tell
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("dividing the ranks", total=None)

        def show(search: Search) -> None:
            counts, text = search.counts, search_text.so_far(search)
            bar.update(task, total=counts.total or None, completed=counts.total - counts.undecided, description=text)

        yield show


# What is searched


def _values(args: argparse.Namespace) -> tuple[ConfigValues, Profile | None]:
    """(the values to search from, measured costs). Raises ConfigError with all problems."""
    config, problems = composed(args.line)
    values = ConfigValues(config.config, config.provenance)
    if problems and hides_model(config, problems):
        raise ConfigError(problems)
    problems += _impossible(values, args)
    space = _space(args, values, None if args.nodes is None else max(numbers("--nodes", args.nodes, "4,8,16")))
    of_values = {problem.message for problem in check(values.config, values.provenance)}
    problems = [problem for problem in problems if problem.message not in of_values]
    wrong = check(space.neutral.config, space.neutral.provenance)
    if wrong and (problems or beyond_limits(space.neutral.config) or space.first is None):
        problems += wrong  # otherwise these are problems of values that the search replaces
    violations: Violations = []
    measured = read_profile(values, violations)
    if problems or violations:
        raise ConfigError(list(dict.fromkeys([*problems, *(planned_problems(values) if violations else ())])))
    return values, measured


def _space(args: argparse.Namespace, values: ConfigValues, nodes: int | None = None) -> SearchSpace:
    """The configurations on `nodes` nodes (None: as the config says). Keys that are typed or named by --keep, or that
    a profile has measured at one value, keep their value."""
    kept = [*args.keep, *(_MEASURED if values[PROFILE] is not None else ())]
    return SearchSpace(values if nodes is None else values.overridden({"nodes": nodes}), kept)


def _impossible(values: ConfigValues, args: argparse.Namespace) -> Iterator[Problem]:
    """Problems that make a search impossible."""
    if values["nodes"] is None and values["gpus_per_node"] is None:
        words = "nodes=1 gpus_per_node=8" if args.nodes is None else "gpus_per_node=8"
        yield Problem("PP-E228", "a search needs the number of GPUs", words, PLACE)
    if values[LIMIT] is None:
        yield Problem("PP-E228", f"a search needs {LIMIT}, in which plans must fit", f"{LIMIT}=80GiB", PLACE)
    for key, usual in (("layout", "null"), (SCHEDULE, "1f1b")):
        if values[key] == AUTO:
            message = f"{key}={AUTO} is a search of its own for one configuration: add it to a line of the answer"
            yield Problem("PP-E228", message, f"{key}={usual}", values.cite(key))
    if values[CSV] is not None:
        message = f"{CSV}={values[CSV]} has the order of one pipeline and one batch, but a search tries many"
        yield Problem("PP-E228", message, f"{CSV}=null", values.cite(CSV))
    for key in args.keep:
        if full_name(key) not in map(full_name, SEARCHED):
            known = ", ".join(SEARCHED)
            yield Problem("PP-E228", f"--keep {key}: {known} are searched, but {key} is not", "--keep mbs", PLACE)


def _nothing(args: argparse.Namespace, search: Search) -> ConfigError | MemoryPlanError:
    """The error of a search that found nothing: typed values contradict each other, or nothing fits the memory."""
    space, counts = search.space, search.counts
    if not counts.memory and not search.over:
        return ConfigError(contradictions(space))
    gpus = number(space.world, "GPU")
    message = f"none of {number(counts.total, 'configuration')} fits {gpus} of {space.values[LIMIT]}"
    message += f"; {number(counts.rules, 'is', 'are')} against a rule" * bool(counts.rules)
    tried, found = _larger(args, search)
    message += f"; nothing fits {', '.join(map(str, sorted(tried)))} nodes either" * bool(tried)
    remedy = ""
    if found is not None:
        nodes = found.space.values["nodes"]
        remedy = search_text.line(_on(args, nodes), found.space, found.found[0].configuration)
        message += f"; on {nodes:,} nodes, {found.space.world:,} GPUs, the remedy fits"
    return MemoryPlanError(Problem("PP-E803", message, remedy, space.values.cite("nodes", "gpus_per_node", LIMIT)))


def _larger(args: argparse.Namespace, search: Search) -> tuple[list[int], Search | None]:
    """(larger numbers of nodes that were tried without success, the search with the least number that fits or None).
    Doubles the number, then tries some between the last two."""
    values, tried = search.space.values, list[int]()
    least, best = values["nodes"] or 1, None

    def tries(numbers: Iterable[int]) -> Search | None:
        for nodes in numbers:
            more = Search(_space(args, values, nodes), search.tree.measured)
            if any(show(each) or each.found for each in more.run()):
                return more
            tried.append(nodes)
        return None

    with suppress(KeyboardInterrupt), _progress() as show:  # Ctrl-C leaves the answer that nothing fits
        if best := tries(least * 2**power for power in range(1, 7)):
            most, least = best.space.values["nodes"], max(tried, default=least)
            step = -(-(most - least) // 8)
            best = tries(range(least + step, most, step)) or best
    return tried, best


# What is written


def _unwritable(args: argparse.Namespace) -> Iterator[Problem]:
    """The problems of --write, --html, --nodes and --refine, which are found before a search takes a minute."""
    for option, name, code in (("--write", Path("found.yaml"), "PP-E127"), ("--html", Path("found.html"), "PP-E129")):
        path = Path(getattr(args, option[2:]) or "")
        reason = obstacle(path) if path.suffix == name.suffix else f"its name must end in {name.suffix}"
        if not reason and option == "--write" and path.exists():
            reason, name = "it exists, and a search replaces no recipe", path
        if reason and getattr(args, option[2:]) is not None:
            yield Problem(code, f"{path} cannot be written: {reason}", pasted(option, unused(name)), PLACE)
    alone = [option for option in ("against", "html", "refine", "write") if getattr(args, option)]
    if args.nodes is not None and alone:
        message = f"--{alone[0]} is for one number of nodes, but --nodes searches several"
        yield Problem("PP-E105", message, "nodes=4", PLACE)
    if not 0 <= (args.refine or 0) <= 86_400:
        yield Problem("PP-E105", f"--refine {args.refine:g}: it must be 0 s to a day", "--refine 60", PLACE)


def recipe(search: Search) -> str:
    """The fastest configuration as a recipe: every value that is not the default, with its source."""
    space, first = search.space, search.found[0]
    values, found = space.values_of(first.configuration), {full_name(key) for key in space.words(first.configuration)}
    gpus, rate = number(space.world, "GPU"), f"{first.plan.timing.tokens_per_s:,.0f} tokens/s planned"
    lines = [f"# Found by ppctl search: {search_text.sizes(first.configuration)} on {gpus}, {rate}."]
    lines.append(f"# {search_text.counts(search)}")
    kept, sources = dict[str, Any](), dict[str, str]()
    for key, info in text_keys().items():
        source, value = values.source(key), values.config[key]
        skipped = source == "default" or source.startswith(("derived", "model.from=")) or "." not in key
        if value != info.default and (key in found or not skipped) and key != "published":
            kept[key], sources[key] = value, "found by ppctl search" if key in found else source
    return "\n".join([*lines, *lines_of(nested(kept), sources)]) + "\n"
