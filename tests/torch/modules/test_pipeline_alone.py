"""A pipeline of one rank: what is the same in any other, without its messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_modules import PARTS, batches, made

import ppctl
from ppctl.errors import ConfigError


def test_a_dry_pass_leaves_everything_as_it_was() -> None:
    config = ppctl.PipelineConfig(pp_schedule="interleaved_zero_bubble", module_fqns_per_model_part=PARTS[4])
    pipeline = ppctl.pipeline(made("tied"), config)
    batch = batches(1, 4)[0]
    pipeline.step(batch)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    gradients = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
    generator = torch.get_rng_state()
    pipeline._dry_pass(pipeline._begin(batch))
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in pipeline.named_parameters())


def test_evaluation_gives_every_module_its_own_mode_back() -> None:
    pipeline = ppctl.pipeline(
        made("plain"), ppctl.PipelineConfig(module_fqns_per_model_part=[[*PARTS[2][0], *PARTS[2][1]]])
    )
    frozen = pipeline.parts[0].model.layers[1].eval()
    calls = frozen.calls.clone()
    pipeline.eval(batches(1, 2)[0])
    pipeline.step(batches(1, 2)[0])
    assert not frozen.training and pipeline.parts[0].model.layers[0].training
    assert torch.equal(frozen.calls, calls)


def test_a_schedule_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(ppctl.make_schedule("gpipe", pp=1, vpp=4, num_microbatches=4).to_csv())
    config = ppctl.PipelineConfig(pp_schedule_csv=str(path), module_fqns_per_model_part=PARTS[4])
    by_file, by_name = (
        ppctl.pipeline(made("plain"), each)
        for each in (config, ppctl.PipelineConfig(pp_schedule="gpipe", module_fqns_per_model_part=PARTS[4]))
    )
    batch = batches(1, 4)[0]
    assert torch.equal(by_file.step(batch), by_name.step(batch))
    assert by_file.info.schedule.actions == by_name.info.schedule.actions
    with pytest.raises(ConfigError, match="runs 4 microbatches, and the batch has 6"):
        by_file.step(batches(1, 6)[0])
    with pytest.raises(ConfigError, match="runs 4 stages on 1 ranks"):
        ppctl.pipeline(
            made("plain"), ppctl.PipelineConfig(pp_schedule_csv=str(path), module_fqns_per_model_part=PARTS[2])
        )
