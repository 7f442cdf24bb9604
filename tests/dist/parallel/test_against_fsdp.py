"""`data_parallel_sharding=full` against torch's own fully sharded data parallelism (FSDP2), weights kept for a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import CPU, STEPS, config_of, session_of, trainer_of
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from whole_tensors import all_held

from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import to_mapping
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.train.optimizer import AdamW


def with_fsdp(mapping: dict) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, norms, weights) of STEPS steps, all forwards of a step ahead of all backwards, reduced in the last."""
    session = session_of(mapping)
    config, batches = session.config, session.data.batches()
    (spec,) = session.own.stages
    stage = build_stage(spec, config.model, seed=config.train.seed, dtype=torch.float32, device=CPU)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*stage.layers.values(), stage):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(stage, FSDPModule)
    parameters = dict(stage.named_parameters())
    optimizer = AdamW(parameters, config.optim, stage.parameter_rows())
    losses, norms = [], []
    for step in range(STEPS):
        batch = batches.step(step)
        microbatches = [
            microbatch_loss(*stage(tokens), labels, mask, batch.total_tokens)
            for tokens, labels, mask in zip(batch.tokens, batch.labels, batch.loss_mask, strict=True)
        ]
        for index, loss in enumerate(microbatches):
            last = index + 1 == len(microbatches)
            stage.set_requires_gradient_sync(last)
            stage.set_reshard_after_backward(last)
            stage.set_is_last_backward(last)
            (loss * dist.get_world_size()).backward()  # it takes means over ranks; on gloo it knows nothing else
        total = torch.stack([loss.detach() for loss in microbatches]).sum()
        dist.all_reduce(total)
        losses.append(float(total))
        norms.append(float(torch.nn.utils.clip_grad_norm_(stage.parameters(), config.optim.clip_grad).full_tensor()))
        optimizer.lr = lr_at(step, config.optim, config.train.steps)
        optimizer.step()
        stage.zero_grad()
    return losses, norms, {name: parameter.full_tensor().detach() for name, parameter in parameters.items()}


def with_ppctl(mapping: dict) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    session = session_of(mapping)
    trainer = trainer_of(session)
    records = [trainer.step(step).record for step in range(STEPS)]
    with all_held(session.replica.gathered):
        weights = {name: parameter.detach().clone() for name, parameter in session.replica.weights.model.items()}
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], weights


def both(mapping: dict) -> tuple:
    return with_ppctl(mapping), with_fsdp(mapping)


@pytest.mark.whole  # what it imports takes longer than what it does
def test_full_sharding_trains_as_fsdp_does(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text(" ".join(random.Random(0).choices(["stage", "rank", "bubble", "layer"], k=3000)))
    config = config_of(text, pp=1, vpp=1, m=3, dp=2, data_parallel_sharding="full", pp_schedule="gpipe")
    config.optim.eps = 1e-4  # else the last bit of a nearly zero gradient decides about a whole step of its weight
    for ours, theirs in run_ranks(both, 2, to_mapping(config), timeout=120.0):
        for numbers, expected in zip(ours[:2], theirs[:2], strict=True):
            assert numbers == pytest.approx(expected, rel=1e-6)
        assert ours[2].keys() == theirs[2].keys()
        for name, value in theirs[2].items():
            assert (ours[2][name] - value).abs().max() <= 1e-6 * value.abs().max(), name
