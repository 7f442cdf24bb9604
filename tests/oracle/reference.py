"""What training must compute: whole model, loop over microbatches, backward, clip, AdamW. Plain torch, one process.

No engine, no schedule, no stages: the answer that every cut is held to, bit by bit.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import yaml
from oracle import data
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import from_mapping
from ppctl.geometry.layers import parse_layers
from ppctl.model.dropout import Draws, sample_key
from ppctl.model.packing import ROWS
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec


class Trained(NamedTuple):
    losses: list
    norms: list
    weights: dict
    mtp_losses: list
    aux_losses: list
    gradients: dict
    """Of the first step, before they are clipped."""
    scales: list
    """What clipping multiplied each step's gradients with."""


def whole_model(model, seed, dtype=torch.float32):
    """All layers as one module."""
    layers = ["embedding", *(f"decoder.{i}" for i in range(model.num_layers))]
    layers += [*(f"mtp.{k}" for k in range(model.mtp_num_layers or 0)), "loss"]
    spec = StageSpec(0, 0, 0, parse_layers(layers), (), (), 0, 0, 0)
    return build_stage(spec, model, seed=seed, dtype=dtype, device="cpu")


def losses_of(logits, labels, mask, share, documents=None):
    """The microbatch's loss, and the mean of its MTP losses or None: each the sum over counted tokens / `share`.

    The first logits are for the next token, the k-th further ones for the token k further on; there a token counts if
    it and all between are in the sequence and count, and where `documents` are apart are labels of the position's own.
    """
    losses = []
    rows = documents.lengths if documents else [[labels.shape[1]]] * len(labels)
    number = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    for ahead, each in enumerate(logits):
        length = labels.shape[1] - ahead
        counted = math.prod((mask[:, i : i + length] for i in range(1, 1 + ahead)), start=mask[:, :length])
        counted = counted * (number[:, :length] == number[:, ahead:])
        wanted = F.pad(labels[:, ahead:], (0, ahead)).flatten()
        per_token = F.cross_entropy(each.flatten(0, 1), wanted, reduction="none")
        losses.append((per_token * F.pad(counted, (0, ahead)).flatten()).sum() / share)
    return losses[0], torch.stack(losses[1:]).mean() if losses[1:] else None


