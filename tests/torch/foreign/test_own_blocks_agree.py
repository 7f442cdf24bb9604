"""Every family of the table through ppctl's own blocks and through transformers' own code: the same numbers to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cuts import cut
from hugging_face_models import relative, take
from torch import Tensor

from ppctl.families.directory import open_directory
from ppctl.families.family_table import FAMILIES, Family
from ppctl.foreign.anatomy import survey
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model, read_own_config
from ppctl.foreign.miniature import miniatures
from ppctl.geometry.layers import parse_layers
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.model.stage_model import pieces
from ppctl.pretrained.hugging_face import DirectoryReader

CLOSE = 1e-5
LAYERS, WORDS = 4, 256
CHOSEN = "num_experts_per_tok"
BESIDE: dict[str, float] = {"moe_aux_loss_coeff": 0.0, "mtp_num_layers": 0}
"""What ppctl's own blocks train with and transformers' own code does not."""


def config_of(family: Family) -> Any:
    """A small config of a family, from its class's defaults alone."""
    config = transformers.AutoConfig.for_model(family.model_type)
    for field in family.fields:
        if field.ours in BESIDE:
            setattr(config, field.theirs, BESIDE[field.ours])
    config.num_hidden_layers = LAYERS
    if getattr(config, CHOSEN, 1) is None:
        setattr(config, CHOSEN, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    if isinstance(getattr(config, "mlp_layer_types", None), list):
        config.mlp_layer_types = config.mlp_layer_types[:LAYERS]
    return next(iter(miniatures(config)))


def whole_model(family: Family) -> Any:
    """With random weights; what would hide behind ones and zeros is moved off them."""
    torch.manual_seed(3)
    model = make_model(config_of(family), "cpu").train()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor), alpha=0.05)
    return model


def results(stage: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and logits; gradients are in the stage's parameters."""
    (logits,) = stage(tokens)
    loss = microbatch_loss(logits, labels, torch.ones_like(labels, dtype=torch.float32), float(labels.numel()))
    loss.backward()
    return loss.detach(), logits.detach()


def in_tiers() -> list[Any]:
    """Every row of the table; `make test` takes each third one."""
    return [
        pytest.param(family, id=family.model_type, marks=pytest.mark.whole if number % 3 else ())
        for number, family in enumerate(FAMILIES)
    ]


@pytest.mark.parametrize("family", in_tiers())
def test_own_blocks_compute_what_transformers_own_code_does(family: Family, tmp_path: Path) -> None:
    model = whole_model(family)
    model.save_pretrained(tmp_path / "weights")
    reader = DirectoryReader(open_directory(tmp_path / "weights"))
    layers = ["embedding", *(f"decoder.{index}" for index in range(LAYERS)), "loss"]
    (spec,) = cut("E" + "t" * LAYERS + "L", 1)
    ours = build_stage(spec, reader.directory.model, seed=1, dtype=torch.float32, device="cpu")
    take(ours, reader)
    blank = make_model(read_own_config(tmp_path / "weights"), "meta").train()
    theirs = ForeignStage(blank, survey(model), parse_layers(layers))
    with torch.no_grad():
        values = model.state_dict()
        for key, tensor in (*theirs.canonical_parameters().items(), *theirs.canonical_buffers().items()):
            tensor.copy_(values[key])
    tokens = torch.randint(0, WORDS, (2, 20), generator=torch.Generator().manual_seed(0))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    one, other = results(ours, tokens, labels), results(theirs, tokens, labels)
    assert one[0].item() == pytest.approx(other[0].item(), rel=CLOSE)
    assert relative(one[1], other[1]) <= CLOSE
    with torch.no_grad():  # saved as weights, gradients come back under the names of ppctl's own blocks
        for key, parameter in theirs.canonical_parameters().items():
            model.get_parameter(key).copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    gradients, seen = DirectoryReader(open_directory(tmp_path / "gradients")), 0
    for key, parameter in ours.canonical_parameters().items():
        assert parameter.grad is not None, key
        for piece, part in pieces(key, parameter.grad, ours.parameter_rows()[key], ours.experts):
            assert relative(part, gradients.tensor(piece)) <= CLOSE, piece
            seen += 1
    assert seen > 3 + 5 * LAYERS
