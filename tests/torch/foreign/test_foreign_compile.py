"""Compiled layers of transformers: the same numbers within a millionth; what the compiler refuses is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foreign_models import HIDDEN, config_of, model_of
from torch import Tensor

from ppctl.config.schema import TrainConfig
from ppctl.errors import ConfigError
from ppctl.foreign.anatomy import survey
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model
from ppctl.geometry.layers import Layer
from ppctl.model.compile import compile_stage
from ppctl.model.recompute import recompute

CPU = torch.device("cpu")
CLOSE = 1e-6
"""As for ppctl's own blocks (tests/torch/model/test_compile.py)."""


def stage_of(kind: str) -> ForeignStage:
    whole = model_of(kind)
    stage = ForeignStage(
        make_model(config_of(kind), "meta").train(), survey(whole), [Layer("decoder", 1), Layer("decoder", 2)]
    )
    values = whole.state_dict()
    with torch.no_grad():
        for name, tensor in (*stage.canonical_parameters().items(), *stage.canonical_buffers().items()):
            tensor.copy_(values[name])
    return stage


def run(stage: ForeignStage) -> dict[str, Tensor]:
    """Output and gradients by name."""
    given = torch.randn(2, 32, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (output,) = stage(given)
    output.square().sum().backward()
    gradients = {name: p.grad for name, p in stage.canonical_parameters().items() if p.grad is not None}
    assert given.grad is not None and gradients
    return {"output": output.detach(), "input": given.grad, **gradients}


@pytest.mark.whole  # the compiler takes half a minute
@pytest.mark.timeout(480)
@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mixtral"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_compiled_stage_agrees_to_a_millionth(kind: str, recomputed: bool) -> None:
    expected, compiled = run(stage_of(kind)), stage_of(kind)
    compile_stage(compiled, CPU)
    if recomputed:
        recompute(compiled, TrainConfig(recompute_granularity="full", recompute_method="uniform"), 0)
    torch._dynamo.reset()  # what other cases have compiled is the same code
    torch._dynamo.utils.counters.clear()
    got = run(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= CLOSE * value.abs().max(), name


@pytest.mark.whole
def test_a_layer_whose_code_the_compiler_refuses_is_named() -> None:
    stage = stage_of("Llama")
    inner: Any = stage.model.get_submodule("model.layers.1.mlp")
    forward = inner.forward

    def looks(state: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # as code does that prints or asks for a value
        found: Tensor = forward(state)
        return found

    inner.forward = looks
    compile_stage(stage, CPU)
    with pytest.raises(ConfigError, match=r"PP-E551.*model\.layers\.1 \(LlamaDecoderLayer\) cannot be compiled"):
        run(stage)
