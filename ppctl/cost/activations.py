"""What one microbatch keeps on one device from its forward to its backward, part by part.

Knows layers, the sizes that divide their activations, and which parts recomputation drops. Must not know schedules,
ranks or devices. Sources: Korthikanti et al., arXiv 2205.05198, for the parts and what sequence parallelism divides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from ppctl.config.schema import ModelConfig, TrainConfig
from ppctl.cost.allocator import ALLOCATORS, Allocator
from ppctl.geometry.layers import KindName, Layer, expert_width, head_dim, layer_kinds, query_groups
from ppctl.geometry.recompute import recomputed_modules, recomputed_runs


class Shares(NamedTuple):
    """What one device holds of a microbatch: tokens and the sizes that divide its activations."""

    micro_batch_size: int
    seq_length: int
    tp: int = 1
    cp: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    fused_loss: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.micro_batch_size * -(-self.seq_length // self.cp)

    @property
    def sp(self) -> int:
        """What divides the residual stream."""
        return self.tp if self.sequence_parallel else 1


class Part(NamedTuple):
    """Bytes per token that one part of a layer keeps; `module` names the recomputation that drops it."""

    module: str
    size: float


class Setting(NamedTuple):
    """Everything but the layer: the model's share on a device, the size of an element, and whose blocks run."""

    shares: Shares
    element: int
    """Bytes of an activation."""
    allocator: Allocator = ALLOCATORS["torch"]
    train: TrainConfig = TrainConfig()
    """Its `recompute_*`."""
    packed: bool = False
    """Whether documents are kept apart: attention then has a result for each, beside the one for all."""


INPUT = "input"
"""The layer's own input."""


def norm_parts(width: float, setting: Setting, module: str = INPUT) -> Iterator[Part]:
    """A norm's input (kept by `module`) and what it puts out, per token."""
    size, keeps = setting.element, setting.allocator
    yield Part(module, width * (4 if keeps.fp32_norms else size))
    yield Part("layernorm", width * (size + (4 if keeps.fp32_norms else 0)))
    if keeps.norm_statistics:
        yield Part("layernorm", 4)


def attention_parts(model: ModelConfig, setting: Setting) -> Iterator[Part]:
    """Input, norm, projections, scores and result of one attention."""
    shares, size = setting.shares, setting.element
    h, heads, tp = model.hidden_size, model.num_attention_heads, shares.tp
    yield from norm_parts(h / shares.sp, setting)
    if model.multi_latent_attention:
        q_width = model.qk_head_dim + model.qk_pos_emb_head_dim
        inside, outside = _norm_sizes(setting)
        latent = (model.q_lora_rank or 0) + model.kv_lora_rank
        yield Part("attention", latent * inside + size * (model.qk_pos_emb_head_dim + heads * model.v_head_dim / tp))
        yield Part("mla_up_proj", latent * outside + size * heads * (2 * q_width + model.v_head_dim) / tp)
    else:
        d, groups = head_dim(model), query_groups(model)
        normed = (heads + groups) * sum(_norm_sizes(setting)) if model.qk_layernorm else 0
        plain = size * ((0 if normed else heads + groups) + heads + groups)
        yield Part("attention", d * (normed + plain) / tp)
    yield Part("core_attn", 4 * heads / tp + _scores(model, setting))
    if setting.packed:
        width = model.v_head_dim if model.multi_latent_attention else head_dim(model)
        yield Part("core_attn", size * heads * width / tp)
    yield Part("attention", h / shares.sp if model.hidden_dropout else 0)


def _norm_sizes(setting: Setting) -> tuple[int, int]:
    """Bytes per element of a norm's input and of its output."""
    return (4, setting.element + 4) if setting.allocator.fp32_norms else (setting.element, setting.element)


def _scores(model: ModelConfig, setting: Setting) -> float:
    """Without a fused kernel: the probabilities of every pair, and with dropout the mask and what it leaves."""
    if model.attention_backend != "unfused":
        return 0.0
    per_pair = setting.element + (setting.element + 1 if model.attention_dropout else 0)
    return model.num_attention_heads / setting.shares.tp * setting.shares.seq_length * per_pair


