"""The model of Megatron's traces, driven through the public schedules API on one rank, with every event written down.

Stage g is tanh(x @ W_g); backwards are seen from inside autograd. The plain loop below is what all must equal.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from ppctl import get_forward_backward_func
from ppctl.megatron.p2p_communication import P2PCommunicator

SEQUENCE, BATCH, HIDDEN = 3, 2, 4


def weight_of(stage):
    return 0.5 * torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(100 + stage), dtype=torch.float64)


def data(mb):
    generator = torch.Generator().manual_seed(7000 + mb)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, dtype=torch.float64)


class SeenBackward(torch.autograd.Function):
    """The identity, which says when a backward comes by."""

    @staticmethod
    def forward(ctx, x, tell):
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell()
        return gradient, None


class Chunk(nn.Module):
    """One stage as a user of Megatron writes it: a plain module with set_input_tensor."""

    def __init__(self, stage, number, config, events):
        super().__init__()
        self.weight = nn.Parameter(weight_of(stage))
        self.stage, self.number, self.config, self.events = stage, number, config, events
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(current_microbatch=None)])
        self.is_first = False

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def set_is_first_microbatch(self):
        self.is_first = True

    def forward(self, x, flag):
        mb = self.decoder.layers[0].current_microbatch
        self.events.append(["F", mb, self.number, flag, self.is_first])
        self.is_first = False
        x = x if self.stage == 0 else self.input
        y = torch.tanh(x @ self.weight)
        if not torch.is_grad_enabled():
            return y
        return SeenBackward.apply(y, lambda: self.events.append(["B", mb, self.number]))


def loss_function(kind, tokens):
    """The loss functions of the records. `tokens` is the microbatch's count."""

    def pair(y):
        loss = (y * y).mean()
        return loss, {"lm loss": loss.item()}

    def triple(y):
        loss = (y * y).sum()
        return loss, torch.tensor(tokens, dtype=torch.int), {"lm loss sum": loss.item(), "tokens": tokens}

    def alias(y):
        loss = (y * y).mean()
        return loss, {"alias": loss.detach(), "same_obj": loss, "raw": loss.item()}

    return {"2": pair, "3": triple, "alias": alias}[kind]


def modes_of(args):
    """How a record's messages travel; batched is the original's default, and it cannot overlap."""
    overlaps = args.get("overlap", False)
    return {
        "batch_p2p_comm": not overlaps and not args.get("batch_false", False),
        "overlap_p2p_comm": overlaps,
        "overlap_p2p_comm_warmup_flush": args.get("warmup_flush", False),
        "variable_seq_lengths": args.get("varlen", False),
        "mtp_standalone": args.get("mtp_standalone", False),
    }


def config_of(args, events, chunks):
    """The config of a record."""

    @contextmanager
    def no_sync():
        events.append(["no_sync_enter"])
        try:
            yield
        finally:
            events.append(["no_sync_exit"])

    def told(name):
        def call(parameters):
            (weight,) = parameters
            events.append([name, next(c.number for c in chunks if c.weight is weight)])

        return call

    def finalize(models, tokens, pg_collection=None):
        events.append(["finalize", len(models), None if tokens is None else int(tokens)])

    return SimpleNamespace(
        hidden_size=HIDDEN,
        pipeline_dtype=torch.float64,
        **modes_of(args),
        pipeline_model_parallel_size=args["pp"],
        virtual_pipeline_model_parallel_size=args.get("vpp"),
        microbatch_group_size_per_vp_stage=args.get("group", args["pp"]),
        num_microbatches_with_partial_activation_checkpoints=args.get("partial_ckpt"),
        calculate_per_token_loss=args.get("per_token", False),
        deallocate_pipeline_outputs=args.get("dealloc", False),
        no_sync_func=no_sync,
        grad_sync_func=told("grad_sync_func") if args.get("grad_sync") else None,
        param_sync_func=told("param_sync_func") if args.get("param_sync") else None,
        grad_scale_func=(lambda loss: loss * args["grad_scale"]) if "grad_scale" in args else None,
        finalize_model_grads_func=finalize,
    )


def replay(args):
    """One record on this rank: (events, data store, gradients by chunk, whether the config is as it was)."""
    rank, pp, vpp = dist.get_rank(), args["pp"], args.get("vpp")
    events, chunks = [], []
    config = config_of(args, events, chunks)
    chunks += [Chunk(rank + pp * number, number, config, events) for number in range(vpp or 1)]
    before = copy.copy(vars(config))
    kind, tokens = args.get("loss", "2"), args.get("tokens", [0] * args["m"])

    def forward_step(iterator, model, flag=None):
        mb = next(iterator)
        x = data(mb) if model.stage == 0 else None
        return model(x, flag), loss_function(kind, tokens[mb])

    iterators = [iter(range(args["m"])) for _ in chunks]
    store = get_forward_backward_func(pp, vpp)(
        forward_step_func=forward_step,
        data_iterator=iterators if vpp else iterators[0],
        model=chunks if vpp else chunks[0],
        num_microbatches=args["m"],
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=args.get("forward_only", False),
        p2p_communicator=P2PCommunicator(dist.group.WORLD, config) if pp > 1 else None,
    )
    return events, store, [chunk.weight.grad for chunk in chunks], vars(config) == before


def replay_all(cases):
    """All records of one pipeline size, each through a communicator in its mode."""
    return [replay(args) for args in cases]


def plain_loop(args):
    """What a plain loop over the microbatches computes: (losses before scaling, gradients by stage)."""
    stages = args["pp"] * args.get("vpp", 1)
    weights = [weight_of(stage).requires_grad_() for stage in range(stages)]
    losses = []
    for mb in range(args["m"]):
        y = data(mb)
        for weight in weights:
            y = torch.tanh(y @ weight)
        loss = (y * y).sum() if args.get("loss") == "3" else (y * y).mean()
        losses.append(loss.item())
        if args.get("loss") == "3" and not args.get("per_token"):
            loss = loss / max(args["tokens"][mb], 1)
        if not args.get("per_token"):
            loss = loss / args["m"]
        if not args.get("forward_only"):
            (loss * args.get("grad_scale", 1.0)).backward()
    return losses, [weight.grad for weight in weights]
