"""AdamW, and Muon for the matrices of hidden layers (decisions 61 and 67), over parameters by canonical name.

A rank has only whole matrices of Muon here, the matrices that it owns (`geometry/matrix_owners.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ppctl.config.schema import OptimConfig
from ppctl.geometry.rows import Parameter
from ppctl.parallel.replicate import buckets
from ppctl.topology import BUCKET_ELEMENTS

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients, torch's default."""
EPS = 1e-7

State = dict[str, dict[str, Tensor]]
"""Canonical name -> "step" (scalar, on the CPU), and in the master's shape and dtype "exp_avg" and "exp_avg_sq", or
for Muon's matrices "momentum_buffer"."""


class AdamW:
    """torch's AdamW over `masters`, called by its functional form; matrices decay, as their `rows` say.

    It is no torch.optim.Optimizer, which imports torch's compiler only to disable it, and so costs each rank a second
    at its start. `lr` is the rate of the next step. A rank without parameters gets an optimizer whose step does
    nothing.

    On a GPU the kernel is the fused one: torch's default there makes a tensor of each group's whole size. On the CPU it
    is torch's default, which updates one parameter at a time; the fused kernel's results differ in the last bits.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]) -> None:
        self.masters = masters
        self.optim = optim
        self.lr = optim.lr
        self.fused = any(parameter.device.type != "cpu" for parameter in masters.values())
        self.skips_on_device = self.fused
        """Whether `step` takes `left_out`."""
        decayed = [name for name in masters if rows[name].decayed]
        spared = [name for name in masters if not rows[name].decayed]
        self.groups = ((decayed, optim.weight_decay), (spared, 0.0))
        """(canonical names, their weight decay)."""
        # Made at the start, so that a checkpoint can be loaded in place.
        self.state: State = {
            name: {
                "step": torch.tensor(0.0, device="cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in masters.items()
        }

    @property
    def updates(self) -> int:
        """How many updates were made, those before a checkpoint included; 0 for a rank without parameters. Every
        parameter keeps the count for AdamW's bias correction (a step that is left out does not count), so any
        checkpoint has it, in any cut."""
        return max((int(entry["step"]) for entry in self.state.values()), default=0)

    @torch.no_grad()
    def step(self, left_out: Tensor | None = None) -> None:
        """Update every parameter that has a gradient; the host does not wait. If `left_out`, a scalar on the device, is
        1, parameters and moments stay; a caller that reads the 1 must call `take_back`, since an update was counted."""
        for names, weight_decay in self.groups:
            alike: dict[float, list[str]] = {}  # by updates made: equal unless some had no gradient in a step
            for name in names:
                if self.masters[name].grad is not None:
                    alike.setdefault(self.state[name]["step"].item(), []).append(name)
            for made, moved in alike.items():
                self._move(moved, made, weight_decay, left_out)

    def take_back(self) -> None:
        """Undo the count of the last step, which was left out, for parameters with gradients."""
        for name, master in self.masters.items():
            self.state[name]["step"] -= int(master.grad is not None)

    def _move(self, names: list[str], made: float, weight_decay: float, left_out: Tensor | None) -> None:
        """Update these parameters, which have had `made` updates."""
        masters: list[Tensor] = [self.masters[name] for name in names]
        state = [self.state[name] for name in names]
        # torch's kernels have counts in tensors beside parameters; ours are on the host, which reads them every step.
        counts = torch.full((len(names),), made, dtype=torch.float32, device=masters[0].device)
        adamw(
            masters,
            [master.grad for master in masters if master.grad is not None],
            [entry["exp_avg"] for entry in state],
            [entry["exp_avg_sq"] for entry in state],
            [],
            list(counts.unbind()),
            foreach=False,
            fused=self.fused,
            found_inf=left_out,
            amsgrad=False,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            lr=self.lr,
            weight_decay=weight_decay,
            eps=self.optim.eps,
            maximize=False,
        )
        for entry in state:
            entry["step"].fill_(made + 1)


class _Stack(NamedTuple):
    """One matrix, or a layer's experts' matrices, [number, rows, columns], as views: updated together."""

    master: Tensor
    gradient: Tensor
    momentum: Tensor


class Muon:
    """torch's Muon, to the bit on the CPU, and `AdamW` for the other parameters.

    A matrix's state is one momentum buffer and the count of updates, as AdamW's parameters have. Matrices of one shape
    go through the iteration together, as many as fit into a bucket. On a GPU the host does not wait: a chain of kernels
    runs on the current stream, and none of them can be left out.
    """

    skips_on_device = False

    def __init__(self, masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]) -> None:
        self.optim = optim
        self.lr = optim.lr
        self.matrices = {name: master for name, master in masters.items() if rows[name].hidden_matrix}
        self.shapes = {name: rows[name].shape[-2:] for name in self.matrices}
        """Shape of one matrix: [rows, columns]."""
        on_cpu = any(master.device.type == "cpu" for master in masters.values())
        self.together = 1 if on_cpu else BUCKET_ELEMENTS
        """Elements of one shape that go through the iteration together, unless one matrix has more."""
        rest = {name: master for name, master in masters.items() if name not in self.matrices}
        self.adamw = AdamW(rest, optim, rows)
        own: State = {
            name: {"step": torch.tensor(0.0, device="cpu"), "momentum_buffer": torch.zeros_like(master)}
            for name, master in self.matrices.items()
        }
        both = own | self.adamw.state
        self.state: State = {name: both[name] for name in masters}

    @property
    def updates(self) -> int:
        """How many updates were made, those before a checkpoint included; 0 for a rank without parameters."""
        return max((int(entry["step"]) for entry in self.state.values()), default=0)

    def take_back(self) -> None:
        """Do nothing: steps are only enqueued once it is known that they count."""

    @torch.no_grad()
    def step(self, left_out: Tensor | None = None) -> None:
        """Update every parameter that has a gradient."""
        assert left_out is None  # Muon does not skip on the device
        self.adamw.lr = self.lr
        self.adamw.step()
        alike: dict[tuple[int, ...], list[_Stack]] = {}
        for name, master in self.matrices.items():
            if master.grad is None:
                continue
            entry, shape = self.state[name], self.shapes[name]
            entry["step"] += 1
            if master.numel():
                views = (each.view(-1, *shape) for each in (master.data, master.grad, entry["momentum_buffer"]))
                alike.setdefault(shape, []).extend(_pieces(_Stack(*views), self.together))
        for stacks in alike.values():
            for some in buckets(stacks, lambda stack: stack.master.numel(), lambda _: None, self.together):
                self._move(some)

    def _move(self, stacks: Sequence[_Stack]) -> None:
        """Update matrices of one shape."""
        optim, rows, columns = self.optim, *stacks[0].master.shape[1:]
        numbers = [len(stack.master) for stack in stacks]
        # In the dtype of torch's iteration; filled stack by stack, so that at most one stack is in float32.
        directions = torch.empty(sum(numbers), rows, columns, dtype=torch.bfloat16, device=stacks[0].master.device)
        for stack, own in zip(stacks, directions.split(numbers), strict=True):
            stack.momentum.lerp_(stack.gradient, 1 - optim.muon_momentum)
            nesterov = optim.muon_nesterov
            own.copy_(stack.gradient.lerp(stack.momentum, optim.muon_momentum) if nesterov else stack.momentum)
        directions = orthogonalised(directions, optim.muon_ns_steps)
        matched = optim.muon_adjust_lr == "match_rms_adamw"  # factors on the rate as in torch's `_adjust_lr`
        rate = self.lr * (0.2 * sqrt(max(rows, columns)) if matched else sqrt(max(1, rows / columns)))
        for stack, own in zip(stacks, directions.split(numbers), strict=True):
            stack.master.mul_(1 - self.lr * optim.weight_decay)
            stack.master.add_(own, alpha=-rate)


def orthogonalised(x: Tensor, steps: int) -> Tensor:
    """The matrices x [number, rows, columns] (bfloat16) with singular values moved to about 1; may overwrite x.

    On a GPU all go through the iteration together. On the CPU each goes through torch's own, in separate memory: there
    batched products, or products of matrices with another alignment, round differently.
    """
    if x.device.type != "cpu":
        return newton_schulz(x, steps)
    from torch.optim._muon import _zeropower_via_newtonschulz  # few runs need it

    return torch.stack([_zeropower_via_newtonschulz(one.clone(), NEWTON_SCHULZ, steps, EPS) for one in x])


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Orthogonalise all matrices together, in as many kernels as one matrix needs: torch's iteration, with Jordan's
    quintic polynomial (https://kellerjordan.github.io/posts/muon/). Overwrites x."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS))
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _pieces(stack: _Stack, elements: int) -> Iterator[_Stack]:
    """The stack in pieces of at most `elements` elements, or of one matrix if that has more."""
    most = max(1, elements // stack.master[0].numel())
    return (_Stack(*pieces) for pieces in zip(*(each.split(most) for each in stack), strict=True))


def make_optimizer(
    masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]
) -> AdamW | Muon:
    """The optimizer that the config names."""
    return (Muon if optim.name == "muon" else AdamW)(masters, optim, rows)
