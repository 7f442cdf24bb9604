"""One stage of a decoder, built from its StageSpec: embedding, decoder layers, loss head, or nothing at all.

Knows which modules a stage's layer names stand for and their canonical order. Must not know pp, vpp, ranks' neighbours,
the schedule or the optimizer: a stage's weights and outputs depend on its layers and the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem
from ppctl.model.initialize import initialize
from ppctl.model.layer import DecoderLayer
from ppctl.model.rotary import Rotary
from ppctl.plan import StageSpec


class StageModule(nn.Module):
    """What one stage computes. `layers` are names in model order: "embedding", "decoder.3", ..., "loss".

    The module's own parameter names are the canonical global ones, whatever else is on the stage.
    """

    def __init__(self, layers: Sequence[str], model: ModelConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(model.vocab_size, model.hidden_size) if "embedding" in layers else None
        ids = [name.removeprefix("decoder.") for name in layers if name.startswith("decoder.")]
        self.layers = nn.ModuleDict({id_: DecoderLayer(model) for id_ in ids})
        self.runs: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = list(self.layers.values())
        """What the layers are called through, in order: themselves, or runs of them that are recomputed."""
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon) if "loss" in layers else None
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if "loss" in layers else None
        self.rotary = Rotary(model)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [b, s] (int64) where the stage owns the embedding, else hidden states [b, s, h], through the stage.

        Returns logits [b, s, vocab_size] where it owns the loss, else hidden states [b, s, h]: always a new tensor,
        also from an empty stage, so that input and output are two nodes of the graph (one may be freed without the
        other).
        """
        given = x
        if self.tok_embeddings is not None:
            x = self.tok_embeddings(x)
        if self.layers:
            cos, sin = self.rotary.tables(x)
            for run in self.runs:
                x = run(x, cos, sin)
        if self.norm is not None and self.output is not None:
            x = self.output(self.norm(x))
        return x.clone() if x is given else x

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters by canonical global name, in canonical order; a tied output is one of its own."""
        return dict(self.named_parameters())


def build_stage(
    spec: StageSpec, model: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> StageModule:
    """Build a stage without weights, give it memory on `device` in `dtype`, and fill it by canonical name.

    Raises ConfigError (PP-E720) for a model whose blocks ppctl does not build yet.
    """
    refuse_missing_blocks(model)
    module = meta_stage(spec.layers, model).to(dtype).to_empty(device=device)
    initialize(module.canonical_parameters(), model, seed)
    return module


def meta_stage(layers: Sequence[str], model: ModelConfig) -> StageModule:
    """A stage whose parameters have shapes but no memory."""
    with torch.device("meta"):
        return StageModule(layers, model)


def canonical_names(model: ModelConfig, layers: Sequence[str]) -> tuple[str, ...]:
    """Canonical parameter names of a stage with these layers; with all of the model's layers, the model's order."""
    return tuple(meta_stage(layers, model).canonical_parameters())


def refuse_missing_blocks(model: ModelConfig) -> None:
    """Raise ConfigError naming every block that the model asks for and that is planned only, not built."""
    missing = {
        "mixture of experts": ("model.num_moe_experts", model.num_moe_experts is not None),
        "multi-token prediction": ("model.mtp_num_layers", bool(model.mtp_num_layers)),
    }
    problems = [
        Problem(
            "PP-E720",
            f"{block} can be planned but not trained yet: {key} asks for it",
            remedy="plan it with `ppctl plan`, or train a dense model: `ppctl train +recipe=quickstart`",
            place=key,
        )
        for block, (key, wanted) in missing.items()
        if wanted
    ]
    if problems:
        raise ConfigError(problems)
