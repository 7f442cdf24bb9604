"""Every published model, built at its full size without memory, has the tensors that are planned."""

from pathlib import Path

import pytest
import torch
import yaml

from ppctl.config.schema import ModelConfig
from ppctl.cost.parameter_counts import (
    largest_matrices,
    mtp_parameters,
    replicated_parameters,
    stage_count,
    total_parameters,
)
from ppctl.families.directory import model_tensors
from ppctl.geometry.layers import parse_layers
from ppctl.geometry.rows import MTP_EMBEDDING
from ppctl.model.stage import meta_stage
from ppctl.model.stage_model import pieces

CONF = Path(__file__).parents[3] / "conf" / "model"
NAMES = sorted({path.stem for path in CONF.glob("*.yaml")} - {"gpt3_175b"})
"""All whose blocks are built. The closed forms' totals are tested in tests/unit/cost, which says what confirms them."""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_built_is_what_is_planned(name: str) -> None:
    model = ModelConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))
    mtp = [f"mtp.{depth}" for depth in range(model.mtp_num_layers or 0)]
    decoders = [f"decoder.{layer}" for layer in range(model.num_layers)]
    stages = [*map(parse_layers, (["embedding", *decoders[:2]], decoders[2:], [*mtp, "loss"]))]
    built: dict[str, tuple[int, ...]] = {}
    for layers in stages:
        stage = meta_stage(layers, model)
        tensors: dict[str, torch.Tensor] = {**stage.canonical_parameters(), **stage.canonical_buffers()}
        count = sum(tensor.numel() for tensor in tensors.values())
        assert count == stage_count(model, layers).total()
        assert max(largest_matrices(model, layers)) == max(tensor.numel() for tensor in tensors.values())
        tensors.pop(MTP_EMBEDDING, None)
        built |= {
            piece: tuple(part.shape)
            for stack, tensor in tensors.items()
            for piece, part in pieces(stack, tensor, stage.parameter_rows()[stack], stage.experts)
        }
        copies = replicated_parameters(model, layers)
        assert count - copies == sum(tensor.numel() for tensor in tensors.values())
    assert built == model_tensors(model)
    assert sum(stage_count(model, s).total() - replicated_parameters(model, s) for s in stages) == (
        total_parameters(model) + mtp_parameters(model)
    )