def feed_forward_parts(model: ModelConfig, moe: bool, setting: Setting) -> Iterator[Part]:
    """Input, norm and inner vectors of one feed-forward; experts: the same for each chosen one."""
    shares, size, keeps = setting.shares, setting.element, setting.allocator
    h, vectors = model.hidden_size, keeps.gated_vectors if model.gated_linear_unit else 2
    yield from norm_parts(h / shares.sp, setting, "residual")
    if moe:
        shared, chosen = model.moe_shared_expert_intermediate_size or 0, model.moe_router_topk
        # A device's experts see the tokens of etp/tp of its own and are as wide as 1/etp: their inner width is 1/tp's.
        copies = keeps.expert_copies * h * shares.etp / shares.tp
        inner = chosen * expert_width(model) / shares.tp
        yield Part("moe", size * (chosen * copies + (vectors - 1) * inner) + 8 * (model.num_moe_experts or 0))
        yield Part("moe_act", size * inner)
        yield Part("moe", size * vectors * shared / shares.tp)
    else:
        yield Part("mlp", size * vectors * model.ffn_hidden_size / shares.tp)
    yield Part("residual", h / shares.sp if model.hidden_dropout else 0)


def parts(model: ModelConfig, kind: KindName, moe: bool, setting: Setting) -> list[Part]:
    """What one layer keeps per token, without recomputation."""
    shares, keeps = setting.shares, setting.allocator
    hidden = model.hidden_size / shares.sp
    if kind == "embedding":
        return [Part(INPUT, 8)]
    if kind == "loss":
        per_logit = keeps.fused_logit_bytes if shares.fused_loss else keeps.logit_bytes
        vectors = sum(_norm_sizes(setting)) * hidden
        outputs = 1 + (model.mtp_num_layers or 0)
        return [Part(INPUT, outputs * (vectors + per_logit * model.vocab_size / shares.tp) + 8)]
    layer = [*attention_parts(model, setting), *feed_forward_parts(model, moe, setting)]
    # Two norms, their outputs side by side in one vector of 2h, and the projection's result.
    return [*layer, Part("mtp", (2 * sum(_norm_sizes(setting)) + setting.element) * hidden)] if kind == "mtp" else layer


def gradients(model: ModelConfig, kind: KindName, moe: bool, setting: Setting) -> float:
    """Bytes per token of the activations' gradients that live at once while a layer's backward runs."""
    shares = setting.shares
    inner, hidden, per_logit = setting.allocator.gradients
    if kind == "embedding":
        return 0.0
    if kind == "loss":
        return per_logit * model.vocab_size / shares.tp
    width = model.moe_router_topk * expert_width(model) if moe else model.ffn_hidden_size
    return setting.element * (inner * width / shares.tp + hidden * model.hidden_size / shares.sp)


class StageActivations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    kept: int
    """From its forward to its backward."""
    in_backward: int
    """More while its backward runs: the largest piece that is computed again at once, with its gradients."""


def stage_activations(
    model: ModelConfig, layers: Iterable[Layer], setting: Setting, stage: int = 0
) -> StageActivations:
    """What one microbatch keeps on a stage, on one device. An empty stage, and a recomputed layer, keep their input."""
    tokens, held = setting.shares.tokens, tuple(layers)
    hidden = model.hidden_size * setting.element / setting.shares.sp
    if not held:
        return StageActivations(int(tokens * hidden), 0)
    runs, modules = recomputed_runs(setting.train, stage, held), recomputed_modules(setting.train, stage)

    @cache
    def price(kind: KindName, moe: bool) -> tuple[float, float, float]:
        """Bytes per token that stay, that `modules` compute again, and of gradients."""
        found = parts(model, kind, moe, setting)
        dropped = sum(size for module, size in found if module in modules)
        return sum(size for _, size in found) - dropped, dropped, gradients(model, kind, moe, setting)

    kept = largest = 0.0
    for run in runs:
        priced = [price(*kind) for kind in layer_kinds(model, run)]
        kept += hidden
        again = sum(stays + dropped for stays, dropped, _ in priced) - hidden
        largest = max(largest, again + max(gradient for _, _, gradient in priced))
    for kind in layer_kinds(model, set_apart(held, runs)):
        stays, dropped, gradient = price(*kind)
        kept += stays
        largest = max(largest, dropped + gradient)
    return StageActivations(int(tokens * kept), int(tokens * largest))


def set_apart(layers: Iterable[Layer], runs: Iterable[Iterable[Layer]]) -> list[Layer]:
    """The layers that no run recomputes, in order."""
    recomputed = {layer for run in runs for layer in run}
    return [layer for layer in layers if layer not in recomputed]
