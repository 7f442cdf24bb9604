"""What training must compute: whole model, loop over microbatches, backward, clip, AdamW. Plain torch, one process.

No engine, no schedule, no stages: the answer that every cut is held to, bit by bit.
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec
from ppctl.train.optimizer import lr_at


def train_reference(model, optim, seed, batches, steps=None, scale_grads=False):
    """Train on `batches[step][mb] = (tokens, labels, mask)`, each [b, s]; returns (losses, gradient norms, weights).

    With `scale_grads` a microbatch's loss is its own mean, and the sum of gradients is divided by their number.
    """
    layers = ("embedding", *(f"decoder.{i}" for i in range(model.num_layers)), "loss")
    whole = build_stage(
        StageSpec(0, 0, 0, layers, (), (), 0, 0, 0), model, seed=seed, dtype=torch.float32, device="cpu"
    )
    weights = dict(whole.named_parameters())
    tied = model.share_embeddings_and_output_weights
    once = [p for name, p in weights.items() if not (tied and name == "output.weight")]
    embeddings = ["tok_embeddings.weight"] + ["output.weight"] * tied
    spared = [p for name, p in weights.items() if p.dim() == 1 or name in embeddings]
    decayed = [p for name, p in weights.items() if p.dim() > 1 and name not in embeddings]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    losses, norms = [], []
    for step, microbatches in enumerate(batches):
        total, count = float(sum(mask.sum() for _, _, mask in microbatches)), len(microbatches) if scale_grads else 1
        losses.append(0.0)
        for tokens, labels, mask in microbatches:
            per_token = F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten(), reduction="none")
            loss = (per_token * mask.flatten()).sum() / (float(mask.sum()) if scale_grads else total)
            loss.backward()
            losses[-1] += (loss.detach() / count).item()
        for parameter in weights.values():
            parameter.grad /= count
        if tied:  # one accumulator per use, summed once in canonical order of uses
            shared = weights["tok_embeddings.weight"].grad + weights["output.weight"].grad
            weights["tok_embeddings.weight"].grad, weights["output.weight"].grad = shared, shared.clone()
        norm = get_total_norm([p.grad for p in once])
        clip_grads_with_norm_(weights.values(), optim.clip_grad or math.inf, norm)
        norms.append(norm.item())
        for group in adamw.param_groups:
            group["lr"] = lr_at(step, optim, steps or len(batches))
        adamw.step()
        adamw.zero_grad()
    return losses, norms, {name: p.detach() for name, p in weights.items()}
