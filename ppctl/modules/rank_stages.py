"""The stages of a pipeline on this rank: their modules, their sharding, and their parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import CheckpointError, Problem, listed, some
from ppctl.foreign.fully_shard import GradientSync, StageDtypes, dtypes_of
from ppctl.modules.pipeline_agreement import agreed, misuse
from ppctl.modules.pipeline_parts import request_of
from ppctl.modules.sources import PipelineModel
from ppctl.parallel.ties import TiedGradients, TiedUse
from ppctl.schedule.action import Placement
from ppctl.schedule.policies import POLICIES


class RankStages:
    """This rank's stages. Making them is a collective of the pipeline's ranks, and raises as `ppctl.pipeline` does. By
    stage, `made` has ppctl's module, `modules` the result of `parallelize`, `sync` the switches of sharded modules."""

    def __init__(
        self,
        source: PipelineModel,
        config: PipelineConfig,
        device: torch.device,
        ranks: AgreeingRanks,
        placement: Placement,
        parallelize: Callable[[nn.Module], nn.Module | None] | None,
    ) -> None:
        self._source, self._ranks, self._placement = source, ranks, placement
        self.numbers = placement.stages_of(ranks.rank)
        made = agreed(
            ranks, "make the stages", lambda: {n: source.make_stage(n, device) for n in self.numbers}, own=True
        )
        self.made: dict[int, Any] = made

        def parallelized() -> dict[int, Any]:
            results = {n: None if parallelize is None else parallelize(m) for n, m in made.items()}
            for result in results.values():
                if result is not None and not isinstance(result, nn.Module):
                    message = f"parallelize returns a module or None, not a {type(result).__name__}"
                    raise misuse(message, "def parallelize(stage): ...; return stage")
            return {n: made[n] if result is None else result for n, result in results.items()}

        self.modules: dict[int, Any] = agreed(ranks, "parallelize the stages", parallelized, own=True)
        self.sync = {n: GradientSync(module) for n, module in self.modules.items()}
        agreed(ranks, "look at how stages are sharded", lambda: self._check_sync(config))
        computed = agreed(
            ranks,
            "compare the stages' dtypes",
            lambda: {n: dtypes_of(module) for n, module in made.items()},
            of=dict[int, StageDtypes],
            to=list[StageDtypes],
            joined=_in_model_order,
        )
        agreed(ranks, "follow the stages' dtypes", lambda: source.compute_in(computed), own=True)
        self._ties = self._tie()
        self._compared = False
        self._trained: dict[str, bool] = {}

    # --- values ------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the whole model's names."""
        for stage in self.made.values():
            yield from stage.all_parameters().items()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and saved buffers by the whole model's names."""
        buffers = (item for stage in self.made.values() for item in stage.canonical_buffers().items())
        return {**{name: p.detach() for name, p in self.named_parameters()}, **dict(buffers)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's values from a state. Raises CheckpointError (PP-E537, PP-E539), and then copies nothing."""
        owner = {name: next(iter(uses)) for uses in self._source.ties for name in uses}
        own = self.state_dict()
        first = {n: state[of] for n, of in owner.items() if n != of and of in state and n in state}
        unequal = [f"{n} and {owner[n]}" for n, each in first.items() if not torch.equal(each, state[n].to(each))]
        if unequal:
            raise CheckpointError(_unequal(unequal, "PP-E537"))
        held = {name: state.get(name, state.get(owner.get(name, name))) for name in own}
        wrong = [f"{n} is missing" for n, tensor in held.items() if tensor is None]
        wrong += [
            f"{name}: {list(tensor.shape)} given, {list(own[name].shape)} expected"
            for name, tensor in held.items()
            if tensor is not None and tensor.shape != own[name].shape
        ]
        if wrong:
            raise CheckpointError(Problem("PP-E537", "the state does not fit this rank's stages", "", listed(wrong)))
        if any(sync.shards for sync in self.sync.values()):
            message = "stages that fully_shard has divided hold parts of tensors"
            remedy = "torch.distributed.checkpoint.load(pipeline.state_dict(), checkpoint_id=...)"
            raise CheckpointError(Problem("PP-E539", message, remedy))
        for name, tensor in held.items():
            assert tensor is not None  # a missing tensor is in `wrong`
            own[name].copy_(tensor)
        self._compared = False

    @property
    def trains_as_compared(self) -> bool:
        """Whether `compare_ties` saw the same uses of shared parameters trained as now."""
        return self._trained == self._trained_uses()

    def _trained_uses(self) -> dict[str, bool]:
        return {name: each.requires_grad for tied in self._ties for name, each in tied.own.items()}

    def compare_ties(self) -> None:
        """Compare the uses of each shared parameter: in every call whether they are trained, and in the first one, and
        after a rank has loaded values, also their values. A collective.

        Needed because a rank that loads or freezes only its stages does not see the other uses. Raises on all ranks,
        with the names, ConfigError (PP-E130) for uses that are not trained alike, CheckpointError (PP-E504) for values.
        """
        owned = [(name, next(iter(uses))) for uses in self._source.ties for name in uses]

        def alike(ranks: list[dict[str, bool]]) -> None:
            trained = {name: each for rank in ranks for name, each in rank.items()}
            unlike = [pair for pair in owned if trained[pair[0]] != trained[pair[1]]]
            if unlike:
                pairs = some([f"{name} and {owner}" for name, owner in unlike])
                message = f"one of {pairs} is trained, the other is not, but they are one parameter"
                names = tuple(sorted({name for pair in unlike for name in pair}))
                remedy = f"[p.requires_grad_(False) for name, p in pipeline.named_parameters() if name in {names}]"
                raise misuse(message, remedy)

        if owned:
            agreed(self._ranks, "see what is trained", self._trained_uses, of=dict[str, bool], joined=alike)
            self._trained = self._trained_uses()
        loaded = partial(agreed, self._ranks, "see who loaded", lambda: self._compared, of=bool, to=bool, joined=all)
        if not owned or loaded():
            return

        def conclude(ranks: list[dict[str, str]]) -> None:
            digests = {name: digest for rank in ranks for name, digest in rank.items()}
            unequal = [f"{name} and {owner}" for name, owner in owned if digests[name] != digests[owner]]
            if unequal:
                raise CheckpointError(_unequal(unequal, "PP-E504"))

        agreed(self._ranks, "compare shared parameters", self._digests, of=dict[str, str], joined=conclude)
        self._compared = True

    def _digests(self) -> dict[str, str]:
        own = {name: parameter.detach() for tied in self._ties for name, parameter in tied.own.items()}
        return {name: xxh3_128_hexdigest(_bytes(tensor)) for name, tensor in own.items()}

    # --- modes of a step ---------------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which all modules of this rank are in evaluation mode."""
        modes = {each: each.training for module in self.modules.values() for each in module.modules()}
        for module in self.modules.values():
            module.eval()
        try:
            yield
        finally:
            for each, training in modes.items():
                each.training = training

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that starts without gradients, and restores gradients and buffers on exit."""
        held = [(parameter, parameter.grad) for _, parameter in self.named_parameters()]
        buffers = [(b, b.clone()) for m in self.modules.values() for b in m.buffers() if 0 not in b.stride()]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    @contextmanager
    def summing_ties(self) -> Iterator[None]:
        """A context for a step: on exit the gradient of each trained use of a shared parameter is the sum over all.

        Each use has an accumulator, and the accumulators are summed once (decision 3). Gradients of earlier steps,
        which are summed already, are removed on entry and added again on exit.
        """
        held = {}
        for tied in self._ties:
            for parameter in tied.own.values():
                if parameter.grad is not None:
                    held[parameter], parameter.grad = parameter.grad, None
        yield
        for tied in self._ties:
            if any(use.requires_grad for use in tied.own.values()):  # on all ranks alike, by compare_ties
                tied.sum()
        for parameter, before in held.items():
            parameter.grad = before if parameter.grad is None else before + parameter.grad

    # --- how they are made -------------------------------------------------------------------------------------------

    def _tie(self) -> list[TiedGradients]:
        """For each shared parameter the TiedGradients over the global ranks of its uses."""
        own = dict(self.named_parameters())
        group = self._ranks.group

        def rank_of(stage: int) -> int:
            pp_rank = self._placement.rank_of(stage)
            return pp_rank if group is None or self._ranks.alone else dist.get_global_rank(group, pp_rank)

        own_rank = 0 if self._ranks.alone else dist.get_rank()
        return [
            TiedGradients([TiedUse(rank_of(stage), name) for name, stage in uses.items()], own, own_rank)
            for uses in self._source.ties
        ]

    def _check_sync(self, config: PipelineConfig) -> None:
        """Raise ConfigError (PP-E130) for sharded stages with split backwards or with shared parameters."""
        shards = any(sync.shards for sync in self.sync.values())
        request = request_of(config)
        splits = request.given.split if request.given is not None else POLICIES[str(request.policy)].splits
        if shards and splits:
            asked = config.pp_schedule_csv or config.pp_schedule
            message = f"fully_shard reduces gradients in a whole backward, but {asked} splits backwards"
            raise misuse(message, "pp_schedule='1f1b' pp_schedule_csv=None")
        if shards and self._source.ties:
            message = "parameters that several modules share have one gradient per use, but fully_shard divides each"
            raise misuse(message, "a model with tie_word_embeddings=False")


def _unequal(names: list[str], code: str) -> Problem:
    message = "the model shares these parameters, but they were given different values"
    return Problem(code, message, "a model with tie_word_embeddings=False", listed(names))


def _bytes(tensor: Any) -> Any:
    # Makes a tensor whole that `parallelize` has divided.
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # a scalar has no last dim to view


def _in_model_order(of_ranks: list[dict[int, StageDtypes]]) -> list[StageDtypes]:
    whole = {number: dtypes for rank in of_ranks for number, dtypes in rank.items()}
    return [whole[number] for number in sorted(whole)]
