"""The least seconds and bytes that any plan of a configuration can have, from the plan's own prices of its stages.

The closed form: a rank waits for its first input, then runs its forwards and backwards one after the other, and its
last result goes on to the first stage; it holds its state, and what its schedule has begun at its fullest moment. A
closer bound simulates a few rounds of the schedule, and counts every other as the last of these. Knows how a pipeline
fills. Must not know which configurations there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from ppctl.config.parallel_rules import in_batches
from ppctl.config.schema import RunConfig
from ppctl.cost.activations import StageActivations, kind_pricer, stage_activations, stage_pieces
from ppctl.cost.operands import stage_operands
from ppctl.cost.parameter_counts import Count, on_device
from ppctl.cost.state import State, state_bytes
from ppctl.cost.times import optimizer_seconds
from ppctl.errors import ScheduleError
from ppctl.geometry.layers import Kind, Layer, layer_kinds
from ppctl.host.accelerators import MEGATRON
from ppctl.plan.memory import device_of, largest_pair, setting_of
from ppctl.plan.memory_limit import GRANULARITY, device_limit
from ppctl.plan.prices import machine_for, pricer, reduction, simulation_costs
from ppctl.plan.profile import Profile
from ppctl.plan.stages import precision_of
from ppctl.plan.types import StageCost, StageSpec
from ppctl.plan.violations import ConfigValues
from ppctl.schedule.policies import POLICIES, Policy
from ppctl.schedule.simulate import run_of
from ppctl.search.rounds import Cut, FullestMoment, Rounds
from ppctl.topology import ParallelSizes


class StagePrices:
    """Costs of stages on ranks that divide the model in one way, with one microbatch size and recomputation."""

    def __init__(
        self, values: ConfigValues, sizes: ParallelSizes, micro_batch_size: int, measured: Profile | None, whole: Cut
    ) -> None:
        self.config = values.config
        self.setting = setting_of(values.config, sizes, micro_batch_size)
        self._price = pricer(values.config, sizes, micro_batch_size, measured)
        train = self.config.train
        several = (train.recompute_num_layers or 1) > 1 or train.recompute_method == "block"
        self._by_place = several or train.recompute_stages is not None
        """Whether a layer's recomputation depends on the layers around it."""
        once = values.overridden({GRANULARITY: None}).config if self._by_place else values.config
        self._least = pricer(once, sizes, micro_batch_size, measured)
        self._layers = dict(zip(layer_kinds(self.config.model, whole.layers[0]), whole.layers[0], strict=True))
        self._costs: dict[Hashable, StageCost] = {}
        self._alive: dict[Hashable, StageActivations] = {}
        self._bytes_of_kind = kind_pricer(values.config.model, self.setting)

    def passes(self, layers: tuple[Layer, ...], stage: int, like: Hashable, *, last: bool) -> StageCost:
        """The cost of a stage; stages with the same key `like` have the same cost."""
        if like not in self._costs:
            self._costs[like] = self._price(stage, layers, last, self.activations(layers, stage, like))
        return self._costs[like]

    def activations(self, layers: tuple[Layer, ...], stage: int, like: Hashable) -> StageActivations:
        """The activations that a stage keeps of a microbatch, and the memory that exists beside them."""
        if like not in self._alive:
            model = self.config.model
            self._alive[like] = stage_activations(model, layers, self.setting, stage, self._bytes_of_kind)
        return self._alive[like]

    def sample_seconds(self, *, hidden: bool) -> dict[Kind, tuple[float, float]]:
        """Kind of layer -> the least seconds of a sample's forward and backward, in microbatches of this size or
        smaller; `hidden`: without exchanges."""
        number, least = self.setting.micro_batch_size, {}
        for kind, layer in self._layers.items():
            if kind not in self._costs:
                self._costs[kind] = self._least(0, (layer,), True, StageActivations(0, 0, 0))
            cost = self._costs[kind]
            ahead, back = cost.forward_s - hidden * cost.exchange_s, cost.backward_s - hidden * cost.exchange_back_s
            least[kind] = ahead / number, back / number
        return least

    @cached_property
    def sample_bytes(self) -> dict[Kind, tuple[float, float]]:
        """Kind of layer -> the least bytes that it keeps of a sample, in microbatches of this size or smaller: from
        forward to backward, and between the halves of a split backward."""
        model, setting, least = self.config.model, self.setting, {}
        for kind, layer in self._layers.items():
            pieces = stage_pieces(model, (layer,), setting, 0, self._bytes_of_kind).by_place
            kept = sum(piece.stays for piece in pieces.values()) * (not self._by_place)
            put_off = stage_operands(model, [layer], setting).kept if setting.allocator.backward else kept
            least[kind] = kept / setting.micro_batch_size, put_off / setting.micro_batch_size
        return least


