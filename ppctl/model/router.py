"""The router of a mixture of experts: which experts a token goes to, with which weights, and how experts stay balanced.

Sources: softmax routing and the balance loss as in Switch Transformers (arXiv:2101.03961) with Megatron's factor E / (K
T^2); sigmoid scores, a bias for the choice alone, groups and the sequence-wise loss as in the DeepSeek-V3 report
(arXiv:2412.19437, 2.1.2); z-loss as in ST-MoE (arXiv:2202.08906).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.activation import normalised
from ppctl.model.linear import make_weight, product_in_float32
from ppctl.tensors.wide_dtype import wide_dtype


class Routing(NamedTuple):
    """Where tokens go."""

    experts: Tensor
    """[b, s, K] int64, the best first."""
    weights: Tensor
    """[b, s, K] at least float32: factors on the outputs of these experts."""
    counts: Tensor
    """Tokens that each expert gets, int64 [E]."""
    auxiliary: Tensor | None
    """The auxiliary loss of this microbatch (scalar, coefficients applied); None if there is none."""
    x: Tensor
    """The tokens. Whoever reads them next must read these: the router adds its gradient of the tokens to theirs."""


class SumOverTokens(Protocol):
    """The ranks that have equal shares of a microbatch's tokens, as one of these ranks uses them."""

    ranks: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the memory of x, which has no gradient. A collective of these ranks."""


@dataclass(slots=True)
class RouterLedger:
    """Losses and counts that a router reports in one step, and the scale of its losses; cleared before each step."""

    scale: float = 1.0
    """Factor on the gradients of auxiliary losses: 1 / microbatches of the global batch, so that they are means."""
    losses: list[Tensor] = field(default_factory=list)
    """Auxiliary losses of the microbatches so far."""
    counts: Tensor | None = None
    """Tokens per expert so far, int64 [E]."""

    def clear(self) -> None:
        """Forget the losses and counts."""
        self.losses, self.counts = [], None


class Router(nn.Module):
    """Scores every expert for every token in float32 (float64 in a model of float64), and chooses K."""

    expert_bias: Tensor | None

    def __init__(self, model: ModelConfig, *, fused: bool = False) -> None:
        super().__init__()
        self.model, self.fused = model, fused
        self.num_experts = model.num_moe_experts or 0
        self.weight = make_weight(self.num_experts, model.hidden_size)
        self.register_buffer("expert_bias", None)
        self.reset_bias(self.weight.device)
        self.ledger = RouterLedger()
        self.others: SumOverTokens | None = None
        """The ranks that have the other tokens of a microbatch, if there are any."""

    def reset_bias(self, device: torch.device | str) -> None:
        """Set the experts' bias, if there is one, to zero, in float32 at least: bfloat16 would lose an update of it."""
        if self.model.moe_router_enable_expert_bias:
            wide = wide_dtype(self.weight.dtype)
            self.expert_bias = torch.zeros(self.num_experts, dtype=wide, device=device)

    def counts_of_step(self) -> Tensor:
        """Tokens that each expert got since the ledger was cleared, int64 [E]."""
        counts = self.ledger.counts
        return torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device) if counts is None else counts

    def forward(self, x: Tensor) -> Routing:
        """Route the tokens of `x` [b, s, h]. In training, enter losses and counts into the ledger."""
        logits, x = product_in_float32(x, self.weight)
        sigmoid = self.model.moe_router_score_function == "sigmoid"
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        experts = self._choose(scores.detach())
        weights = self._weigh(scores.gather(-1, experts), sigmoid)
        counts = count_by_number(experts.flatten(), self.num_experts)
        routing = Routing(experts, weights, counts, self._auxiliary(logits, scores), x)
        self._report(routing)
        return routing

    def _choose(self, scores: Tensor) -> Tensor:
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        groups, kept = self.model.moe_router_num_groups, self.model.moe_router_group_topk
        if groups is not None and kept is not None:
            scores = within_best_groups(scores, groups, kept)
        best: Tensor = scores.topk(self.model.moe_router_topk, dim=-1).indices
        return best

    def _weigh(self, chosen: Tensor, sigmoid: bool) -> Tensor:
        """The chosen scores, made to add up to 1 if the model wants that, and scaled.

        A single sigmoid stays as it is: divided by itself it would teach the router nothing.
        """
        scale = self.model.moe_router_topk_scaling_factor or 1.0
        if self.model.moe_router_topk > 1 if sigmoid else not self.model.moe_router_pre_softmax:
            return normalised(chosen, scale, fused=self.fused)
        return chosen if scale == 1.0 else chosen * scale

    def _auxiliary(self, logits: Tensor, scores: Tensor) -> Tensor | None:
        parts = []
        kind, coefficient = self.model.moe_router_load_balancing_type, self.model.moe_aux_loss_coeff
        if kind != "none" and coefficient:
            if self.model.moe_router_score_function == "sigmoid":
                scores = normalised(scores, fused=self.fused)
            sequences = scores if kind == "seq_aux_loss" else scores.flatten(0, 1)[None]
            parts.append(coefficient * balance_loss(sequences, self.model.moe_router_topk, self.others))
        if self.model.moe_z_loss_coeff:
            mean = logits.logsumexp(-1).square().mean()
            parts.append(self.model.moe_z_loss_coeff * (mean if self.others is None else mean / self.others.ranks))
        return sum(parts[1:], start=parts[0]) if parts else None

    def _report(self, routing: Routing) -> None:
        """Enter the microbatch into the ledger: in training, and once, even if its forward is recomputed."""
        recomputed = torch._C._current_graph_task_id() != -1  # -1: no backward is running
        if not torch.is_grad_enabled() or recomputed:
            return
        counts = self.ledger.counts
        self.ledger.counts = routing.counts if counts is None else counts + routing.counts
        if routing.auxiliary is not None:
            self.ledger.losses.append(routing.auxiliary.detach())


