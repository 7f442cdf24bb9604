"""How close plans come to what others recorded: memory, throughput, bubbles, parameters, layouts.

    python benchmarks/plan_accuracy.py        (make bench-plan)

Every figure comes out of `build_plan`, as `ppctl plan` prints it. Rows whose setting is not wholly known are listed and
not counted. Exit code 1 where a floor is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from published_models import MODELS
from published_runs import kendall_tau, throughput_rows
from recorded_runs import GOLDEN, Row, megatron_rows, simumax_rows

from ppctl.cli.simulate import costs, figured
from ppctl.cost.parameter_counts import total_parameters
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import simulate


def errors(name: str, rows: list[Row], median: float, worst: float) -> bool:
    """Print one line, and the rows that are furthest off; whether both floors are kept."""
    found = sorted((abs(row.error), row.error, row.name) for row in rows if row.counted)
    middle, most = statistics.median(error for error, _, _ in found), found[-1][0]
    print(f"| {name} | {len(found)} | {middle:.2%} (<= {median:.1%}) | {most:.2%} (<= {worst:.0%}) | {found[-1][2]} |")
    return middle <= median and most <= worst


def parameters() -> bool:
    rows = json.loads((GOLDEN / "param_counts.json").read_text())["models"]
    golden = {row["model"]: row["params"] for row in rows}
    exact = [name for name, model in MODELS.items() if total_parameters(model) == golden[name]]
    stored = sum("hf_total_size" in row for row in rows)
    print(f"\nparameter counts: {len(exact)} of {len(golden)} equal to the golden file ({stored} of them confirmed by "
          "the sizes of Hugging Face's files, the others computed from public configs)")  # fmt: skip
    return len(exact) == len(golden)


BUBBLES = {"1f1b": ("1F1B", 1e-4), "zb_h1": ("ZB-H1", 1e-4), "interleaved_1f1b": ("1F1B-I", 0.004)}
"""The paper's columns by ppctl's names, with the floors. Its interleaved one has a simpler model of messages."""


def bubbles() -> bool:
    """Zero Bubble (arXiv 2401.10241), tables 3 to 6, by what `ppctl simulate` prints."""
    rows = json.loads((GOLDEN / "zero_bubble_tables.json").read_text())["rows"]
    worst = dict.fromkeys(BUBBLES, 0.0)
    for row in rows:
        for schedule, (column, _) in BUBBLES.items():
            vpp = (row["cfg"]["layers"] + 2) // row["p"] if column == "1F1B-I" else 1
            words = {"schedule": schedule, "pp": row["p"], "vpp": vpp, "microbatches": row["m"]}
            times = {"tf": row["TF"], "tb": row["TB"], "tw": row["TW"], "tcomm": row["Tcomm"]}
            args = Namespace(**words, **times)
            made = make_schedule(schedule, pp=row["p"], vpp=vpp, num_microbatches=row["m"])
            rate = figured(made, simulate(made, costs(args, row["p"] * vpp, vpp)))["bubble_rate"]
            worst[schedule] = max(worst[schedule], abs(rate - row["bubble"][column]))
    for schedule, (column, floor) in BUBBLES.items():
        print(f"zero-bubble tables, {column}: {len(rows)} rows, worst difference {worst[schedule]:.5f} (<= {floor})")
    return all(worst[schedule] <= floor for schedule, (_, floor) in BUBBLES.items())


def main() -> int:
    steady, peak = megatron_rows()
    simumax = simumax_rows()
    long = [row for row in simumax if "seq131072" in row.name]
    print("| what | rows | median error | worst | its row |\n|---|--:|--:|--:|---|")
    kept = [
        errors("Megatron steady memory, last stage", steady, 0.015, 0.06),
        errors("Megatron peak memory, last stage", peak, 0.03, 0.08),
        errors("SimuMax peak memory", [row for row in simumax if row not in long], 0.02, 0.05),
        errors("SimuMax peak memory, 131072 tokens", long, 0.08, 0.08),
    ]
    print("\nnot counted (world size inferred): ", end="")
    print("; ".join(f"{row.name.split('/')[1]} {row.error:+.1%}" for row in steady if not row.counted))
    runs = throughput_rows(all_rows=True)
    print("\n| published run | tokens/s/GPU | planned | error | |\n|---|--:|--:|--:|---|")
    for row in runs:
        note = "" if row.counted else "not counted"
        print(f"| {row.name} | {row.recorded:,.0f} | {row.planned:,.0f} | {row.error:+.1%} | {note} |")
    counted = [row for row in runs if row.counted]
    tau = kendall_tau(counted)
    near = [row for row in counted if abs(row.error) <= 0.3]
    print(f"\n{len(near)} of {len(counted)} counted rows within 30 %, Kendall tau {tau:.2f} (>= 0.7)")
    kept += [tau >= 0.7 and len(near) == len(counted) >= 8, parameters(), bubbles()]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    raise SystemExit(main())
