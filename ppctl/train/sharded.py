"""The weights of one rank where data-parallel ranks share what the optimizer needs (decision 11).

Knows which part of every parameter this rank steps. Must not know stages' modules, the schedule or the optimizer's
rule. Model weights are whole. Gradients add up whole, in float32, until a stage's last backward; then every rank gets
its part of the sum, and the rest is freed. Masters and moments exist in parts alone. All by canonical name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.parallel.shard import Arriving, gather_into, part_of, scatter_sums
from ppctl.topology import BUCKET_ELEMENTS

GroupOf = Callable[[str], dist.ProcessGroup]
"""The ranks that share the parameter of a canonical name."""


class ShardedWeights:
    """As `Weights`, with `master[name]` this rank's part [elements / n] of the float32 parameter."""

    def __init__(self, model: Mapping[str, nn.Parameter], group_of: GroupOf) -> None:
        self.model = dict(model)
        self.group_of = group_of
        self.master = {name: nn.Parameter(part_of(p.detach().float(), group_of(name))) for name, p in model.items()}
        self.sums: dict[str, Tensor] = {}
        """Whole float32 gradients of this rank's microbatches, by name; those of float32 weights are their `.grad`."""
        for name, parameter in model.items():
            if parameter.dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(self._accumulator(name))

    @torch.no_grad()
    def publish(self) -> None:
        """Make the model's weights from the ranks' masters. A collective of the groups."""
        for names in self._buckets(self.model):
            wholes = [self.model[name].data for name in names]
            gather_into(wholes, [self.master[name].data for name in names], self.group_of(names[0]))

    def clear_gradients(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.sums.clear()
        for parameter in (*self.model.values(), *self.master.values()):
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the summed gradients by name, without the parameters that received none."""
        return {name: master.grad for name, master in self.master.items() if master.grad is not None}

    @torch.no_grad()
    def whole(self, name: str, part: Tensor) -> Tensor:
        """What `part` (of the parameter `name`, its master or a moment) is a part of, on the CPU. A collective."""
        if not part.dim():
            return part
        made = torch.empty(self.model[name].shape, dtype=part.dtype, device=part.device)
        gather_into([made], [part.detach()], self.group_of(name))
        return made.cpu()

    @torch.no_grad()
    def keep(self, name: str, part: Tensor, whole: Tensor) -> None:
        """Take this rank's part of `whole` into `part`."""
        if part is not whole:
            part.copy_(part_of(whole, self.group_of(name)))

    def take_sum(self, name: str) -> Tensor:
        """The gradient summed so far, zeros where there is none, which is forgotten here."""
        parameter = self.model[name]
        gradient, parameter.grad = parameter.grad, None
        gradient = self.sums.pop(name, gradient)
        if gradient is None:
            return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        return gradient

    def buckets(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Neighbours that one group shares, up to the bucket's size."""
        yield from self._buckets(names)

    def _buckets(self, names: Iterable[str]) -> Iterator[list[str]]:
        by_group: dict[dist.ProcessGroup, list[str]] = {}
        for name in names:
            by_group.setdefault(self.group_of(name), []).append(name)
        for shared in by_group.values():
            bucket: list[str] = []
            elements = 0
            for name in shared:
                elements += self.model[name].numel()
                if bucket and elements > BUCKET_ELEMENTS:
                    yield bucket
                    bucket, elements = [], self.model[name].numel()
                bucket.append(name)
            yield bucket

    def _accumulator(self, name: str) -> Callable[[Tensor], None]:
        def accumulate(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            if name in self.sums:
                self.sums[name].add_(gradient)
            else:
                self.sums[name] = gradient.float()

        return accumulate


class GradientScatter:
    """As `GradientReducer`: gives every rank its part of the sums of a stage's gradients."""

    def __init__(self, stages: Mapping[int, Iterable[str]], weights: ShardedWeights) -> None:
        self.stages = {stage: list(names) for stage, names in stages.items()}
        self.weights = weights
        self._divisor = 1.0
        self._running: list[tuple[list[str], Arriving]] = []

    @torch.no_grad()
    def reduce(self, stage: int, divisor: float = 1.0) -> None:
        """Start summing the stage's gradients / `divisor`, and return: the rest of the pipeline runs beside it.

        Those of the stage before are waited for first, so that no more than one stage's are on their way.
        """
        self.finish()
        weights = self.weights

        def scaled(name: str) -> Tensor:
            gradient = weights.take_sum(name)
            return gradient if divisor == 1.0 else gradient.div_(divisor)

        for names in weights.buckets(self.stages[stage]):
            widths = [weights.master[name].numel() for name in names]
            group, device = weights.group_of(names[0]), weights.model[names[0]].device
            self._running.append((names, scatter_sums(map(scaled, names), widths, group, device)))

    def finish(self) -> None:
        """Wait for every sum started since the last call: the masters' gradients are there."""
        for names, arriving in self._running:
            for name, part in zip(names, arriving.wait(), strict=True):
                self.weights.master[name].grad = part
        self._running.clear()
