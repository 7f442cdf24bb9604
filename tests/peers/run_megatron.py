"""Megatron's unit tests of pipeline_parallel from a checkout, with its own functions and with ppctl in their places.

`python tests/peers/run_megatron.py DIR` prints a line for every test and fails if one that passes with Megatron, here
on CPUs, does not with ppctl, unless `BY_DESIGN` has its reason. A file's tests share a world of 8 ranks; what does not
pass there runs again in a world of its own, so that no failure is another one's echo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "tests/unit_tests/pipeline_parallel"
RANKS = 8
LIMIT = 240

BY_DESIGN = {
    "test_schedules.py::test_forward_backward_func_with_interleaving": "decision 7: decoder_seq_length=256 is honoured "
    "under interleaving, and the stages' outputs are 512 long",
    "test_schedules.py::test_forward_backward_func_with_uneven_interleaving": "decision 7: as above",
    "test_schedules.py::test_forward_backward_pipelining_with_interleaving_with_custom_pgs": "decision 7: as above",
}
"""Tests that pass with Megatron's functions alone, and why they need not with ours."""

Outcomes = dict[str, tuple[str, str]]
"""Test -> (outcome on all ranks, the reason of the first rank that gives one)."""


def run(checkout: Path, tests: Sequence[str], *, adopt: bool) -> Outcomes:
    """Run tests in one world. A test that not all ranks have come to the end of has failed."""
    with tempfile.TemporaryDirectory() as out, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        listener.close()
        path = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "peers"), str(ROOT), str(checkout)]
        more = {"PYTHONPATH": os.pathsep.join(path), "PEERS_OUT": out, "GLOO_SOCKET_IFNAME": "lo"}
        more |= {"OMP_NUM_THREADS": "1", "PEERS_ADOPT": "1" if adopt else ""}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "pytest", "-q"]
        command += ["--noconftest", "-p", "megatron_plugin", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore"]
        command += ["--rootdir", str(checkout), "--timeout", str(LIMIT // 2), *tests]
        log = Path(out) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=checkout, env=os.environ | more, stdout=output, stderr=output, start_new_session=True
            )
            try:
                process.wait(LIMIT * max(1, len(tests)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
        if os.environ.get("PEERS_SHOW"):
            print(log.read_text()[-6000:])
        return gathered([Path(out) / str(rank) for rank in range(RANKS)])


def gathered(files: Sequence[Path]) -> Outcomes:
    """The outcomes of all ranks, test by test."""
    by_test: dict[str, list[tuple[str, str]]] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else ():
            name, outcome, reason = json.loads(line)
            by_test.setdefault(name, []).append((outcome, reason))
    found: Outcomes = {}
    for name, outcomes in by_test.items():
        kinds = {outcome for outcome, _ in outcomes}
        complete = len(outcomes) >= len(files)
        outcome = kinds.pop() if len(kinds) == 1 and (complete or "failed" in kinds) else "failed"
        reason = next((reason for kind, reason in outcomes if kind == outcome and reason), "")
        found[name] = (outcome, reason)
    return found


def collected(checkout: Path, file: str) -> list[str]:
    """The tests of a file."""
    path = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "peers"), str(ROOT), str(checkout)]
    more = {"PYTHONPATH": os.pathsep.join(path), "WORLD_SIZE": "8", "RANK": "0", "LOCAL_RANK": "0", "PEERS_ADOPT": ""}
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--noconftest", "-p", "megatron_plugin"]
    command += ["-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", "--rootdir", str(checkout), file]
    done = subprocess.run(command, cwd=checkout, env=os.environ | more, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]


def outcomes_of(checkout: Path, file: str, names: Sequence[str], *, adopt: bool) -> Outcomes:
    """Outcomes of a file's tests: together, then one by one what did not pass."""
    found = run(checkout, [file], adopt=adopt)
    for name in names:
        if found.get(name, ("", ""))[0] not in ("passed", "skipped"):
            found |= run(checkout, [name], adopt=adopt) or {name: ("failed", "no rank came to its end")}
    return found


def main(checkout: Path) -> int:
    """Run everything, print the lines, and return 1 where a test is wrong without a reason."""
    files = sorted(path.relative_to(checkout).as_posix() for path in (checkout / FOLDER).glob("test_*.py"))
    counts = {"same": 0, "by design": 0, "not with Megatron": 0, "wrong": 0}
    for file in files:
        names = collected(checkout, file)
        if not names:
            print(f"{file}: cannot be collected here", flush=True)
        theirs = outcomes_of(checkout, file, names, adopt=False) if names else {}
        passing = [name for name in names if theirs.get(name, ("", ""))[0] == "passed"]
        ours = outcomes_of(checkout, file, passing, adopt=True) if passing else {}
        for name in names:
            short = name.removeprefix(f"{FOLDER}/")
            outcome, reason = theirs.get(name, ("failed", ""))
            if outcome != "passed":
                kind, said = "not with Megatron", f"{outcome}: {reason}"
            elif ours.get(name, ("failed", ""))[0] == "passed":
                kind, said = "same", "passes with both"
            elif short in BY_DESIGN:
                kind, said = "by design", BY_DESIGN[short]
            else:
                kind, said = "wrong", ours.get(name, ("", "no outcome"))[1]
            counts[kind] += 1
            print(f"{kind:<17}  {short}  {said}"[:240], flush=True)
    print(", ".join(f"{number} {kind}" for kind, number in counts.items()))
    return 1 if counts["wrong"] or not counts["same"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
