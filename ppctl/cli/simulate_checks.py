"""Problems of the arguments of `ppctl simulate`, and the schedule in a file, proved to run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.schedule.action import Schedule
from ppctl.schedule.policies import AUTO, POLICIES, Policy, fitting_policy, too_few_microbatches
from ppctl.schedule.schedule_request import CODE, schedule_in
from ppctl.schedule.verify import verify

SCHEDULES = {name: policy for name, policy in POLICIES.items() if policy.trains}

TIMES = {
    "tf": "forward pass of one microbatch through all chunks of a rank",
    "tb": "its input gradient",
    "tw": "its weight gradient",
    "tcomm": "delay of every message",
}
MOST_MS = 1e12
"""About 30 years: a longer time is a mistake, and sums of such times would become infinite."""
MOST_ACTIONS = 5_000_000
"""More actions would take minutes and gigabytes: some size is a mistake."""
MOST_SEARCHED = 150_000
"""The most actions of a schedule that a search makes again and again: about 20 s."""

_FEW_RANKS, _MANY_CHUNKS = 32, 8
"""With more ranks than the first, a remedy lowers the ranks, too, and then also the chunks if above the second."""

_PLACE = "command line"
_USUAL_SIZES = {"--pp": 4, "--microbatches": 8}


def memory(args: argparse.Namespace) -> float:
    """The limit of a rank's activations, as a multiple of what 1F1B holds on its first rank."""
    return 1.0 if args.memory is None else float(args.memory)


