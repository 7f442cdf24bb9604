"""Kernels and bytes of one layer alone: its first backward, which adds to no gradient, with nothing exchanged.

    python benchmarks/one_layer.py [llama3_8b deepseek_v3]

Prints for each recipe its last layer at the recipe's sizes on one device, kernel by kernel with --kernels. Counts are
exact and the same on any machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ppctl.foreign.measured_pass import tensors_of
from ppctl.launch.planning import planned
from ppctl.model.kernels import choose_kernels
from ppctl.model.layer import DecoderLayer
from ppctl.model.rotary import Rotary
from ppctl.model.router import Router
from ppctl.records.rehearsal_record import BACKWARD, FORWARD
from ppctl.rehearsal.ledger import DeviceLedger, launches, moved_bytes, multiplies
from ppctl.rehearsal.stand_ins import FusedKernels, capability
from ppctl.weight_gradients.wide_sums import WideSum


class Kernels(DeviceLedger):
    """Remembers each kernel as well: phase, name and shapes of operands -> count and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, str, str], Counter[str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As the ledger, with the kernel's name."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace != "c10d" and launches(func, args, result):
            shapes = " ".join(str(list(tensor.shape)) for tensor in tensors_of(args))
            size = 0 if multiplies(func) else moved_bytes(func, args, kwargs or {}, result)
            row = self.seen.setdefault((self.during, str(func).removeprefix("aten."), shapes), Counter())
            row.update(count=1, bytes=size)
        return result


def count(recipe: str, *overrides: str) -> Kernels:
    """The ledger of a layer's forward and backward."""
    composed, _, _ = planned((f"+recipe={recipe}", "launch.device=cuda", *overrides), for_training=True)
    config, device = composed.config, torch.device("meta")
    model = config.model
    with FusedKernels(), Kernels() as ledger:
        kernels = choose_kernels(config, capability(device, packed=False))
        with device:
            layer = DecoderLayer(model, moe=model.num_moe_experts is not None, kernels=kernels).to(torch.bfloat16)
        if kernels.adds_gradients:  # as `let_products_add` in training; the first gradients of a step begin the sums
            for weight in layer.parameters():
                weight.wide_sum = WideSum(lambda: None, lambda total: None)  # type: ignore[attr-defined]
        for router in (module for module in layer.modules() if isinstance(module, Router)):
            router.reset_bias(device)
        ledger.watch_layers([(layer, recipe)])
        shape = config.train.micro_batch_size, config.data.seq_length, model.hidden_size
        x = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        turns = Rotary(model).turns(x, shape[1])
        with torch.no_grad():
            layer(x, turns)  # which makes what all microbatches share
        ledger.begin_step()
        ledger.seen.clear()
        ledger.during = FORWARD
        out = layer(x, turns)
        ledger.during = BACKWARD
        gradient = torch.empty_like(out)
        torch.autograd.backward([out], [gradient])
    return ledger


def main() -> None:
    """Count and print."""
    recipes = [word for word in sys.argv[1:] if not word.startswith("-")] or ["llama3_8b", "deepseek_v3"]
    for recipe in recipes:
        ledger = count(recipe)
        if "--kernels" in sys.argv:
            for (during, name, shapes), row in ledger.seen.items():
                print(f"{during:8} {row['count']:3} {row['bytes'] / 1e6:10.1f} MB  {name:45} {shapes}")
        for each in ledger.layers:
            counts = f"{each.kernels} kernels, {each.others} others, {each.other_bytes / 1e9:.2f} GB"
            print(f"{recipe} {each.during}: {counts}")


if __name__ == "__main__":
    main()
