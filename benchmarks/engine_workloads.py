"""What the engine benchmark computes: stages that sleep (W1), slices of a decoder (W2), stages that do nothing (W3).

Where the backward is in two halves, each of them sleeps (W4).

A workload gives every contender the same stages, data and loss, and knows what loss and gradients must come out. It
knows nothing of schedules or messages.
"""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import parse_layers
from ppctl.layout import PipelineParallelLayerLayout, even_layout
from ppctl.model.loss import token_losses
from ppctl.model.stage import build_stage
from ppctl.plan.types import StageSpec, TensorSpec
from ppctl.weight_gradients.deferred import WeightGradStore


@dataclass(frozen=True)
class Cell:
    """One line of the table: the pipeline, and its workload."""

    name: str
    kind: str
    """`sleep`, `gpt`, `empty` or `split` (W4)."""
    pp: int
    vpp: int
    microbatches: int
    mebibytes: float = 0.0
    """Of one activation (W1)."""
    forward: float = 0.010
    """Seconds of a rank's forward, all its chunks together (W1); a backward takes twice as long."""
    contenders: tuple[str, ...] = ("ppctl", "ppctl_auto", "ppctl_batched", "torch")
    memory: bool = False
    """Measure the peak of memory, in one contender's own processes, and no time."""
    policy: str = ""
    """The schedule's policy; none: 1F1B, interleaved for several chunks."""

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def schedule(self) -> str:
        """The policy that its contenders run."""
        return self.policy or ("1f1b" if self.vpp == 1 else "interleaved_1f1b")


class Watch:
    """One microbatch's stated times in one stage: what an action computes is part of its time, and the rest it sleeps.

    Sleeps end at instants, so that neither computing nor waking up late adds up.
    """

    def __init__(self) -> None:
        self.until = 0.0

    def start(self, *_: object) -> None:
        self.until = time.monotonic()

    def rest(self, seconds: float) -> None:
        """Sleep until `seconds` after the start, or after the end of the rest before."""
        self.until += seconds
        time.sleep(max(0.0, self.until - time.monotonic()))


def sleep_exactly() -> None:
    """Let this thread's sleeps end within a few microseconds of what they ask: Linux may add 50 (its timer slack)."""
    if sys.platform == "linux":
        set_timer_slack = 29
        ctypes.CDLL(None).prctl(set_timer_slack, 1, 0, 0, 0)


class _SleepBackward(torch.autograd.Function):
    """The identity, whose backward takes a while: of an input or of a weight, the half that makes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Watch, seconds: float) -> Tensor:
        ctx.watch, ctx.seconds = watch, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.rest(ctx.seconds) if ctx.seconds else None
        return grads[0], None, None


class _AddWeight(torch.autograd.Function):
    """x + w for a single w, whose backward takes a while: the half that makes the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, watch: Watch, seconds: float) -> Tensor:
        ctx.watch, ctx.seconds = watch, seconds
        return x + w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.watch.start()
        of_weight = grads[0].sum().reshape(1)
        ctx.watch.rest(ctx.seconds) if ctx.seconds else None
        return grads[0], of_weight, None, None


class Sleeper(nn.Module):
    """A stage that takes as long as it is told and adds its weight, so that every stage shows in the loss."""

    def __init__(self, stage: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(stage + 1)))
        self.seconds, self.half = forward, backward / 2

    def forward(self, x: Tensor) -> Tensor:
        watch = Watch()
        watch.start()
        y: Tensor = _AddWeight.apply(_SleepBackward.apply(x, watch, self.half), self.weight, watch, self.half)
        watch.rest(self.seconds) if self.seconds else None
        return y


class Sleep:
    """W1 and W3. The loss of a microbatch is the mean of the last output; every weight's gradient is 1."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.width = max(1, round(cell.mebibytes * 2**20 / 4))
        self.forward = cell.forward / cell.vpp if cell.kind == "sleep" else 0.0

    def module(self, stage: int) -> nn.Module:
        return Sleeper(stage, self.forward, 2 * self.forward)

    def spec(self) -> TensorSpec:
        return TensorSpec((1, self.width), "float32")

    def inputs(self) -> list[Tensor]:
        return [torch.full((1, self.width), float(mb)) for mb in range(self.cell.microbatches)]

    def targets(self) -> list[Tensor]:
        return [torch.zeros(1, 1)] * self.cell.microbatches

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output.mean()

    def check(self, losses: list[float], modules: dict[int, nn.Module]) -> str:
        stages = self.cell.stages
        wanted = [mb + stages * (stages + 1) / 2 for mb in range(self.cell.microbatches)]
        if losses and max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) > 1e-3:
            return f"losses {losses[:3]}... for {wanted[:3]}..."
        for stage, module in modules.items():
            grad = float(next(module.parameters()).grad)
            if abs(grad - 1) > 1e-3:
                return f"stage {stage}: gradient {grad} for 1"
        return ""


class TorchsHalves(nn.Module):
    """A stage in a form of which torch's split runs one half in I and the other in W: `SleepI(x) * SleepW(w)`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        watch = Watch()
        watch.start()
        # The first stage has an I, too: of its layers but the first. Torch runs it in W there.
        x = x if x.requires_grad else x.detach().requires_grad_()
        w = _SleepBackward.apply(self.weight, watch, self.seconds)
        y: Tensor = _SleepBackward.apply(x, watch, self.seconds) * w
        assert y.grad_fn is not None  # w has a gradient
        y.grad_fn.register_prehook(watch.start)
        watch.rest(self.seconds)
        return y


