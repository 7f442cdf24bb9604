"""A model whole in this process, from a checkpoint of any cut or a Hugging Face directory; it continues one row of
tokens, with the keys and values of those before them kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.families.config_json import known_families
from ppctl.families.directory import CONFIG, read_config_file
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Layer
from ppctl.model.linear import columns
from ppctl.model.packing import Packing
from ppctl.model.stage import StageModule, build_stage
from ppctl.model.stage_model import pieces
from ppctl.plan import StageSpec
from ppctl.pretrained.conversion import Progress, SavedWeights
from ppctl.pretrained.hugging_face import open_weights


class WholeModel(NamedTuple):
    """Continues one row of tokens; a second row needs another one."""

    after: Callable[[Tensor], Tensor]
    """The next tokens of the row, [1, s] int64 -> the logits [words] after the last of them."""
    words: int | None = None
    """The number of words that the model has a row for; None if that is not known."""
    longest: int | None = None
    """The number of positions that the model has a row for; None if it has no such rows."""


def open_model(source: Path, device: torch.device, dtype: torch.dtype | None, progress: Progress) -> WholeModel:
    """The model at `source`, a checkpoint or a directory with a config.json; `dtype` None keeps that of the embedding.
    Raises ConfigError and CheckpointError as imports and exports do."""
    if not (source / CONFIG).is_file():
        saved = SavedWeights(source, dtype=None, mtp=False)
        model, first = saved.model, next(iter(saved.dtypes.values()))
        read: Callable[[str], Tensor] = saved.tensor
    elif read_config_file(source).get("model_type") in known_families():
        model, _, names, reader = open_weights(source, mtp=False)
        read, first = reader.tensor, reader.spec(next(iter(names))).dtype
    else:
        from ppctl.foreign.library import read_whole_model  # transformers, which other models do without

        return WholeModel(_CachedByLibrary(read_whole_model(source, dtype).to(device)))
    stage = _filled(model, read, progress, device=device, dtype=dtype or first)
    learned = model.position_embedding_type == "learned_absolute" and foreign_of(model) is None
    go_on = _Cached(stage) if isinstance(stage, StageModule) else _CachedByLibrary(stage.model)
    return WholeModel(go_on, model.vocab_size, model.max_position_embeddings if learned else None)


@torch.no_grad()
def _filled(model: ModelConfig, read: Callable[[str], Tensor], progress: Progress, **given: Any) -> Any:
    """A stage of all layers, with the values that `read` gives by canonical name."""
    decoder = (Layer("decoder", index) for index in range(model.num_layers))
    spec = StageSpec(0, 0, 0, (Layer("embedding"), *decoder, Layer("loss")), (), (), 0, 0, 0)
    given |= {"seed": 0, "initialize": lambda *_: None}
    if (foreign := foreign_of(model)) is None:
        stage: Any = build_stage(spec, model, **given)
    else:
        from ppctl.foreign.foreign_stage import build_foreign_stage

        stage = build_foreign_stage(spec, model, foreign, **given)
    rows: Mapping[str, Any] = stage.parameter_rows()
    tensors: Mapping[str, Tensor] = {**stage.canonical_parameters(), **stage.canonical_buffers()}
    for done, (name, tensor) in enumerate(tensors.items(), 1):
        progress(name, done, len(tensors))
        for of, piece in pieces(name, tensor, rows[name], range(model.num_moe_experts or 0)):
            piece.copy_(read(of))
    return stage.train(False)


class _Cached:
    """ppctl's own decoder, one row at a time."""

    def __init__(self, stage: StageModule) -> None:
        assert stage.output is not None  # the stage has the whole model
        self.stage, self.head, self.seen = stage, stage.output, 0
        stage.output = None  # logits are needed after the last token alone
        for layer in stage.decoder_layers().values():
            attention: Any = layer.get_submodule("attention")
            attention.shared = _KeptKeys()

    def __call__(self, tokens: Tensor) -> Tensor:
        first, self.seen = self.seen, self.seen + tokens.shape[1]
        if self.stage.rotary is not None:  # a table as long as the row, in which positions are looked up
            self.stage.rotary.turns(self.head.weight, 1 << self.seen.bit_length())
        positions = torch.arange(first, self.seen, device=tokens.device)[None]
        (state,) = self.stage(tokens, tokens=tokens, packing=Packing(positions))
        return columns(state[:, -1:], self.head)[0][0, 0]


class _KeptKeys:
    """Attention of new queries to all keys and values so far, in the place of `Attend`."""

    kept: tuple[Tensor, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: object, scale: float | None, _: object) -> Tensor:
        """[b, heads, s, values' width]: of a whole prompt, or of one token."""
        k, v = self.kept = tuple(map(lambda *pair: torch.cat(pair, dim=2), *filter(None, (self.kept, (k, v)))))
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=grouped)


class _CachedByLibrary:
    """A model of transformers with its own cache; one that has none computes the whole row for every token."""

    def __init__(self, model: Any) -> None:
        self.model, self.past, self.seen = model.eval(), None, list[Tensor]()
        keeps = "past_key_values" in inspect.signature(model.forward).parameters
        self.named: dict[str, Any] = {"use_cache": keeps, "return_dict": True}

    def __call__(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens)
        given = torch.cat(self.seen, dim=1) if self.past is None else tokens
        result = self.model(input_ids=given, **self.named)
        if self.named["use_cache"]:
            self.past = self.named["past_key_values"] = result.past_key_values
        logits: Tensor = result.logits[0, -1]
        return logits
