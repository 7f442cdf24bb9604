"""The page of a first run on GPUs: `results_page.py LOGS PAGE`.

Knows the logs of `first_run.sh`: `steps.tsv`, and in each step's log one JSON object as its last line. Every number on
the page was measured in this run; a step that failed, was skipped or never ran says so and has no row.
"""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

ENDS = {"0": "done", "77": "skipped", "124": "ran past its limit", "137": "ran past its limit"}

TWO_DEVICES = (
    ("whether a batch of messages between two devices ends (launch.transport=plain)", "nccl-pp2"),
    ("whether channels connect and end: a backend for each edge and direction", "nccl-pp2-channels"),
    ("whether pairs over NCCL end: DualPipeV with experts, on four devices", "nccl-ep2-dualpipev"),
    ("whether the tests of engine, P2PCommunicator and Megatron's functions pass over NCCL", "nccl-tests"),
    ("whether a run starts again behind a rank that was killed while another one waited for it over NCCL", "restart"),
    ("which transport is faster, and the bandwidth of every edge", "doctor"),
)
"""What one device cannot answer, and the step that does: NCCL refuses two ranks on one device."""
_FAILED_TESTS = 3
"""Failed tests of a step that the page names."""
NOWHERE = (
    "what a posted receive costs the stages' own kernels, and whether four thread blocks carry enough (`ppctl trace`)",
    "the overlap of gradients' sums with backwards",
    "a peer that stands still: NCCL's watchdog beside ppctl's, and what each says",
)
"""What no step measures yet."""


def main() -> int:
    """Write the page."""
    logs, path = map(Path, sys.argv[1:])
    steps = [line.split("\t") for line in (logs / "steps.tsv").read_text().splitlines()]
    texts = {name: (logs / f"{name}.log").read_text(errors="replace") for name, *_ in steps}
    path.write_text("\n".join(page(steps, texts, str(logs))) + "\n")
    print(path)
    return 0


def _result(log: str) -> dict[str, Any]:
    """The last line of a log that is an object, or the object over several lines in it; empty where there is none."""
    lines = [line for line in log.splitlines() if line.startswith("{")]
    for text in (*reversed(lines), log[log.find("{") : log.rfind("}") + 1]):
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def _last_words(log: str) -> str:
    """What a program without a result said last; of tests their counts, and those that failed."""
    said = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line.partition("::")[2] for line in said if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
    words = [
        *said[-1:],
        *wrong[:_FAILED_TESTS],
        *[f"and {len(wrong) - _FAILED_TESTS} more"] * (len(wrong) > _FAILED_TESTS),
    ]
    return "; ".join(word.strip("= ")[:160].replace("|", "/") for word in words) or "no output"


