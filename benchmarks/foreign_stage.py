"""A stage of a model of transformers against the same model with only the stage's layers: what the cut costs.

    python benchmarks/foreign_stage.py [--rounds 9] [--out benchmarks]

The stage has two layers in the middle of 32: every forward runs the whole model's code, makes masks and rotary tables,
and passes through 30 layers of other stages. The bare model has two layers, no embedding and no head. Both get the same
hidden state and the same weights, and have the same bits. They take turns, in CPU time of one thread, forward and
backward; the ratio of a pair is taken, and the median of all pairs. Operators that torch runs are counted beside it:
that figure does not depend on the machine's load. Exits with 1 where a stage costs more than 3 % more. A dated page of
results goes into --out.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model
from ppctl.foreign.miniature_proof import prove
from ppctl.geometry.layers import Layer

MOST = 1.03
LAYERS, OWN = 32, (15, 16)
HIDDEN, LENGTH = 1024, 512
SIZES = dict(
    vocab_size=512, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, max_position_embeddings=2048,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GATED = dict(**SIZES, num_key_value_heads=4, intermediate_size=2816)
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GATED,
    "Gemma2": GATED | dict(head_dim=128, sliding_window=256),
    "Qwen3Moe": GATED | dict(head_dim=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=704),
    "GPTNeoX": SIZES | dict(intermediate_size=4096),
}

Run = Callable[[Tensor], Tensor]


def contenders(kind: str) -> tuple[Run, Run, list[Tensor]]:
    """The stage, the bare model, and all their parameters."""
    config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
    torch.manual_seed(0)
    stage = ForeignStage(
        make_model(config, "meta").train(), prove(config).anatomy, [Layer("decoder", index) for index in OWN]
    )
    for parameter in stage.canonical_parameters().values():
        nn.init.normal_(parameter, std=0.02)
    whole = make_model(small(config), "cpu").train()
    body: Any = getattr(whole, whole.base_model_prefix)
    norm = next(name for name in ("norm", "final_layer_norm") if hasattr(body, name))
    setattr(body, norm, nn.Identity())
    path = stage.anatomy.layers.removeprefix(f"{whole.base_model_prefix}.")
    for place, index in enumerate(OWN):
        theirs = stage.model.get_submodule(stage.anatomy.layer(index))
        body.get_submodule(f"{path}.{place}").load_state_dict(theirs.state_dict())

    def bare(state: Tensor) -> Tensor:
        found: Tensor = body(inputs_embeds=state, use_cache=False).last_hidden_state
        return found

    return lambda state: stage(state)[0], bare, [*stage.parameters(), *whole.parameters()]


def small(config: Any) -> Any:
    """The config of the same model with the stage's layers alone."""
    values = config.to_dict() | dict(num_hidden_layers=len(OWN))
    if values.get("layer_types"):
        values["layer_types"] = [values["layer_types"][index] for index in OWN]
    return type(config)(**values)


class Counted(TorchDispatchMode):
    """Counts the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def once(run: Run, state: Tensor) -> Tensor:
    """A forward and backward; the gradient of what came in."""
    given = state.clone().requires_grad_()
    output = run(given)
    output.backward(torch.ones_like(output))
    assert given.grad is not None
    return given.grad


def measure(kind: str, rounds: int) -> tuple[float, float, int, int]:
    """(Median ratio of pairs, seconds of the bare model, operators of the bare model, operators beyond)."""
    stage, bare, parameters = contenders(kind)
    state = torch.randn(1, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    if not torch.equal(stage(state), bare(state)):
        raise SystemExit(f"{kind}: stage and bare model have other bits")
    counts = []
    for run in (stage, bare):
        with Counted() as counted:
            once(run, state)
        counts.append(counted.number)
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds + 1):
        seconds = {}
        for run in (stage, bare) if turn % 2 else (bare, stage):
            for parameter in parameters:
                parameter.grad = None
            begun = time.thread_time()
            once(run, state)
            seconds[run] = time.thread_time() - begun
        if turn:
            pairs.append((seconds[stage], seconds[bare]))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return ratio, statistics.median(theirs for _, theirs in pairs), counts[1], counts[0] - counts[1]


def main() -> int:
    """Measure, print and write a page; the exit code says whether the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    found = {kind: measure(kind, options.rounds) for kind in MODELS}
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [
        f"# A stage of a model of transformers, {today}",
        "",
        f"Hardware: {os.cpu_count()} x {processor()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, load {before:.1f} to {os.getloadavg()[0]:.1f}.",
        f"Command: `python benchmarks/foreign_stage.py --rounds {options.rounds}`.",
        f"Layers {OWN[0]} and {OWN[1]} of {LAYERS}, hidden {HIDDEN}, {LENGTH} tokens, float32, one thread, forward and "
        f"backward, the median of {options.rounds} alternating pairs in CPU time.",
        "",
        "| model | bare, ms | stage / bare | operators, bare | operators beyond |",
        "|---|---|---|---|---|",
        *(
            f"| {kind} | {1e3 * seconds:.0f} | {ratio:.3f} | {number} | {more} |"
            for kind, (ratio, seconds, number, more) in found.items()
        ),
        "",
        f"At most {MOST:.2f} is asked for.",
    ]
    print("\n".join(lines))
    if options.out is not None:
        (options.out / f"results-foreign-stage-{today}.md").write_text("\n".join(lines) + "\n")
    return int(max(ratio for ratio, *_ in found.values()) > MOST)


def processor() -> str:
    """The processor's name."""
    with open("/proc/cpuinfo") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
