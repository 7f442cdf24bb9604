"""Megatron's unit tests of pipeline_parallel from a checkout, with its own functions and with ppctl in their places.

`python tests/peers/run_megatron.py DIR [PART...]` prints a line for every test (of files with a PART in their names)
and fails if one that passes with Megatron, here on CPUs, does not with ppctl, unless `BY_DESIGN` has its reason. A
file's tests share a world of 8 ranks, forks of one process; what does not pass there runs again in a world of its own,
so that no failure is another one's echo. What stands in for a GPU, nccl and NVIDIA's packages is listed in
`megatron_plugin.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = "tests/unit_tests/pipeline_parallel"
RANKS = 8
LIMIT = 180
"""Seconds for one test, and for a world to start."""

GRACE = 5
"""Seconds that the other ranks of a world of one test have to report when the first one has failed."""

BY_DESIGN = {
    "test_schedules.py::test_forward_backward_func_with_interleaving": "decision 7: decoder_seq_length=256 is honoured "
    "under interleaving, and the stages' outputs are 512 long",
    "test_schedules.py::test_forward_backward_func_with_uneven_interleaving": "decision 7: as above",
    "test_schedules.py::test_forward_backward_pipelining_with_interleaving_with_custom_pgs": "decision 7: as above",
}
"""Tests that pass with Megatron's functions alone, and why they need not with ours."""


class Outcome(NamedTuple):
    """What became of a test on all ranks."""

    kind: str
    """passed, failed, skipped, not collected."""
    reason: str = ""
    """Of the first rank that gives one."""
    calls: tuple[str, ...] = ()
    """ppctl's functions that it called."""


NONE = Outcome("failed", "no rank came to its end")
Outcomes = dict[str, Outcome]