class Division:
    """What depends on the number of replicas: a rank's available memory, its state, and the optimizer's step."""

    def __init__(self, config: RunConfig, sizes: ParallelSizes) -> None:
        self.config, self.sizes = config, sizes
        self.device, self.precision = device_of(config), precision_of(config)
        limit = device_limit(config, sizes)
        self.available = float("inf") if limit is None else limit.available_bytes
        setting = setting_of(config, sizes, 1)
        self._machine = machine_for(config, setting)
        self.partial = setting.allocator.backward
        """Whether sharded gradients are counted only while they exist."""
        self.by_layers = config.cost.stack == MEGATRON
        """Whether weights and gradients under `full` sharding exist for a layer at a time."""
        self._states: dict[Hashable, tuple[list[State], float]] = {}

    def state(self, cut: Cut, own: Sequence[int], sharding: str) -> State:
        """The least bytes of the state of a rank's stages: Muon's optimizer state may be almost nothing."""
        trained = sum((cut.trained[stage] for stage in own), Counter())
        state = state_bytes(trained, self.sizes, self.precision, sharding)
        weights = state.weights + sum(cut.untrained[stage] for stage in own)
        return State(weights, state.gradients, 0 if self.config.optim.name == "muon" else state.optimizer)

    def certain(self, state: State, sharding: str) -> int:
        """The bytes of `state` that exist together at some moment of any schedule. Unless weights exist layer by layer,
        all weights are among them: when the first microbatch runs on a rank's last stage."""
        if sharding == "none":
            return state.total
        return state.optimizer + (0 if self.by_layers and sharding == "full" else state.weights)

    def least(self, rounds: Rounds, batch: tuple[int, int, int], sharding: str, prices: StagePrices) -> float:
        """The least bytes at the fullest moment of the rank that holds most, by what layers keep of a sample."""
        one = prices.sample_bytes
        states, _ = self.states(rounds.cut, rounds.row.placement, sharding)
        samples = batch[0] * (batch[1] if rounds.every else 1)
        return max(
            self.certain(states[each.rank], sharding)
            + samples * sum(n * one[kind][0] + later * one[kind][1] for kind, (n, later) in each.layers.items())
            for each in rounds.filled
        )

    def reduce_s(self, trained: Count, cost: StageCost) -> float:
        """Seconds that a stage of this cost waits for the sums of its gradients."""
        return reduction(self.config, trained, self._machine, cost.forward_s + cost.backward_s)

    def states(self, cut: Cut, placement: str, sharding: str) -> tuple[list[State], float]:
        """(bytes of every rank's whole state, seconds of the optimizer's step)."""
        key = cut.vpp, placement, sharding
        if key not in self._states:
            known = {tuple(cut.like[stage] for stage in own): own for own in cut.ranks[placement]}
            alike = {like: self.state(cut, own, sharding) for like, own in known.items()}
            listed = [alike[tuple(cut.like[stage] for stage in own)] for own in cut.ranks[placement]]
            self._states[key] = listed, max(self._updating(state, sharding) for state in alike.values())
        return self._states[key]

    def _updating(self, state: State, sharding: str) -> float:
        """Seconds of the optimizer's step over the certain part of the state."""
        weights = 0 if sharding == "full" else state.weights
        return optimizer_seconds(
            *(weights, state.gradients if sharding == "none" else 0, state.optimizer),
            *(self.device, self.config.cost.stack),
        )