def schedule_of_file(args: argparse.Namespace) -> Schedule:
    """The schedule in the file that `--schedule` names, proved to run; sets pp, vpp and microbatches of `args` to its
    sizes. Raises ConfigError with all problems."""
    problems = [*wrong_times(args), *_beside_file(args)]
    try:
        schedule = schedule_in(args.schedule)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        message = f"the schedule file {args.schedule} cannot be read: {reason}"
        sizes = [f"{name} {size}" for name, size in _USUAL_SIZES.items() if getattr(args, name[2:]) is None]
        remedy = " ".join(["--schedule 1f1b", *sizes])
        raise ConfigError([Problem(CODE, message, remedy, _PLACE), *problems]) from None
    except ScheduleError as error:
        located = [replace(each, place=f"{args.schedule}, {each.place}".rstrip(", ")) for each in error.problems]
        raise ConfigError([*located, *problems]) from None
    place = schedule.placement
    found = {"pp": place.pp, "vpp": place.num_stages // place.pp, "microbatches": schedule.num_microbatches}
    for name, size in found.items():
        if getattr(args, name) not in (None, size):
            message = f"--{name} {getattr(args, name)}: {args.schedule} has {size}"
            problems.append(Problem("PP-E128", message, f"--{name} {size}", _PLACE))
        setattr(args, name, size)
    problems += verify(schedule) or _too_many(args, 1)
    if problems:
        raise ConfigError(problems)
    return replace(schedule, name=Path(args.schedule).name)


def wrong(args: argparse.Namespace) -> Iterator[Problem]:
    """Problems that keep a schedule with a name, or all of them, from being simulated."""
    sizes = {"--pp": args.pp, "--microbatches": args.microbatches, "--vpp": 1 if args.vpp is None else args.vpp}
    if missing := [name for name, size in sizes.items() if size is None]:
        message = f"{' and '.join(missing)}: required unless --schedule is a FILE.csv"
        yield Problem("PP-E128", message, " ".join(f"{name} {_USUAL_SIZES[name]}" for name in missing), _PLACE)
        return
    if args.compare and args.timeline is not None:
        message = f"--timeline {args.timeline} draws one schedule, but --compare has all of them"
        yield Problem("PP-E129", message, "--schedule 1f1b", _PLACE)
    if args.compare and args.extra_warmup:
        message = "--extra-warmup does not go with --compare"
        yield Problem("PP-E128", message, "--extra-warmup 0", _PLACE)
    if args.schedule == AUTO:
        yield from _not_searched(args)
    elif args.memory is not None:
        message = f"--memory limits a search (--schedule {AUTO}), but {args.schedule or '--compare'} makes none"
        yield Problem("PP-E128", message, f"--schedule {AUTO}", _PLACE)
    if not args.compare and args.schedule not in (*SCHEDULES, AUTO):
        yield _unknown(args)
    yield from wrong_times(args)
    small = {name: size for name, size in sizes.items() if size < 1}
    for name, size in small.items():
        yield Problem("PP-E128", f"{name} {size}: it must be at least 1", f"{name} 1", _PLACE)
    policy = SCHEDULES.get(args.schedule or "")
    if policy and not small:
        yield from _not_for_policy(args, policy)
    yield from _too_many(args, len(SCHEDULES) if args.compare else 1)


def _too_many(args: argparse.Namespace, schedules: int) -> list[Problem]:
    of_one = 3 * schedules * max(args.pp, 1) * max(args.vpp or 2, 1)
    actions = of_one * max(args.microbatches, 1)
    if actions <= MOST_ACTIONS:
        return []
    message = f"about {actions:,} actions are too many; a simulation holds at most {MOST_ACTIONS:,}"
    few = 2 * _FEW_RANKS  # a V schedule needs 2 pp microbatches
    remedy = f"--microbatches {few}"
    if args.pp > _FEW_RANKS or few * of_one > MOST_ACTIONS:
        remedy = f"--pp 8 {remedy}" + " --vpp 2" * ((args.vpp or 1) > _MANY_CHUNKS)
    return [Problem("PP-E128", message, remedy, _PLACE)]


def _unknown(args: argparse.Namespace) -> Problem:
    from ppctl.config.keys import nearest

    close = nearest(args.schedule, (*SCHEDULES, AUTO))
    message = f"there is no schedule {args.schedule!r}: {', '.join((*SCHEDULES, AUTO))}, or a FILE.csv"
    return Problem("PP-E128", message, f"--schedule {close[0] if close else '1f1b'}", _PLACE)


def _not_for_policy(args: argparse.Namespace, policy: Policy) -> Iterator[Problem]:
    if args.vpp is not None and not policy.runs(args.vpp):
        message = f"{args.schedule} runs {policy.chunks_in_words}, but --vpp is {args.vpp}"
        other = policy.for_more_chunks or fitting_policy(args.vpp)
        yield Problem("PP-E128", message, f"--vpp {policy.chunks}\n--schedule {other}", _PLACE)
    most = args.pp - 1 if policy.extra_warmup else 0
    if not 0 <= args.extra_warmup <= most:
        message = f"--extra-warmup {args.extra_warmup}: it must be 0 to {most} for {args.schedule} with --pp {args.pp}"
        yield Problem("PP-E128", message, f"--extra-warmup {most if args.extra_warmup > 0 else 0}", _PLACE)
    if args.microbatches < (least := policy.needs_microbatches(args.pp)):
        message = too_few_microbatches(policy, args.pp, args.microbatches)
        yield Problem("PP-E128", message, f"--microbatches {least}", _PLACE)


def _not_searched(args: argparse.Namespace) -> Iterator[Problem]:
    if args.extra_warmup:
        message = f"--extra-warmup {args.extra_warmup}: {AUTO} determines the warm-up itself"
        yield Problem("PP-E128", message, "--extra-warmup 0", _PLACE)
    if not 0 < memory(args) < float("inf"):
        yield Problem("PP-E128", f"--memory {args.memory:g}: the memory must be above 0", "--memory 1", _PLACE)
    actions = 3 * max(args.pp, 1) * max(args.vpp or 2, 1) * max(args.microbatches, 1)
    if MOST_SEARCHED < actions <= MOST_ACTIONS:
        message = f"about {actions:,} actions are too many; a search takes at most {MOST_SEARCHED:,}"
        yield Problem("PP-E128", message, "--microbatches 64", _PLACE)


def wrong_times(args: argparse.Namespace) -> Iterator[Problem]:
    """Problems of times that are negative or too long."""
    for name, what in TIMES.items():
        value = getattr(args, name)
        if not 0 <= value <= MOST_MS:
            yield Problem("PP-E128", f"--{name} {value:g}: {what} must be 0 to {MOST_MS:g} ms", f"--{name} 1", _PLACE)


def _beside_file(args: argparse.Namespace) -> Iterator[Problem]:
    if args.extra_warmup:
        message = f"--extra-warmup {args.extra_warmup}: {args.schedule} already determines how many forwards come first"
        yield Problem("PP-E128", message, "--extra-warmup 0", _PLACE)
    if args.memory is not None:
        message = f"--memory limits a search (--schedule {AUTO}); {args.schedule} is a fixed schedule"
        yield Problem("PP-E128", message, f"--schedule {AUTO}", _PLACE)