def count_by_number(numbers: Tensor, size: int) -> Tensor:
    """How often each of 0 to `size` - 1 stands in `numbers` (int64 [n]): int64 [size].

    `bincount` would make the host wait for the device: the length of its result depends on the values.
    """
    return numbers.new_zeros(size).scatter_(0, numbers, 1, reduce="add")


def within_best_groups(scores: Tensor, groups: int, kept: int) -> Tensor:
    """`scores` [..., E], with -inf outside the `kept` groups whose two best experts have the largest sums."""
    grouped = scores.unflatten(-1, (groups, -1))
    strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    others = strength.topk(groups - kept, dim=-1, largest=False).indices[..., None]
    kept_scores: Tensor = grouped.scatter(-2, others.expand(*others.shape[:-1], grouped.shape[-1]), -torch.inf)
    return kept_scores.flatten(-2)


def balance_loss(scores: Tensor, topk: int, others: SumOverTokens | None = None) -> Tensor:
    """E / (K T^2) x sum over experts of (tokens with the expert among their K best) x (sum of the expert's scores).

    It is 1 if balanced. `scores` [n, T, E] add up to 1 over the experts; the loss is the mean over n. The K best are by
    scores alone, without bias or groups, as in the DeepSeek-V3 report (equation 18) and in Megatron. If `others` have
    equal shares of the tokens, it is this rank's share of the loss, from everybody's counts and this rank's scores.
    """
    _, tokens, experts = scores.shape
    best = scores.detach().topk(topk, dim=-1).indices.flatten(1)
    counts = torch.zeros_like(scores[:, 0]).scatter_(1, best, 1.0, reduce="add")
    if others is not None:
        counts, tokens = others.sum(counts), tokens * others.ranks
    each = (scores.sum(1) * counts).sum(-1)
    mean: Tensor = each.mean() if len(each) > 1 else each.view(())
    return mean * (experts / (topk * tokens * tokens))
