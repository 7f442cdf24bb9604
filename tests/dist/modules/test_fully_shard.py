"""Stages that fully_shard divides over data-parallel ranks: gradients are those of all replicas, summed when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from own_modules import PARTS, batches, made
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ppctl
from ppctl.errors import PpctlError
from ppctl.model.loss import microbatch_loss

ROWS, SIZE = 8, 2


class Counted(TorchDispatchMode):
    """Counts sums over shards."""

    sums = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sums += "reduce_scatter" in str(func)
        return func(*args, **(kwargs or {}))


def sharded(holds_back: bool, split: str) -> tuple[dict[str, Tensor], int, list[str]]:
    """Gradients of a rank's stages, made whole; how often shards were summed; what is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica, group = mesh["dp"].get_local_rank(), mesh["pp"].get_group()

    def shard(stage: nn.Module) -> None:
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)

    def build(kind: str = "plain", **fields: Any) -> ppctl.Pipeline:
        config = ppctl.PipelineConfig(
            module_fqns_per_model_part=PARTS[2],
            pp_microbatch_size=SIZE,
            patch_stage_backward_maybe_with_nosync=holds_back,
            **fields,
        )
        return ppctl.pipeline(made(kind), config, group=group, parallelize=shard)

    pipeline, batch = build(), batches(2, ROWS)[replica]
    pipeline._dry_pass(pipeline._begin(batch))  # as before the first step on a GPU
    with Counted() as counted:
        pipeline.step(batch)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in pipeline.named_parameters()}
    refused = []
    for fields in (dict(pp_schedule="zb_h1"), dict(pp_schedule_csv=split), dict(kind="tied")):
        with pytest.raises(PpctlError) as error:
            build(**fields)
        refused.append(error.value.problems[0].code)
    with pytest.raises(PpctlError) as error:
        pipeline.load_state_dict(made("plain").state_dict())
    dist.barrier()
    return gradients, counted.sums, [*refused, error.value.problems[0].code]


@pytest.mark.shows("pipeline.patch_stage_backward_maybe_with_nosync")
@pytest.mark.parametrize("holds_back", [True, False])
def test_sharded_stages_sum_behind_the_last_backward_or_behind_each(holds_back: bool, tmp_path: Path) -> None:
    split = tmp_path / "split.csv"
    split.write_text(ppctl.make_schedule("zb_h1", pp=2, num_microbatches=ROWS // SIZE).to_csv())
    model, whole = made("plain"), []
    for tokens, labels in batches(2, ROWS):
        model.zero_grad()
        for part, wanted in zip(tokens.split(SIZE), labels.split(SIZE), strict=True):
            mask = (wanted != -100).float()
            microbatch_loss(model(part), wanted.clamp(min=0), mask, (labels != -100).sum()).backward()
        whole.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    ranks = run_ranks(sharded, 4, holds_back, str(split))
    for gradients, sums, refused in ranks:
        assert sums == (1 if holds_back else ROWS // SIZE)
        assert refused == ["PP-E130", "PP-E130", "PP-E130", "PP-E539"]
        for name, gradient in gradients.items():
            expected = (whole[0][name] + whole[1][name]) / 2
            if holds_back:
                assert torch.equal(gradient, expected), name
            else:  # the sum over replicas comes before that over microbatches
                assert torch.allclose(gradient, expected, rtol=0, atol=1e-6), name
    assert ranks[0][0].keys() | ranks[2][0].keys() == whole[0].keys()