def hides(config: RunConfig, row: Policy) -> bool:
    """Whether a policy's schedules have pairs that hide exchanges; not with batches, for which the whole rank waits."""
    own = row.placement == "v" or config.parallel.overlap_moe_expert_parallel_comm
    return row.pairs and own and not in_batches(config)


Pace = tuple[float, float]
"""The least seconds of a schedule call: (once, per microbatch)."""


def called(each: Iterable[Pace], num_microbatches: int) -> float:
    """The seconds of a call by the slowest of these paces."""
    return max(once + num_microbatches * more for once, more in each)


def paces(
    cut: Cut,
    row: Policy,
    forwards: Sequence[float],
    backwards: Sequence[float],
    hops: Sequence[float],
    reduces: Sequence[float],
    *,
    waits: bool,
) -> list[Pace]:
    """The paces of the whole pipeline and of its ranks under a policy, from the seconds of stages. If a rank `waits`
    for its batches of messages, they count as busy time."""
    back_hops = [hop if stage >= cut.frozen else 0.0 for stage, hop in enumerate(hops)]
    ahead = [0.0, *accumulate(map(sum, zip(forwards, hops, strict=True)))]
    behind = [0.0, *accumulate(map(sum, zip(backwards, back_hops, strict=True)))]
    slowest = {0.0: ahead[-1] if row.splits else ahead[-1] + behind[-1]}
    for own in cut.ranks[row.placement]:
        first = own[0]
        busy = sum(forwards[stage] + backwards[stage] for stage in own)
        sent = back_hops[first - 1] if first else 0.0
        if waits:
            busy += sum(hops[stage] + (back_hops[stage - 1] if stage else 0.0) for stage in own)
        tail = max(reduces[first], 0.0 if row.splits else behind[first] - (sent if waits else 0.0))
        slowest[busy] = max(slowest.get(busy, 0.0), ahead[first] + tail)
    return [(once, busy) for busy, once in slowest.items()]


