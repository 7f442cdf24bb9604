"""Searches of six models: time, counts, and how much slower than the first the published configuration is planned.

    python benchmarks/search.py [MODEL ...]    # prints the table of benchmarks/results-search-2026-11-27.md, row by row

A row of `tests/golden/published_rows.json` names the GPUs, the batch and the precision, which are typed; the sizes that
others published for them are planned apart, with the recomputation that is known or the least that fits.
"""

from __future__ import annotations

import gc
import sys
import time
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from published_rows import MEMORY, Setting, fitting, settings

from ppctl.cli.search_text import sizes
from ppctl.config.compose import compose
from ppctl.plan.violations import ConfigValues
from ppctl.search.answer import BAND
from ppctl.search.branch import Search
from ppctl.search.space import SearchSpace

ROWS = (
    "LLAMA3_8B 8 DGX-H100 FP8-CS mbs1 gbs128",
    "LLAMA3_70B 64 DGX-H100 FP8 tp4 pp8 vpp5 mbs1 gbs256",
    "LLAMA3.1_405B",
    "Qwen3_30B_a3B 16 DGX-H100 FP8 ep16",
    "GPT OSS 120B 64 DGX-B200 BF16",
    "DeepSeek V3 671B 1024 DGX-H100 BF16",
)
"""How the names of six rows begin; of several the first is taken."""
TYPED = ("model", "gbs", "seq", "nodes", "gpus_per_node", "cost.", "launch.", "parallel.bf16", "parallel.cross_entropy")
"""How the keys of a row begin that are no choice of sizes."""


def searched(setting: Setting) -> None:
    """Search, and print a row of the table."""
    gc.disable()
    words = [word for word in setting.overrides if word.startswith(TYPED)]
    composed = compose([*words, "launch.device=cuda", f"launch.device_memory={MEMORY[setting.gpu]}GiB"])
    before, first = time.process_time(), 0.0
    search = Search(SearchSpace(ConfigValues(composed.config, composed.provenance)))
    for _ in search.run():
        if search.found and not first:
            first = time.process_time() - before
    proved = time.process_time() - before
    for step in (search.other_divisions(BAND), search.simpler()):
        for _ in step:
            pass
    whole, plan = time.process_time() - before, fitting(setting)[0]
    slower = plan.step_time_s / search.least - 1
    faster = sum(each.plan.step_time_s < plan.step_time_s for each in search.found)
    counts = search.counts
    print(
        f"| {setting.name} | {counts.total:,} | {counts.planned} | {first:.1f} | {proved:.1f} | {whole:.1f} "
        f"| {sizes(search.found[0].configuration)} | {slower:+.1%} | {faster} |",
        flush=True,
    )


def main() -> int:
    rows, _ = settings()
    print(
        "| published row | configurations | planned | first answer, s | proved, s | with other rows, s | first | ",
        end="",
    )
    print("published is slower by | planned and faster |\n|---|---|---|---|---|---|---|---|---|")
    for start in ROWS:
        setting = next(row for row in rows if row.name.startswith(start))
        if not sys.argv[1:] or setting.model in sys.argv[1:]:
            process = get_context("fork").Process(target=searched, args=(setting,))
            process.start()
            process.join()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