class _TimesWeight(torch.autograd.Function):
    """x * w for a single w. Both halves of the backward take a while; the weight's can be put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, watch: Watch, seconds: float) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.watch, ctx.seconds = watch, seconds
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (gradient,), (x, w), watch = grads, ctx.saved_tensors, ctx.watch

        def of_weight() -> Tensor:
            made = (gradient * x).sum().reshape(1)
            watch.rest(ctx.seconds)
            return made

        def deferred() -> None:
            watch.start()
            w.grad = of_weight() if w.grad is None else w.grad + of_weight()

        watch.start()
        of_input = gradient * w
        watch.rest(ctx.seconds)
        if not WeightGradStore.enabled:
            return of_input, of_weight(), None, None
        WeightGradStore.put(deferred)
        return of_input, None, None, None


class DeferredGradients(TorchsHalves):
    """The same stage, whose weight's half goes through ppctl's public hook."""

    def forward(self, x: Tensor) -> Tensor:
        watch = Watch()
        watch.start()
        y: Tensor = _TimesWeight.apply(x, self.weight, watch, self.seconds)
        watch.rest(self.seconds)
        return y


class Split(Sleep):
    """W4: F, I and W of a stage take equally long. All weights are 1: microbatch mb's loss is mb, and so is its part of
    every weight's gradient."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.forward = cell.forward / cell.vpp

    def module(self, stage: int, *, torchs: bool = False) -> nn.Module:
        return (TorchsHalves if torchs else DeferredGradients)(self.forward)

    def check(self, losses: list[float], modules: dict[int, nn.Module]) -> str:
        m = self.cell.microbatches
        if losses and max(abs(loss - mb) for mb, loss in enumerate(losses)) > 1e-3:
            return f"losses {losses[:3]}..."
        for stage, module in modules.items():
            grad = float(next(module.parameters()).grad.detach())
            if abs(grad - (m - 1) / 2) > 1e-3 * m:
                return f"stage {stage}: gradient {grad} for {(m - 1) / 2}"
        return ""


class _Single(nn.Module):
    """A stage that takes and returns one tensor, as torch's schedules want it."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.stage(x)[0]
        return out


class Gpt:
    """W2: 8 layers of width 256, sequences of 128, 1024 words. Checked against one process that runs all stages."""

    MODEL = ModelConfig(num_layers=8, hidden_size=256, ffn_hidden_size=704, num_attention_heads=8, vocab_size=1024)
    SEQ = 128

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        layout = PipelineParallelLayerLayout(even_layout(self.MODEL.num_layers, cell.stages), cell.pp)
        self.layers = [parse_layers(layout.layer_names(stage)) for stage in range(cell.stages)]

    def module(self, stage: int) -> nn.Module:
        spec = StageSpec(stage, 0, 0, self.layers[stage], (), (), 0, 0, 0)
        return _Single(build_stage(spec, self.MODEL, seed=7, dtype=torch.float32, device="cpu"))

    def spec(self) -> TensorSpec:
        return TensorSpec((1, self.SEQ, self.MODEL.hidden_size), "float32")

    def _ids(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (self.cell.microbatches, 1, self.SEQ)
        return list(torch.randint(self.MODEL.vocab_size, shape, generator=generator))

    def inputs(self) -> list[Tensor]:
        return self._ids(1)

    def targets(self) -> list[Tensor]:
        return self._ids(2)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return token_losses(output, target).mean()

    def check(self, losses: list[float], modules: dict[int, nn.Module]) -> str:
        whole = [self.module(stage) for stage in range(self.cell.stages)]
        wanted = []
        for x, target in zip(self.inputs(), self.targets(), strict=True):
            for module in whole:
                x = module(x)
            loss = self.loss(x, target)
            wanted.append(float(loss.detach()))
            (loss / self.cell.microbatches).backward()
        if losses and losses != wanted:
            return f"losses {losses[:2]} for {wanted[:2]}"
        for stage, module in modules.items():
            for (name, p), q in zip(module.named_parameters(), whole[stage].parameters(), strict=True):
                if not torch.equal(p.grad, q.grad):
                    return f"stage {stage} {name}: gradients differ by {float((p.grad - q.grad).abs().max())}"
        return ""


def workload(cell: Cell) -> Sleep | Gpt:
    """The workload of a cell."""
    return {"gpt": Gpt, "split": Split}.get(cell.kind, Sleep)(cell)