class PipelineBounds:
    """The least costs of a layout with a `StagePrices` and a `Division`, under any schedule of a kind."""

    def __init__(self, share: StagePrices, division: Division, cut: Cut) -> None:
        self.share, self.division, self.cut = share, division, cut
        last = len(cut.layers) - 1
        priced = [
            share.passes(held, stage, cut.like[stage], last=stage == last) for stage, held in enumerate(cut.layers)
        ]
        alike = {like: (own, cost) for like, own, cost in zip(cut.like, cut.trained, priced, strict=True)}
        reduces = {like: division.reduce_s(*each) for like, each in alike.items()}
        elements = {like: sum(on_device(own, division.sizes)) for like, (own, _) in alike.items()}
        self.costs = [cost._replace(reduce_s=reduces[like]) for cost, like in zip(priced, cut.like, strict=True)]
        self.elements = [elements[like] for like in cut.like]
        self._paces: dict[Hashable, list[Pace]] = {}

    def _is_local(self, stage: int, placement: str) -> bool:
        """Whether a stage's result stays on its rank."""
        return self.cut.pp == 1 or stage + 1 == len(self.costs) or (placement == "v" and stage == self.cut.pp - 1)

    @property
    def _hidden(self) -> float:
        """The largest share of an operation that a pair can hide: no pair saves more than its two exchanges."""
        each = [(cost.exchange_s, cost.forward_s) for cost in self.costs]
        each += [(cost.exchange_back_s, cost.input_grad_s) for cost in self.costs]
        return max((exchanged / seconds for exchanged, seconds in each if seconds), default=0.0)

    def seconds(self, num_microbatches: int, policy: str) -> float:
        """The least seconds of a schedule call, in closed form."""
        row = POLICIES[policy]
        key = row.placement, row.splits, hides(self.share.config, row)
        if key not in self._paces:
            self._paces[key] = self._pace(row)
        return called(self._paces[key], num_microbatches)

    def _pace(self, row: Policy) -> list[Pace]:
        frozen, costs = self.cut.frozen, self.costs
        alone = 1.0 - self._hidden * hides(self.share.config, row)
        hops = [0.0 if self._is_local(stage, row.placement) else each.message_s for stage, each in enumerate(costs)]
        forwards = [alone * each.forward_s for each in costs]
        backwards = [0.0 if stage < frozen else alone * each.backward_s for stage, each in enumerate(costs)]
        reduces = [each.reduce_s for each in costs]
        return paces(self.cut, row, forwards, backwards, hops, reduces, waits=in_batches(self.share.config))

    def _put_off(self, stage: int) -> float:
        """Bytes of a microbatch that a stage keeps between the halves of a split backward."""
        one, kinds = self.share.sample_bytes, self.cut.kinds[stage] if stage >= self.cut.frozen else {}
        return self.share.setting.micro_batch_size * sum(number * one[kind][1] for kind, number in kinds.items())

    def simulated(self, rounds: Rounds, num_microbatches: int) -> float:
        """Seconds of a schedule call from a few rounds; all others count as the last of these. (The call takes the
        longest of several sums that grow evenly with the rounds, so no later round adds less.) 0 if the schedule hangs,
        and for the policy that holds all microbatches, which has no rounds."""
        costs, pp, number = simulation_costs(self.costs, self._stages(rounds)), self.cut.pp, rounds.number
        more = -(-(num_microbatches - number) // pp)
        if rounds.every and more:
            return 0.0
        try:
            runs = [run_of(rounds.lowered(each), costs) for each in (number, number - pp)[: 1 + bool(more)]]
        except ScheduleError:
            return 0.0
        spent = [max(map(max, run.ends)) for run in runs]
        return spent[0] + more * (spent[0] - spent[-1])

    def _stages(self, rounds: Rounds) -> list[StageSpec]:
        """The places of the stages, without messages."""
        place = rounds.plain.placement
        spots = [(stage, place.rank_of(stage), place.chunk_of(stage)) for stage in range(len(self.costs))]
        return [StageSpec(*spot, held, (), (), 0, 0, 0) for spot, held in zip(spots, self.cut.layers, strict=True)]

    def peak(self, rounds: Rounds, num_microbatches: int, sharding: str) -> float:
        """Bytes at the fullest moment of the rank that holds most."""
        row, every = rounds.row, num_microbatches if rounds.every else 0
        states, _ = self.division.states(self.cut, row.placement, sharding)
        ranks = self.cut.ranks[row.placement]
        return max(
            self._held(ranks[rank], states[rank], moment, every, row.splits, sharding)
            for rank, moment, _ in rounds.filled
        )

    @cached_property
    def _pairs(self) -> list[int]:
        """Stage -> elements of the layers whose weights exist together, where weights exist layer by layer."""
        model, layers = self.share.config.model, dict(zip(self.cut.like, self.cut.layers, strict=True))
        at_once = {like: sum(on_device(largest_pair(model, own), self.division.sizes)) for like, own in layers.items()}
        return [at_once[like] for like in self.cut.like]

    def _held(
        self, own: tuple[int, ...], state: State, moment: FullestMoment, every: int, splits: bool, sharding: str
    ) -> float:
        """Bytes of a rank with the stages `own`. Part of a sharded state exists only while a stage works."""
        division, held = self.division, float(state.optimizer)
        for number, later, stage in zip(moment.begun, moment.put_off, own, strict=True):
            held += (every or number) * self.costs[stage].activation_bytes
            held += later * self._put_off(stage) if later else 0
        if not splits and (runs := own[moment.runs]) >= self.cut.frozen:
            held += self.share.activations(self.cut.layers[runs], runs, self.cut.like[runs]).in_backward
        if sharding == "none" or (sharding != "full" and not division.partial):
            return held + state.weights + state.gradients
        elements = self._pairs if division.by_layers and sharding == "full" else self.elements
        sizes = [elements[stage] for stage in own]
        summed = sum(size for size, summing in zip(sizes, moment.summing, strict=True) if summing)
        gathered = sum(size for size, number in zip(sizes, moment.begun, strict=True) if number)
        weights = division.precision.weight * gathered if sharding == "full" else state.weights
        return held + weights + division.precision.gradient * summed
