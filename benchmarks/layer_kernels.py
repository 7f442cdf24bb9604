"""Kernels and bytes of one layer and microbatch, by kind of layer, as `ppctl rehearse` counts them.

    python benchmarks/layer_kernels.py [recipe ...]

Prints the table of a results page (about 5 minutes for all): each recipe as it is, and with nothing recomputed, at the
recipe's sizes. Counts are exact and the same on any machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

RECIPES = ("llama3_8b", "llama3_70b", "mixtral_8x22b", "deepseek_v3")
NOTHING_RECOMPUTED = (
    "train.recompute_granularity=null", "train.recompute_modules=null", "train.recompute_method=null",
    "train.recompute_num_layers=null", "train.recompute_stages=null",
    "parallel.num_microbatches_with_partial_activation_checkpoints=null",
)  # fmt: skip
FIELDS = ("passes", "kernels", "others", "other_bytes", "host_waits")


def rehearse(*overrides: str) -> dict[str, Any]:
    """What `ppctl rehearse --json` says of the run. Raises SystemExit(1) where it says nothing."""
    command = [sys.executable, "-m", "ppctl", "rehearse", *overrides, "launch.device_memory=null", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    return found if "ranks" in found else sys.exit(done.stdout)


def of_one_layer(found: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """By kind of layer and pass: kernels, others, their bytes and host waits of one layer and microbatch."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for row in (row for rank in found["ranks"] for row in rank["layers"]):
        sums.setdefault((row["kind"], row["during"]), Counter()).update({name: row[name] for name in FIELDS})
    return {key: [row[name] / row["passes"] for name in FIELDS[1:]] for key, row in sums.items()}


def main() -> None:
    """Rehearse and print."""
    print("| recipe | recomputed | layer | kernels F / B | others F / B | their GB F / B | host waits F / B |")
    print("|---|---|---|--:|--:|--:|--:|")
    for recipe in sys.argv[1:] or RECIPES:
        for what, more in (("as the recipe says", ()), ("nothing", NOTHING_RECOMPUTED)):
            print(f"{recipe}, {what} recomputed", file=sys.stderr, flush=True)
            counts = of_one_layer(rehearse(f"+recipe={recipe}", *more))
            for kind in dict.fromkeys(kind for kind, _ in counts):
                pairs = zip(counts[kind, "forward"], counts[kind, "backward"], strict=True)
                kernels, others, size, waits = pairs
                cells = [f"{forward:.4g} / {back:.4g}" for forward, back in (kernels, others)]
                cells += [f"{size[0] / 1e9:.2f} / {size[1] / 1e9:.2f}", f"{waits[0]:.3g} / {waits[1]:.3g}"]
                print(f"| {recipe} | {what} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
