"""Pipelined training by hand on gloo ranks: one stage after the other, no schedule, no engine.

What it shares with the product is what the tests here are about: stages, ties, replication, norm, clipping, optimizer.
"""

import torch
import torch.distributed as dist
from cuts import cut

from ppctl.config.learning_rate import lr_at
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.parallel.replicate import GradientReducer
from ppctl.parallel.ties import TiedGradients, tied_uses
from ppctl.train.grad_norm import GradientNorm, clip_gradients, locate_parameters
from ppctl.train.optimizer import AdamW
from ppctl.train.trained_weights import Weights


class HandPipeline:
    """The stages of one rank in a world of dp x pp ranks (pp_rank fastest), and their training."""

    def __init__(self, layout, pp, model, optim, seed, dtype=torch.float32):
        self.rank, self.pp, self.model, self.optim, self.dtype = dist.get_rank(), pp, model, optim, dtype
        self.dp_rank, self.pp_rank = divmod(self.rank, pp)
        self.dp = dist.get_world_size() // pp
        self.specs = cut(layout, pp)
        self.pp_ranks = [self.dp_rank * pp + i for i in range(pp)]
        own = [spec for spec in self.specs if spec.pp_rank == self.pp_rank]
        self.stages = {s.stage: build_stage(s, model, seed=seed, dtype=dtype, device="cpu") for s in own}
        self.weights = Weights({n: p for s in self.stages.values() for n, p in s.canonical_parameters().items()})
        master = self.weights.master
        rows = {name: row for stage in self.stages.values() for name, row in stage.parameter_rows().items()}
        self.optimizer = AdamW(master, optim, rows)
        self.ties = TiedGradients(tied_uses(self.specs, model, self.pp_ranks), master, self.rank)
        pp_groups = [dist.new_group([d * pp + i for i in range(pp)]) for d in range(self.dp)]
        dp_groups = [dist.new_group([d * pp + i for d in range(self.dp)]) for i in range(pp)]
        self.pp_group = pp_groups[self.dp_rank] if pp > 1 else None
        self.dp_group = dp_groups[self.pp_rank] if self.dp > 1 else None
        self.norm = GradientNorm(locate_parameters(self.specs, model), device="cpu", group=self.pp_group)
        by_stage = {s: [master[n] for n in m.canonical_parameters()] for s, m in self.stages.items()}
        self.reducer = GradientReducer(by_stage, self.dp_group)

    def step(self, number, microbatches, steps):
        """One optimizer step; `microbatches` are the whole batch's, of which each dp rank takes its share."""
        total = float(sum(mask.sum() for _, _, mask in microbatches))
        share = len(microbatches) // self.dp
        self.weights.clear_gradients()
        loss = 0.0
        for tokens, labels, mask in microbatches[self.dp_rank * share : (self.dp_rank + 1) * share]:
            loss += self.microbatch(tokens, labels, mask, total)
        for stage in self.stages:
            self.reducer.reduce(stage)
        self.reducer.finish()
        self.ties.sum()
        norm = self.norm.measure(self.weights.master)
        clip_gradients(self.weights.master, norm, self.optim.clip_grad)
        self.optimizer.lr = lr_at(number, self.optim, steps)
        self.optimizer.step()
        self.weights.publish()
        return loss, norm.total.item()

    def microbatch(self, tokens, labels, mask, total):
        """Forward through all stages, then backward; returns the loss where it is computed, else 0."""
        last, kept, x = len(self.specs) - 1, {}, tokens
        shape = (*tokens.shape, self.model.hidden_size)
        for stage in self.specs:
            x = self.move(x, stage.stage - 1, stage.stage, shape)
            if stage.stage in self.stages:
                given = x if stage.stage == 0 else x.detach().requires_grad_()
                (out,) = self.stages[stage.stage](given)
                x = microbatch_loss(out, labels, mask, total) if stage.stage == last else out
                kept[stage.stage] = given, x
        loss, gradient = x, None
        for stage in reversed(self.specs):
            if stage.stage < last:
                gradient = self.move(gradient, stage.stage + 1, stage.stage, shape)
            if stage.stage in kept:
                given, out = kept[stage.stage]
                out.backward(gradient)
                gradient = given.grad
        return loss.item() if last in kept else 0.0

    def move(self, tensor, source, target, shape):
        """Bring the tensor of stage `source` to the rank of stage `target`."""
        if source < 0 or source % self.pp == target % self.pp:
            return tensor
        if self.pp_rank == source % self.pp:
            dist.send(tensor.detach().contiguous(), self.pp_ranks[target % self.pp])
        if self.pp_rank == target % self.pp:
            tensor = torch.empty(shape, dtype=self.dtype)
            dist.recv(tensor, self.pp_ranks[source % self.pp])
        return tensor


def train_by_hand(layout, pp, model, optim, seed, batches):
    """Train; returns (losses, norms, own weights) of this rank."""
    pipeline = HandPipeline(layout, pp, model, optim, seed)
    results = [pipeline.step(i, batch, len(batches)) for i, batch in enumerate(batches)]
    weights = {name: p.detach() for name, p in pipeline.weights.master.items()}
    return [loss for loss, _ in results], [norm for _, norm in results], weights