def page(steps: list[list[str]], logs: dict[str, str], directory: str = "") -> list[str]:
    """Its lines, from steps as (name, limit, seconds, exit code, part) and the text of each step's log in a
    `directory`."""
    found = {name: _result(text) for name, text in logs.items()}
    facts = found.get("facts", {})
    lines = [f"# First run on {facts.get('device', 'an unknown device')}, {date.today()}", ""]
    if facts.get("device") == "CPU":
        lines += [
            "**A rehearsal of the script on a CPU with tiny sizes: none of these numbers says anything of a GPU.**",
            "",
        ]
    lines += [f"* {key}: {value}" for key, value in facts.items() if key not in ("step", "name") and value is not None]
    lines += ["", "`tests/gpu/first_run.sh` ran these steps, each within its limit:", ""]
    rows = []
    for name, limit, seconds, code, part in steps:
        own = found[name]
        why = own.get("skipped") or own.get("failed") or ("" if own else _last_words(logs[name]))
        rows.append([part, name, f"{limit} s", f"{seconds} s", ENDS.get(code, f"failed ({code})"), why])
    lines += _table(["part", "step", "limit", "took", "end", "said"], rows)
    told = "`docs/first-hour.md` says what each answer means, what to do next, and what to send back"
    lines += ["", f"{told}: this page and the logs in `{directory}`." if directory else f"{told}."]

    def of_kind(*kinds: str) -> list[dict[str, Any]]:
        return [row for row in found.values() if row.get("step") in kinds and "skipped" not in row]

    lines += _section("What NCCL does with one rank", _answers(of_kind("nccl-alone")))
    lines += _section("Transports and edges (`ppctl doctor`)", _doctor(found.get("doctor", {})))
    lines += _section("First launches beside a busy device, and what loading costs", _launches(of_kind("launches")))
    lines += _section("Hardware queues", _queues(of_kind("queues")))
    lines += _section("A retry of the allocator beside a kernel that spins", _retries(of_kind("retry")))
    lines += _section("Several ranks against one on the CPU", _losses(of_kind("same", "nccl")))
    lines += _section("A killed rank, and the start behind it", _restarts(of_kind("restart")))
    for row in of_kind("memory"):
        lines += _section(f"Memory by action, {row['name']}", _actions(row))
    lines += _section(
        "Rates against the plan and a bare loop of the same layers", _rates(of_kind("rate", "compiled", "fp8"))
    )
    for row in of_kind("profile"):
        title = " ".join((row["name"], row["how"])).strip()
        lines += _section(f"Where the seconds of a step go, {title}", _seconds(row))
    return lines + _section("What two devices alone can answer", _two(steps, found, logs))


def _section(title: str, table: list[str]) -> list[str]:
    return ["", f"## {title}", "", *(table or ["Not run, or nothing was measured: see the table of steps."])]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _answers(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [what, each["answer"].replace("|", "/"), f"{1e3 * each['seconds']:.1f} ms"]
        for row in rows
        for what, each in row["answers"].items()
    ]
    cells += [["NCCL_DEBUG, channels", text, ""] for row in rows for text in row["p2p_channels"] or ["no line"]]
    cells += [["NCCL_DEBUG, thread blocks", text[:120], ""] for row in rows for text in row["grids"]]
    return _table(["asked", "answer", "took"], cells)


def _doctor(report: dict[str, Any]) -> list[str]:
    cells = [[f"wrong: {line}", ""] for line in report.get("wrong", [])]
    for row in report.get("transports", []):
        answer = row["error"] or f"right, {1e3 * row['seconds']:.2f} ms a call"
        cells.append([f"launch.transport={row['transport']}", answer])
    for edge in report.get("edges", []):
        answer = edge["error"] or f"{1e6 * edge['latency_s']:.0f} us, {edge['bytes_per_s'] / 1e9:.2f} GB/s"
        cells.append([f"edge {edge['source']} -> {edge['target']} ({report['device']})", answer])
    if report and not report.get("transports"):
        cells.append(["both transports", "not tried: that takes a GPU for each of two ranks"])
    return _table(["what", "answer"], cells)


def _rates(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        [
            *(f"{row['name']}, {row['step']}", str(row["layers"]), _share(row["mfu"]), _share(row["planned_mfu"])),
            *(f"{row['tokens_per_s']:,.0f}", f"{1e3 * row['pipeline_s']:.1f} ms", f"{1e3 * row['bare_loop_s']:.1f} ms"),
            *(f"{row['bare_loop_s'] / row['pipeline_s']:.3f}", _mib(row["measured_bytes"]), _mib(row["planned_bytes"])),
            row.get("gradients", "-"),
        ]
        for row in rows
    ]
    head = ["model", "modules", "mfu", "planned", "tokens/s", "pipeline", "bare loop", "loop / pipeline"]
    return _table([*head, "peak MiB", "planned MiB", "gradients"], cells)


def _seconds(row: dict[str, Any]) -> list[str]:
    """Classes of kernels, then the kernels that took longest."""
    wall = row["wall_s"]

    def took(seconds: float) -> list[str]:
        return [f"{1e3 * seconds:.2f} ms", _share(seconds / wall)]

    cells = [[name, "", *took(seconds)] for name, seconds in row["classes"].items()]
    cells += [["no kernel runs", "", *took(row["idle_s"])], ["the step, profiled", str(row["kernels"]), *took(wall)]]
    for each in row["longest"]:
        name = f"`{each['name'][:90].replace('|', '/')}` ({each['class']})"
        cells.append([name, str(each["calls"]), *took(each["seconds"])])
    return _table(["what", "runs", "took", "of the step"], cells)