def train_reference(model, optim, seed, batches, steps=None, scale_grads=False, dtype=torch.float32, mtp_weights=None):
    """Train on `batches[step][mb] = (tokens, labels, mask)`, each [b, s], or with a Packing; figures per step, weights.

    With `scale_grads` a microbatch's loss is its own mean, and the sum of gradients is divided by their number.
    """
    whole = whole_model(model, seed, dtype)
    weights, routers = dict(whole.named_parameters()), whole.routers()
    uses = ["tok_embeddings.weight"] + ["output.weight"] * model.share_embeddings_and_output_weights
    apart = ["position_embeddings.weight"] if model.position_embedding_type == "learned_absolute" else []
    uses += ["mtp.tok_embeddings.weight"] * bool(model.mtp_num_layers)
    once = [p for name, p in weights.items() if name not in uses[1:]]
    optimizers = optimizers_of(optim, weights, uses, apart)
    losses, norms, mtp_losses, aux_losses, gradients, scales = [], [], [], [], {}, []
    for step, microbatches in enumerate(batches):
        total, count = (
            float(sum(mask.sum() for _, _, mask, *_ in microbatches)),
            len(microbatches) if scale_grads else 1,
        )
        losses.append(0.0)
        mtp_losses.append(0.0)
        for router in routers:
            router.ledger.clear()
            router.ledger.scale = 1.0 if scale_grads else 1 / len(microbatches)
        for number, (tokens, labels, mask, *packed) in enumerate(microbatches):
            share = float(mask.sum()) if scale_grads else total
            samples = [sample_key(seed, step, number * len(tokens) + row) for row in range(len(tokens))]
            packing = (packed[0] if packed else ROWS)._replace(draws=Draws(torch.tensor(samples)))
            logits = whole(tokens, packing=packing)
            loss, mtp_loss = losses_of(logits, labels, mask, share, packing.documents)
            losses[-1] += (loss.detach() / count).item()
            if mtp_loss is not None:
                mtp_losses[-1] += (mtp_loss.detach() / count).item()
                weight = model.mtp_loss_scaling_factor if mtp_weights is None else mtp_weights[step]
                loss = loss + weight * mtp_loss
            loss.backward()
        aux = [math.fsum(value.item() for value in router.ledger.losses) for router in routers]
        aux_losses.append(math.fsum(aux) / len(microbatches))
        for parameter in weights.values():
            parameter.grad /= count
        if len(uses) > 1:  # one accumulator per use, summed once in canonical order of uses
            shared = sum((weights[name].grad for name in uses[1:]), start=weights[uses[0]].grad)
            for name in uses:
                weights[name].grad = shared.clone()
        norm = get_total_norm([p.grad for p in once])
        gradients = gradients or {name: p.grad.clone() for name, p in weights.items()}
        scales.append(min(1.0, optim.clip_grad / (norm.item() + 1e-6)) if optim.clip_grad else 1.0)
        clip_grads_with_norm_(weights.values(), optim.clip_grad or math.inf, norm)
        norms.append(norm.item())
        update(optimizers, lr_at(step, optim, steps or len(batches)))
        move_biases(model, routers)
    everything = weights | dict(whole.named_buffers())
    return Trained(
        losses, norms, {name: t.detach() for name, t in everything.items()}, mtp_losses, aux_losses, gradients, scales
    )


def optimizers_of(optim, weights, uses, apart):
    """torch's AdamW over groups with and without decay; beside its Muon over the matrices of hidden layers."""
    spared = [p for name, p in weights.items() if p.dim() == 1 or name in uses + apart]
    decayed = {name: p for name, p in weights.items() if p.dim() > 1 and name not in uses + apart}
    optimizers = []
    if optim.name == "muon":
        hidden = [p for name, p in decayed.items() if name != "output.weight"]
        decayed = {name: p for name, p in decayed.items() if name == "output.weight"}
        optimizers.append(muon_of(optim, hidden))
    groups = [
        {"params": list(decayed.values()), "weight_decay": optim.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return [*optimizers, torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)]


def muon_of(optim, hidden):
    """torch's Muon over matrices, and over each of a stack [experts, rows, columns], which it does not take itself."""
    stacks = {p: [torch.nn.Parameter(one) for one in p.detach().unbind()] for p in hidden if p.dim() == 3}
    each = [one for p in hidden for one in stacks.get(p, [p])]
    muon = torch.optim.Muon(each, weight_decay=optim.weight_decay, adjust_lr_fn=optim.muon_adjust_lr)

    def take_gradients(*_):
        for stack, parts in stacks.items():
            for part, gradient in zip(parts, stack.grad, strict=True):
                part.grad = gradient

    def forget_gradients(*_):
        for stack in stacks:
            stack.grad = None

    muon.register_step_pre_hook(take_gradients)
    muon.register_step_post_hook(forget_gradients)
    return muon


def update(optimizers, lr):
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()


def move_biases(model, routers):
    """An expert with fewer tokens than the mean is chosen a little more easily from now on."""
    for router in routers if model.moe_router_enable_expert_bias else ():
        load = router.ledger.counts.float()
        router.expert_bias += model.moe_router_bias_update_rate * torch.sign(load.mean() - load)


def reference_losses(run: Path, steps: int) -> list[float]:
    """What one plain-torch process makes of the run's own config."""
    config = from_mapping(yaml.safe_load((run / "config.yaml").read_text()))
    return train_reference(
        config.model, config.optim, config.train.seed, data.microbatches(config, steps), config.train.steps
    )[0]
