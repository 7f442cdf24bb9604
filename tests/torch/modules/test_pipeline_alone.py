"""A pipeline of one rank: what is the same in any other, without its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_modules import PARTS, batches, made
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ppctl
from ppctl.errors import ConfigError, PpctlError
from ppctl.modules import python_pipeline


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


class Operations(TorchDispatchMode):
    """Every operation, with the dtypes of its arguments: what has a kernel of its own on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add((str(func), *(str(each.dtype) for each in args if isinstance(each, torch.Tensor))))
        return func(*args, **(kwargs or {}))


class Dropping(nn.Module):
    """Computes otherwise in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.training else layer(x).sin()
        return x


@pytest.mark.parametrize("first", ["step", "eval"])
def test_a_dry_pass_runs_every_kernel_of_steps_and_evaluations(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first, and of a schedule in which some backwards of a stage are split and others are not."""
    config = ppctl.PipelineConfig(
        pp_schedule="dualpipev",
        module_fqns_per_model_part=[["layers.0"], ["layers.1"]],
        loss_fn=nn.functional.mse_loss,
    )
    pipeline, dry = ppctl.pipeline(Dropping(), config), Operations()
    begin = ppctl.Pipeline._begin

    def as_on_a_gpu(self: ppctl.Pipeline, given: Any, *, training: bool) -> Any:
        batch = begin(self, given, training=training)
        with dry:
            self._dry_pass(batch)
        return batch

    monkeypatch.setattr(ppctl.Pipeline, "_begin", as_on_a_gpu)
    batch = torch.randn(4, 8), torch.randn(4, 8)
    with Operations() as run:
        getattr(pipeline, first)(batch)
    seen, run.seen = dry.seen, set()
    monkeypatch.undo()
    with run:
        pipeline.step(batch)
        pipeline.eval(batch)
    assert len(run.seen) > 15
    around = {"aten.stack.default", "aten.sum.default", "aten.detach.default", "aten.slice.Tensor", "aten.split.Tensor"}
    assert {each for each in run.seen - seen if each[0] not in around} == set()


class Recurrent(nn.Module):
    """Two modules that keep a list of their weights beside them."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = (kind(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x)[0])[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_are_cut_like_others(kind: type[nn.RNNBase]) -> None:
    config = ppctl.PipelineConfig(
        pp_schedule="interleaved_1f1b", module_fqns_per_model_part=[["one"], ["two"]], loss_fn=nn.functional.mse_loss
    )
    model, whole, x = Recurrent(kind), Recurrent(kind), torch.ones(1, 3, 4)
    pipeline = ppctl.pipeline(model, config)
    pipeline.step((x, x / 2))
    nn.functional.mse_loss(whole(x), x / 2).backward()
    expected = dict(whole.named_parameters())
    assert {name for name, _ in pipeline.named_parameters()} == expected.keys()
    assert all(torch.equal(p.grad, expected[name].grad) for name, p in pipeline.named_parameters())
    with torch.no_grad():
        next(pipeline.parameters()).add_(1.0)  # what an optimizer does
    assert torch.equal(pipeline.eval((x, x / 2)), nn.functional.mse_loss(model(x), x / 2))


class Scaled(nn.Linear):
    """Scales by one number, which another module shares."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__(4, 4)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_modules_may_share_a_scalar() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    config = ppctl.PipelineConfig(
        pp_schedule="interleaved_1f1b", module_fqns_per_model_part=[["0"], ["1"]], loss_fn=nn.functional.mse_loss
    )
    pipeline = ppctl.pipeline(nn.Sequential(Scaled(scale), Scaled(scale)), config)
    pipeline.step((torch.ones(1, 4), torch.ones(1, 4)))
    one, two = (each.grad for name, each in pipeline.named_parameters() if name.endswith("scale"))
    assert torch.equal(one, two) and one != 0


class Skipping(nn.Module):
    """Has a residual over the cut if `skip`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, skip: object, scale: float = 1.0) -> torch.Tensor:
        h = self.one(x) * scale
        return self.two(h) + h if skip else self.two(h)


@pytest.mark.parametrize("on", [True, 1, "skip"])
def test_a_flag_that_opens_a_way_over_the_cut_is_found_in_a_later_batch(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_pipeline, "_MOST_KNOWN", 2)
    config = ppctl.PipelineConfig(
        pp_schedule="interleaved_1f1b", module_fqns_per_model_part=[["one"], ["two"]], loss_fn=nn.functional.mse_loss
    )
    pipeline, x = ppctl.pipeline(Skipping(), config), torch.ones(2, 4)
    for off in (False, None, "", 0):
        pipeline.step({"x": x, "skip": off, "scale": 2.0, "labels": x})
    pipeline.step({"x": x, "skip": 0, "scale": 3.0, "labels": x})
    assert len(pipeline._known) == 2
    with pytest.raises(ConfigError, match="in part 1, reads a tensor of part 0"):
        pipeline.step({"x": x, "skip": on, "labels": x})


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
    with pytest.raises(ConfigError, match="runs 4 microbatches, but the call has 6"):
        by_file.step(batches(1, 6)[0])
    with pytest.raises(ConfigError, match="has 4 stages on 1 rows, but pp 1 x vpp 2 = 2"):
        ppctl.pipeline(
            made("plain"), ppctl.PipelineConfig(pp_schedule_csv=str(path), module_fqns_per_model_part=PARTS[2])
        )


def test_negative_labels_that_are_not_the_mark_are_no_word_0() -> None:
    pipeline = ppctl.pipeline(
        made("tied"), ppctl.PipelineConfig(pp_schedule="interleaved_1f1b", module_fqns_per_model_part=PARTS[4])
    )
    tokens, labels = batches(1, 4)[0]
    labels = labels.clone()
    labels[0, 0] = -1
    with pytest.raises(PpctlError, match="-1 is out of bounds"):
        pipeline.step((tokens, labels))