def run(tests: Sequence[str], count: int, *, adopt: bool = False, collect: bool = False) -> tuple[Outcomes, str]:
    """Run tests in one world, or one rank that collects them. Returns outcomes, and what `adopt` said."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        out, port = Path(folder), listener.getsockname()[1]
        listener.close()
        more = ["--collect-only"] if collect else ["--timeout", str(LIMIT)]
        ranks = range(1 if collect else RANKS)
        left = {_fork(rank, port, out, [*tests, *more], adopt=adopt) for rank in ranks}
        end = time.monotonic() + LIMIT * (count + 1)
        while left:
            left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
            if count == 1 and not collect and failed(out / "0"):
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() > end:
                for pid in left:
                    os.kill(pid, 9)
            time.sleep(0.1)
        if os.environ.get("PEERS_SHOW"):
            print((out / "log").read_text()[-20000:])
        told = out / "adopted"
        return gathered([out / str(rank) for rank in ranks]), told.read_text() if told.exists() else ""


def failed(file: Path) -> bool:
    """Whether a rank has said that a test failed."""
    return file.exists() and any(json.loads(line)[1] == "failed" for line in file.read_text().splitlines())


def _fork(rank: int, port: int, out: Path, arguments: Sequence[str], *, adopt: bool) -> int:
    """Start a rank that runs pytest and ends; returns its process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        import megatron_plugin
        import pytest

        log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        megatron_plugin.enter(rank, RANKS, port, out, adopt=adopt)
        options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", "--rootdir", "."]
        code = int(pytest.main([*options, *arguments], plugins=[megatron_plugin]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def gathered(files: Sequence[Path]) -> Outcomes:
    """The outcomes of all ranks, test by test. A test that not all ranks have come to the end of has failed."""
    by_test: dict[str, list[Outcome]] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else ():
            name, kind, reason, calls = json.loads(line)
            found = by_test.setdefault(name, [])
            if kind != "collected":
                found.append(Outcome(kind, reason, tuple(calls)))
    outcomes: Outcomes = {}
    for name, found in by_test.items():
        kinds = {outcome.kind for outcome in found}
        kind = kinds.pop() if len(kinds) == 1 and len(found) >= len(files) else "failed"
        reason = next((outcome.reason for outcome in found if outcome.kind == kind and outcome.reason), "")
        calls = {call for outcome in found for call in outcome.calls}
        outcomes[name] = Outcome(kind, reason or (NONE.reason if kind == "failed" else ""), tuple(sorted(calls)))
    return outcomes


def outcomes_of(names: Sequence[str], *, adopt: bool) -> tuple[Outcomes, str]:
    """Outcomes of a file's tests: together, then one by one what did not pass, or is known not to."""
    together = [name for name in names if not (adopt and name.removeprefix(f"{FOLDER}/") in BY_DESIGN)]
    found, told = run(together, len(together), adopt=adopt)
    for name in names:
        if found.get(name, NONE).kind not in ("passed", "skipped"):
            found |= run([name], 1, adopt=adopt)[0]
    return found, told


def verdict(name: str, theirs: Outcome, ours: Outcome) -> tuple[str, str]:
    """The kind of a test that was run, and what there is to say."""
    if theirs.kind != "passed":
        return "not here", f"{theirs.kind} with Megatron: {theirs.reason}"
    if ours.kind == "passed":
        return "both", f"passed with Megatron, passed with ppctl; calls {', '.join(ours.calls) or 'nothing of ours'}"
    if name in BY_DESIGN:
        return "by design", f"passed with Megatron, not with ppctl; {BY_DESIGN[name]}: {ours.reason}"
    return "wrong", f"passed with Megatron, {ours.kind} with ppctl: {ours.reason}"


def main(checkout: Path, only: Sequence[str] = ()) -> int:
    """Run the files (all, or those with a part of `only` in their names), and print the lines.

    Returns 1 where a test is wrong without a reason, or where no test has called ppctl.
    """
    places = [ROOT / "tests" / "helpers", ROOT / "tests" / "peers", ROOT, checkout]
    sys.path[:0] = [str(place) for place in places]
    os.chdir(checkout)
    import megatron_plugin  # noqa: F401 (every rank is a fork of this process)
    import torch
    from megatron.core import package_info

    print(f"Megatron-core {package_info.__version__} from a checkout, torch {torch.__version__}, {RANKS} ranks, gloo\n")
    counts = {"both": 0, "by design": 0, "wrong": 0, "not here": 0}
    calling, said = 0, False
    paths = (checkout / FOLDER).glob("test_*.py")
    for file in sorted((path.relative_to(checkout).as_posix() for path in paths), reverse=True):  # the slowest last
        if only and not any(part in file for part in only):
            continue
        names: list[str] = []
        for name, outcome in run([file], 1, collect=True)[0].items():
            if outcome.kind != "not collected":
                names.append(name)
            else:
                print(f"{name.removeprefix(FOLDER + '/')}: not collected: {outcome.reason}"[:400], flush=True)
        theirs, _ = outcomes_of(names, adopt=False) if names else ({}, "")
        passing = [name for name in names if theirs.get(name, NONE).kind == "passed"]
        ours, told = outcomes_of(passing, adopt=True) if passing else ({}, "")
        if told and not said:
            said = True
            print(told)
        for name in names:
            short = name.removeprefix(f"{FOLDER}/")
            kind, words = verdict(short, theirs.get(name, NONE), ours.get(name, NONE))
            counts[kind] += 1
            calling += kind == "both" and bool(ours[name].calls)
            line = f"{kind:<9}  {short}  {words}".replace(str(checkout) + "/", "").replace(f"{ROOT}/", "")
            print(re.sub(r"(?<![\w.])/(?:\w[\w.-]*/)+", "", line)[:400], flush=True)
    print(f"\n{sum(counts.values())} tests collected: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    print(f"{calling} of the {counts['both']} call ppctl's functions or communicator in Megatron's places")
    return 1 if counts["wrong"] or not calling else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