def _actions(row: dict[str, Any]) -> list[str]:
    """The first and the last actions: in between a step repeats itself."""
    shown = row["actions"] if len(row["actions"]) <= 16 else [*row["actions"][:8], *row["actions"][-8:]]
    cells = [[each["action"], _mib(each["measured_bytes"]), _mib(each["planned_bytes"])] for each in shown]
    cells.append(["peak", _mib(row["peak_bytes"]), _mib(row["planned_bytes"])])
    cells.append(["outside torch's allocator: context, kernels, libraries", _mib(row["outside_bytes"]), ""])
    return _table(["after", "allocated MiB", "planned MiB"], cells)


def _losses(rows: list[dict[str, Any]]) -> list[str]:
    over = {"nccl": "NCCL", "same": "gloo"}
    cells = [
        [f"{row['name']}: {row['words']}", over[row["step"]], f"{row['losses'][-1]:.5f}", f"{row['apart']:.1e}"]
        for row in rows
    ]
    return _table(["ranks", "over", "last loss", "largest relative difference"], cells)


def _restarts(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        ["; then ".join(filter(None, row["starts"])), f"{row['seconds']:.1f} s", f"{row['apart']:.1e}"] for row in rows
    ]
    return _table(
        ["why it started again", "from the kill to the next step", "largest relative difference of losses"], cells
    )


def _launches(rows: list[dict[str, Any]]) -> list[str]:
    cells = []
    for row in rows:
        start = f"{row['first_kernel_s']:.1f} s, {_mib(row['taken_bytes'])} MiB taken"
        cells.append([row["loading"], "the first of all", start, ""])
        for name, kernel in row["kernels"].items():
            over = "yes" if kernel["spin_was_over"] else "no"
            cells.append([row["loading"], name, f"{1e3 * kernel['seconds']:.1f} ms", over])
    return _table(["CUDA_MODULE_LOADING", "first launch", "host took", "returned only after the busy kernel"], cells)


def _queues(rows: list[dict[str, Any]]) -> list[str]:
    cells = [[str(row["queues"]), f"{row['spins']:.2f}"] for row in rows]
    return _table(["CUDA_DEVICE_MAX_CONNECTIONS", "time in spins (2.0: no stream waits for another)"], cells)


def _retries(rows: list[dict[str, Any]]) -> list[str]:
    said = {True: "yes", False: "no"}
    cells = [
        [row["allocator"], str(row["retries"]), f"{1e3 * row['seconds']:.1f} ms", said[row["waited_for_the_spin"]]]
        for row in rows
    ]
    return _table(["allocator", "retries", "host took", "waited for the other stream"], cells)


def _two(steps: list[list[str]], found: dict[str, dict[str, Any]], logs: dict[str, str]) -> list[str]:
    ends = {name: ENDS.get(code, f"failed ({code})") for name, _, _, code, _ in steps}
    if ends.get("nccl-tests") == "done":  # pytest ends well, too, where it has skipped all
        ends["nccl-tests"] = _last_words(logs["nccl-tests"])
    cells = []
    for question, name in TWO_DEVICES:
        end = ends.get(name, "not run")
        sign = {"doctor": "transports", "restart": "over_nccl"}.get(name)
        tried = sign is None or bool(found.get(name, {}).get(sign))
        cells.append([question, name, end if tried else "one device: open"])
    cells += [[question, "none", "open"] for question in NOWHERE]
    return _table(["question", "step", "answer"], cells)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mib(value: int | None) -> str:
    return "not measured" if value is None else f"{value / 2**20:,.1f}"


if __name__ == "__main__":
    sys.exit(main())
