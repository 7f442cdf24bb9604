"""A model whole in this process, from a checkpoint of any cut or a Hugging Face directory; it continues one row of
tokens, with the keys and values of those before them kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from ppctl.model.stage_model import StageModel, pieces
from ppctl.plan import StageSpec
from ppctl.pretrained.conversion import Progress, SavedWeights
from ppctl.pretrained.hugging_face import open_weights

Continue = Callable[[Tensor], Tensor]
"""The next tokens of a row [1, s] (int64) -> the logits [words] after the last of them."""


def open_model(source: Path, device: torch.device, dtype: torch.dtype | None, progress: Progress) -> WholeModel:
    """The model at `source`, a checkpoint or a directory with a config.json; `dtype` None keeps that of the embedding.
    Raises ConfigError and CheckpointError as imports and exports do."""
    if not (source / CONFIG).is_file():
        saved = SavedWeights(source, dtype=None, mtp=False)
        return _filled(saved.model, saved.dtypes, saved.tensor, device, dtype, progress)
    if read_config_file(source).get("model_type") in known_families():
        model, _, specs, read = open_weights(source, mtp=False)
        dtypes = {name: spec.dtype for name, spec in specs.items()}
        return _filled(replace(model, mtp_num_layers=None), dtypes, read, device, dtype, progress)
    from ppctl.foreign.library import read_whole_model  # transformers, which other models do without

    return WholeModel(_CachedByLibrary(read_whole_model(source, dtype).to(device)), device)


@dataclass(frozen=True)
class WholeModel:
    """Continues one row of tokens; a second row needs another one."""

    go_on: Continue
    device: torch.device
    words: int | None = None
    """The number of words that the model has a row for; None if that is not known."""
    longest: int | None = None
    """The number of positions that the model has a row for; None if it has no such rows."""

    @torch.inference_mode()
    def after(self, tokens: list[int]) -> Tensor:
        """The logits [words] after these further tokens of the row."""
        return self.go_on(torch.tensor([tokens], device=self.device))


def _filled(
    model: ModelConfig,
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[str], Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    progress: Progress,
) -> WholeModel:
    decoder = (Layer("decoder", index) for index in range(model.num_layers))
    spec = StageSpec(0, 0, 0, (Layer("embedding"), *decoder, Layer("loss")), (), (), 0, 0, 0)
    given: dict[str, Any] = dict(seed=0, device=device, dtype=dtype or next(iter(dtypes.values())))
    given["initialize"] = lambda *_: None  # values are read
    foreign, longest = foreign_of(model), None
    if foreign is None:
        stage: StageModel = build_stage(spec, model, **given)
        if model.position_embedding_type == "learned_absolute":
            longest = model.max_position_embeddings
    else:
        from ppctl.foreign.foreign_stage import build_foreign_stage

        stage = build_foreign_stage(spec, model, foreign, **given)
    stage.train(False)
    rows = stage.parameter_rows()
    tensors = {**stage.canonical_parameters(), **stage.canonical_buffers()}
    with torch.no_grad():
        for done, (name, tensor) in enumerate(tensors.items(), 1):
            progress(name, done, len(tensors))
            for of, piece in pieces(name, tensor.detach(), rows[name], range(model.num_moe_experts or 0)):
                piece.copy_(read(of))
    go_on = _Cached(stage) if isinstance(stage, StageModule) else _CachedByLibrary(stage.model)  # type: ignore[attr-defined]
    return WholeModel(go_on, device, model.vocab_size, longest)


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
        """Go on as `Continue`."""
        first, self.seen = self.seen, self.seen + tokens.shape[1]
        if self.stage.rotary is not None:  # a table as long as the row, in which positions are looked up
            self.stage.rotary.turns(self.head.weight, 1 << self.seen.bit_length())
        positions = torch.arange(first, self.seen, device=tokens.device)[None]
        (state,) = self.stage(tokens, tokens=tokens, packing=Packing(positions))
        return columns(state[:, -1:], self.head)[0][0, 0]


class _KeptKeys:
    """Attention of new queries to all keys and values so far, in the place of `Attend`."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: object, scale: float | None, _: object) -> Tensor:
        """[b, heads, s, values' width]: of a whole prompt, or of one token."""
        if self.kept is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.kept, (k, v), strict=True))
        self.kept = k, v
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=grouped)


class _CachedByLibrary:
    """A model of transformers with its own cache; one that has none computes the whole row for every token."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen, self.past = model.eval(), torch.empty(1, 0, dtype=torch.int64), None
        self.keeps = "past_key_values" in inspect.signature(model.forward).parameters

    def __call__(self, tokens: Tensor) -> Tensor:
        """Go on as `Continue`."""
        self.seen = torch.cat([self.seen.to(tokens.device), tokens], dim=1)
        cache = {"past_key_values": self.past, "use_cache": True} if self.keeps else {"use_cache": False}
        result = self.model(input_ids=tokens if self.past is not None else self.seen, return_dict=True, **cache)
        self.past = getattr(result, "past_key_values", None) if self.keeps else None
        logits: Tensor = result.logits[0, -1]
        return logits
