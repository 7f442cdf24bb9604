"""The weights of one rank, as the model computes with them and as the optimizer steps them (decisions 11, 21 and 67).

Weights are keyed by canonical name. The optimizer steps masters. In float32 and float64 these are the weights
themselves; otherwise masters are float32, and a master's `.grad` is the accumulator (Megatron's main_grad).
Replication, ties, norm, clipping, optimizers and checkpoints read masters only.

If data-parallel ranks shard the optimizer's state (`ShardedWeights`), gradients add up whole, in the masters' dtype,
until a stage's last backward; then every rank gets its part of the sum, and the rest is freed. Masters and moments
exist only in parts: equal parts of a parameter, or the runs that a rank owns. The model's weights are whole, or
(`GatheredWeights`) whole only while a stage computes; they are gathered for a stage's first forward of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.parallel.replicate import buckets
from ppctl.parallel.shard import (
    Runs,
    Sums,
    Wholes,
    own_run,
    part_of,
    reduce_sums,
    run_of,
    scatter_sums,
    start_gather,
    start_sending,
)
from ppctl.tensors.wide_dtype import wide_dtype
from ppctl.topology import BUCKET_ELEMENTS
from ppctl.weight_gradients.wide_sums import WideSum

GroupOf = Callable[[str], dist.ProcessGroup]
"""Canonical name -> the ranks that share the parameter."""


class Weights:
    """A rank's parameters by canonical name: `model` (what stages compute with) and `master` (float32 or wider).
    Gradients arrive in `master[name].grad`, in microbatch order, whatever the dtype."""

    model: dict[str, nn.Parameter]
    master: dict[str, nn.Parameter]

    def __init__(self, model: Mapping[str, nn.Parameter]) -> None:
        self.model = dict(model)
        self.master = {
            name: p if p.dtype == wide_dtype(p.dtype) else nn.Parameter(p.detach().to(wide_dtype(p.dtype)))
            for name, p in model.items()
        }
        self._add_up()

    def _add_up(self) -> None:
        """Let autograd add gradients of weights that are narrower than their masters to the sums."""
        for name in self.narrow():
            self.model[name].register_post_accumulate_grad_hook(partial(_accumulate, self.sum_of(name)))

    def narrow(self) -> Iterator[str]:
        """The names of weights that are narrower than their masters."""
        return (name for name, parameter in self.model.items() if parameter.dtype != wide_dtype(parameter.dtype))

    def sum_of(self, name: str) -> WideSum:
        """The sum of the gradients of a weight that is narrower than its master."""
        master = self.master[name]
        return WideSum(lambda: master.grad, partial(setattr, master, "grad"))

    def let_products_add(self) -> None:
        """Let products add gradients to the sums themselves, in one kernel, without rounding."""
        for name in self.narrow():
            self.model[name].wide_sum = self.sum_of(name)  # type: ignore[attr-defined]  # a parameter takes attributes

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters: after an optimizer step, and after loading a checkpoint."""
        for name, parameter in self.model.items():
            if parameter is not self.master[name]:
                parameter.copy_(self.master[name])

    def clear_gradients(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        for parameter in (*self.model.values(), *self.master.values()):
            parameter.grad = None

    def run(self, name: str) -> range:
        """The elements of the rank's parameter, read flat, that its master and moments have."""
        return range(self.model[name].numel())


def _accumulate(total: WideSum, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        total.add(gradient)


class ShardedWeights(Weights):
    """Weights whose `master[name]` is this rank's part of the parameter, flat, in float32 at least: the elements that
    the rank owns if the name is in `owned`, else one of n equal parts. Published masters are in the model's weights of
    a stage from `hold(stage)` on. `begin` and `hold` are collectives of the groups that share the stage's parameters:
    all ranks call them in one order.
    """

    def __init__(
        self,
        stages: Mapping[int, Iterable[str]],
        model: Mapping[str, nn.Parameter],
        group_of: GroupOf,
        owned: Mapping[str, Runs],
    ) -> None:
        self.stages = {stage: list(names) for stage, names in stages.items()}
        self._coming: dict[int, list[tuple[list[str], Wholes]]] = {}
        self._held: set[int] = set()
        self.model = dict(model)
        self.group_of = group_of
        self.owned = owned
        self.master = {
            name: nn.Parameter(self._part(name, p.detach().to(wide_dtype(p.dtype)))) for name, p in model.items()
        }
        self.sums: dict[str, Tensor] = {}
        """Name -> whole gradient of a rank's microbatches, for weights narrower than their masters; others use
        `.grad`."""
        self._add_up()

    def sum_of(self, name: str) -> WideSum:
        """The sum of the gradients of a weight that is narrower than its master: whole, until ranks get their parts."""
        return WideSum(partial(self.sums.get, name), partial(self.sums.__setitem__, name))

    def publish(self) -> None:
        """Publish the masters' present values: the next `hold` of each stage gathers them."""
        self._held.clear()

    @torch.no_grad()
    def begin(self, stage: int) -> None:
        """Start gathering the stage's weights, unless they are here or on their way."""
        if stage in self._held or stage in self._coming:
            return
        self._coming[stage] = [
            (names, self.start_gather(names, [self.master[name].data for name in names], self.model[names[0]].dtype))
            for names in self.buckets(self.stages[stage])
        ]

    @torch.no_grad()
    def hold(self, stage: int) -> None:
        """Wait until the stage's weights are gathered; starts the gather unless `begin` has done so."""
        if stage in self._held:
            return
        self.begin(stage)
        coming = self._coming.pop(stage)
        self._held.add(stage)
        while coming:  # gathered parts are freed bucket by bucket
            names, bucket = coming.pop(0)
            bucket(self._made(name) for name in names)
            del bucket

    def release(self, stage: int) -> None:
        """Do nothing: the stage's weights stay whole."""

    def release_all(self) -> None:
        """Release the weights of all stages, after forwards that no backward follows."""
        for stage in self.stages:
            self.release(stage)

    def _made(self, name: str) -> Tensor:
        """The tensor to write the whole weight `name` into; writing changes the weight's version."""
        return self.model[name].detach()

    def clear_gradients(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        self.sums.clear()
        super().clear_gradients()

    def run(self, name: str) -> range:
        """The range of the rank's part in the parameter, read flat, without the padding at the end."""
        if name in self.owned:
            return own_run(self.owned[name], self.group_of(name))
        return run_of(self.model[name], self.group_of(name))

    def start_gather(self, names: Sequence[str], parts: Sequence[Tensor], dtype: torch.dtype) -> Wholes:
        """Start making tensors of one of `buckets` whole from the ranks' parts of them."""
        group = self.group_of(names[0])
        if names[0] in self.owned:
            return start_sending(parts, [self.owned[name] for name in names], dtype, group)
        return start_gather(parts, dtype, group)

    def start_sums(self, names: Sequence[str], gradients: Iterable[Tensor]) -> Sums:
        """Start summing the gradients of one of `buckets`, which are asked for one by one; each rank gets its part."""
        masters, group = [self.master[name] for name in names], self.group_of(names[0])
        device, dtype = masters[0].device, masters[0].dtype
        if names[0] in self.owned:
            return reduce_sums(gradients, [self.owned[name] for name in names], group, device, dtype)
        return scatter_sums(gradients, [master.numel() for master in masters], group, device, dtype)

    def take_sum(self, name: str) -> Tensor:
        """Return the gradient summed so far, zeros if there is none, and drop it here."""
        parameter = self.model[name]
        gradient, parameter.grad = parameter.grad, None
        gradient = self.sums.pop(name, gradient)
        if gradient is None:
            return torch.zeros(parameter.shape, dtype=wide_dtype(parameter.dtype), device=parameter.device)
        return gradient

    def buckets(self, names: Iterable[str]) -> Iterator[list[str]]:
        """The names in buckets, each of one group and one kind of division (owned runs, or equal parts)."""
        alike: dict[tuple[dist.ProcessGroup, bool], list[str]] = {}
        for name in names:
            alike.setdefault((self.group_of(name), name in self.owned), []).append(name)
        for shared in alike.values():
            yield from buckets(shared, lambda name: self.model[name].numel(), self.group_of, BUCKET_ELEMENTS)

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """A copy of this rank's part of the parameter `whole`."""
        if name not in self.owned:
            return part_of(whole, self.group_of(name))
        run = own_run(self.owned[name], self.group_of(name))
        return whole.reshape(-1)[run.start : run.stop].clone()


class GatheredWeights(ShardedWeights):
    """Sharded weights whose model weights exist from `hold(stage)` to `release(stage)`, once a step. Between steps a
    rank has only its parts of masters and moments."""

    @cached_property
    def _nothing(self) -> dict[str, Tensor]:
        """Tensors in place of released weights: they take no memory, and are NaN, which shows if they are used."""
        whole = self.model.items()
        return {n: torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape) for n, p in whole}

    def release(self, stage: int) -> None:
        """Free the stage's weights, after its last backward."""
        self._held.discard(stage)
        for name in self.stages[stage]:
            self.model[name].data = self._nothing[name]

    def _made(self, name: str) -> Tensor:
        """Allocate the whole weight `name` as the model parameter's data, and return it uninitialised."""
        parameter = self.model[name]
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return super()._made(name)


class GradientScatter:
    """Gives every rank, in place of `GradientReducer`, its part of the sums of a stage's gradients."""

    def __init__(self, stages: Mapping[int, Iterable[str]], weights: ShardedWeights) -> None:
        self.stages = {stage: list(names) for stage, names in stages.items()}
        self.weights = weights
        self._running: list[tuple[list[str], Sums]] = []

    @torch.no_grad()
    def reduce(self, stage: int, divisor: float = 1.0) -> None:
        """Start summing the stage's gradients / `divisor` beside the rest of the pipeline, after waiting for the
        previous stage's sums: only one stage's sums are under way."""
        self.finish()
        weights = self.weights

        def scaled(name: str) -> Tensor:
            gradient = weights.take_sum(name)
            return gradient if divisor == 1.0 else gradient.div_(divisor)

        for names in weights.buckets(self.stages[stage]):
            self._running.append((names, weights.start_sums(names, map(scaled, names))))

    def finish(self) -> None:
        """Wait for every sum started since the last call; then the masters have their gradients."""
        for names, sums in self._running:
            for name, part in zip(names, sums(), strict=True):
                self.weights.master[name].grad = part
        self._running.clear()
