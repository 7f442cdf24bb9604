"""torch.compile over a stage's layers, each on its own: names of parameters and places of messages stay as they are.

Compiled kernels add up in another order than torch's own: losses agree within a millionth, not to the bit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch

from ppctl.errors import ConfigError, Problem
from ppctl.model import split
from ppctl.model.stage_model import StageModel


def compile_stage(stage: StageModel, device: torch.device, *, packed: bool = False) -> None:
    """Compile the stage's decoder layers in place; of a layer with experts only the attention: experts' shapes vary.

    Attention's core is left out with `packed` documents, whose lengths always differ, and if ranks share sequences.
    Products with exchanges are left out, too (in the whole process): what is compiled lies between them. Call this
    before `recompute` replaces methods of layers. Raises ConfigError (PP-E770), before the first step, if the device's
    compiler is missing.
    """
    missing = _missing_tool(device)
    if missing:
        message = f"train.compile on {device.type} needs {missing}, which is not here"
        raise ConfigError(Problem("PP-E770", message, "train.compile=false"))
    options = _options(device)
    split.exchange = torch.compiler.disable(split.exchange)  # here: torch's compiler takes 2 s to import
    for layer in (module for name, module in stage.decoder_layers().items() if name.kind == "decoder"):
        attention: Any = getattr(layer, "attention", None)
        if packed or getattr(attention, "shared", None) is not None:
            attention.mix = torch.compiler.disable(attention.mix)
        dense = getattr(layer, "moe", None) is None
        (layer if dense else layer.get_submodule("attention")).compile(dynamic=False, options=options)


def _options(device: torch.device) -> dict[str, int] | None:
    """Inductor's options: a CPU with AVX-512 is compiled for half of that width.

    At the full width GCC 12 miscompiles a kernel with two of torch's transpositions of 32 x 32 numbers of 16 bits:
    their results are what was in memory before. Products in 8 bits have such kernels (decision 35).
    """
    wide = device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return {"cpp.simdlen": 256} if wide else None


def _missing_tool(device: torch.device) -> str | None:
    """What inductor needs and this machine lacks, or None: a C++ compiler (CPU), Triton or a C compiler (CUDA)."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton"
        return None if _found("CC", "gcc", "clang") else "a C compiler (gcc, clang or $CC)"
    return None if _found("CXX", "g++", "clang++") else "a C++ compiler (g++, clang++ or $CXX)"


def _found(variable: str, *usual: str) -> bool:
    chosen = os.environ.get(variable)
    return any(shutil.which(name) for name in ([chosen] if chosen else usual))
