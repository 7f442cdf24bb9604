"""From a command line to a plan: composes, checks and plans as far as possible, and reports every problem once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Timer
from typing import Any

from ppctl.config.argv import Arguments, full_name, retyped, typed_again
from ppctl.config.checks import is_size
from ppctl.config.compose import Composed, RefusedError, compose
from ppctl.config.keys import keys_with, text_keys
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, Problem
from ppctl.plan import Plan, plan_checked
from ppctl.plan.memory_limit import LIMIT
from ppctl.plan.violations import MEMORY

_PATIENCE_S = 1.0


def planned(
    overrides: Sequence[str] | Arguments, *, for_training: bool = False
) -> tuple[Composed, Plan | None, list[Problem]]:
    """The config that words or sorted arguments describe, its plan if it has one, and all problems of both."""
    config, problems = composed(overrides, for_training=for_training)
    if problems and hides_model(config, problems):
        return config, None, list(dict.fromkeys(problems))
    plan, problems = plan_of(config, problems)
    problems = [_with_search(problem, config.config, overrides) for problem in problems]
    return config, plan, [problem for problem in problems if not _follows(problem, problems)]


def _with_search(problem: Problem, config: RunConfig, typed: Sequence[str] | Arguments) -> Problem:
    """`problem`; if a larger device is its only remedy, with a search for other sizes as the first one."""
    alone = problem.code == MEMORY and problem.remedy.startswith(f"{LIMIT}=")
    if not (alone and isinstance(typed, Arguments) and config.launch.nodes and config.launch.gpus_per_node):
        return problem
    from ppctl.search.space import GROUPS  # imports the search, rarely needed

    sizes = {full_name(key) for group in GROUPS.values() for key in group} | {*keys_with("layout"), "scale"}
    words = [each for each in typed.overrides if each.partition("=")[0] not in sizes]
    return replace(problem, remedy=f"{typed_again('search', replace(typed, overrides=words))}\n{problem.remedy}")


def _follows(problem: Problem, problems: Sequence[Problem]) -> bool:
    """Whether a problem is about a key that has its default only because its flag was refused."""
    refused = [each for each in problems if each.code == "PP-E107"]
    defaults = [line.partition(" =")[0] for line in problem.place.splitlines() if line.endswith(" (default)")]
    return problem not in refused and any(key in f"{each.message}{each.remedy}" for key in defaults for each in refused)


def composed(overrides: Sequence[str] | Arguments, *, for_training: bool = False) -> tuple[Composed, list[Problem]]:
    """The config that words describe, as far as it could be composed, and its problems."""
    try:
        return compose(
            overrides,
            for_training=for_training,
            read_model=_read_model,
            count_tokens=_count_tokens,
            count_samples=counted_samples,
        ), []
    except RefusedError as error:
        return error.composed, list(error.problems)


_SHAPES = ("model.", "parallel.")


def hides_model(config: Composed, problems: Sequence[Problem]) -> bool:
    """Whether further problems would mislead, since the recipe, the model's directory or a size could not be read."""
    unread = {each.place.partition(" ")[0] for each in problems if each.code == "PP-E102"} & text_keys().keys()
    if any(each.code == "PP-E104" for each in problems) or any(
        is_size(key) or key.startswith(_SHAPES) for key in unread
    ):
        return True
    given = config.config.model.from_ is not None
    return given and not any(source.startswith("model.from=") for source in config.provenance.values())


def plan_of(
    config: Composed, problems: Sequence[Problem], *, before: Plan | None = None
) -> tuple[Plan | None, list[Problem]]:
    """(the plan of a composed config, all problems including the known ones). `before` is the plan of the run's last
    start, whose schedule is kept if a search found it."""
    try:
        with patience_asked():
            plan = plan_checked(config.config, config.provenance, problems, before=before)
    except ConfigError as error:
        return None, list(dict.fromkeys(error.problems))
    return plan, list(dict.fromkeys(plan.problems))


@contextmanager
def patience_asked() -> Iterator[None]:
    """While entered, print after a second that planning takes longer, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    text = "note: still planning; a search for a layout, a schedule or a cut takes seconds"
    waiting = Timer(_PATIENCE_S, print, (text,), {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def _read_model(source: str, implementation: str, overrides: Mapping[str, str], lora: Mapping[str, Any]) -> Any:
    from ppctl.launch.weights import values_of  # imports ppctl.families: a tenth of a plan's time, rarely needed

    return values_of(source, implementation, overrides, lora)


def _count_tokens(tokenizer: str) -> int:
    from ppctl.data.load import load_tokenizer  # numpy

    return load_tokenizer(tokenizer).vocab_size


def counted_samples(config: RunConfig) -> int:
    """The samples of an epoch, after which every sample has come. Raises PpctlError for data that cannot be read."""
    from ppctl.data.load import load_data  # numpy

    return load_data(config.data).training.span(config.data.seq_length)


def settings_of_others(config: RunConfig, arguments: Sequence[str], system: str = "") -> list[Problem]:
    """The problem of settings that take effect only in jobs of other systems than `system` (empty: no job)."""
    keys = {n: k.facts.jobs for n, k in keys_with("jobs").items() if config[n] != k.default and k.allows(config[n])}
    keys |= {f"launch.target={on}": on} if (on := config.launch.target) in ("slurm", "kubernetes") else {}
    foreign = {name: jobs for name, jobs in keys.items() if system not in jobs.split()}
    if not foreign:
        return []
    others = list(dict.fromkeys(" ".join(foreign.values()).split()))
    names = f"{', '.join(foreign)} {'takes' if len(foreign) == 1 else 'take'} effect"
    if all("node" in jobs.split() for jobs in foreign.values()):
        remedy = f"ppctl node --rendezvous HOST:29500 {retyped(arguments)}"
        jobs = " and in submitted jobs" if len(others) > 2 else f" and in jobs of {others[-1]}" * (others != ["node"])
        return [Problem("PP-E629", f"{names} with `ppctl node`{jobs} only", remedy, "launch")]
    on = "kubernetes" if "kubernetes" in (system, others[0]) else "slurm"
    kept = [word for word in arguments if system != on or word.partition("=")[0] not in foreign]
    where = f"jobs of {' and '.join(others)} only" if system in ("slurm", "kubernetes") else "a submitted job only"
    remedy = typed_again("submit", kept) + " --on kubernetes" * (on == "kubernetes")
    return [Problem("PP-E629", f"{names} in {where}", remedy, "launch")]


def without_memory(problems: Sequence[Problem]) -> list[Problem]:
    """The problems that are not about memory."""
    return [problem for problem in problems if problem.code != MEMORY]


def only_memory(problems: Sequence[Problem]) -> bool:
    """Whether the memory is the only problem."""
    return {problem.code for problem in problems} == {MEMORY}


def refusal(problems: Sequence[Problem]) -> ConfigError | MemoryPlanError:
    """The error of problems: exit code 4 if the memory is the only one, else 2."""
    return MemoryPlanError(problems) if only_memory(problems) else ConfigError(problems)


def refuse(problems: Sequence[Problem]) -> None:
    """Raise the error of the problems, if there are any."""
    if problems:
        raise refusal(problems)
