"""Measures the costs of the parts of a transformers model, on tensors that have shapes but no values.

Five batches give the growth with sequences, tokens and pairs of tokens (`Growth`). The same operators run for all
batches, so each moment's growth is fitted separately: for other sizes the peak may be at another moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model
from ppctl.foreign.measured_pass import (
    PassCosts,
    held_tensors,
    operators_of,
    storage_of,
    tensors_of,
    valueless,
)
from ppctl.foreign.miniature import lower_windows
from ppctl.foreign.peft_adapters import AdapterDropout, add_adapters
from ppctl.geometry.foreign_model import Adapters, Anatomy, Growth, LayerCost, PartCosts, Peak, RouterLogits
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import Parameter

_LONGEST = 1024
"""Tokens of the longest measured sequence, in models that allow as many."""
_LONGEST_LOOP = 64
"""Tokens of the longest measured sequence if a layer loops over tokens: each iteration takes a millisecond."""
Say = Callable[[str], None]
"""A function that takes a line about the present work."""

_FEW = (2, 4)
"""Lengths of two sequences that show whether a layer loops: it runs more operators for the longer one."""
_LEAST = 16
_WIDTHS = {4: torch.float32, 2: torch.bfloat16}


def measure(
    config: Any,
    anatomy: Anatomy,
    kinds: Sequence[int],
    hidden: int,
    positions: int,
    adapters: Adapters | None = None,
    say: Say = lambda _: None,
) -> tuple[PartCosts, ...]:
    """Measure a model that allows `positions` positions; `kinds` are indexes of layers, one of each kind. Return its
    costs in float32 and in bfloat16, and if attention has a window or chunk, both again for sequences at least as long.
    `say` is called with a line before each measurement. Raises torch's error for code that reads tensors' values.
    """
    found = list[PartCosts]()
    windowed = deepcopy(config)
    window = lower_windows(windowed)
    unmasked = window - 1  # the library masks at this length, although each token sees all before it
    shorter = 0 < unmasked < positions
    loops: bool | None = None
    for above, shape in ((0, config), (unmasked, windowed)):
        whole = shape is config
        if (whole and shorter and unmasked < _LEAST) or not (whole or shorter):
            continue
        longest = min(_LONGEST, positions, unmasked) if whole and shorter else min(_LONGEST, positions)
        for element, dtype in _WIDTHS.items():
            model = _model_of(shape, anatomy, kinds, hidden, dtype, adapters)
            say(f"measuring its layers ({len(found) + 1} of {2 * (1 + shorter)})")
            loops = model.loops() if loops is None else loops
            most = min(longest, _LONGEST_LOOP) if loops else longest
            found.append(model.measured(element, above, (most // 4, most // 2, most)))
    return tuple(found)


def _model_of(
    config: Any, anatomy: Anatomy, kinds: Sequence[int], hidden: int, dtype: torch.dtype, adapters: Adapters | None
) -> _MeasuredModel:
    """The model up to the last measured layer (making all layers takes seconds); with adapters the whole model, since
    the first layer with an adapter decides where backwards end."""
    blank = make_model(config, "meta", dtype).train()
    if adapters is not None:
        adapted = add_adapters(blank, adapters, anatomy, dtype)
        for module in adapted.modules():
            if isinstance(module, AdapterDropout):
                module.__class__ = _MeasuredDropout
        return _MeasuredModel(adapted, anatomy, kinds, hidden, dtype, True)
    count = max(kinds) + 1
    layers: Any = blank.get_submodule(anatomy.layers)
    del layers[count:]
    return _MeasuredModel(blank, replace(anatomy, count=count), kinds, hidden, dtype)


class _MeasuredDropout(AdapterDropout):
    """Stands in for dropout without the bytes of its draws, which `cost/activations.py` counts."""

    def forward(self, x: Tensor, draws: object = None) -> Tensor:
        dropped: Tensor = _Dropped.apply(super().forward(x))  # type: ignore[no-untyped-call]  # torch's own
        return dropped


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.bernoulli(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.bernoulli(gradients[0])


@dataclass(frozen=True, slots=True)
class _MeasuredModel:
    """A model on meta, and one layer of each kind, whose costs are measured."""

    blank: nn.Module
    anatomy: Anatomy
    kinds: Sequence[int]
    hidden: int
    dtype: torch.dtype
    adapted: bool = False

    def loops(self) -> bool:
        """Whether a layer's code loops over the tokens, so that the number of its operators grows with them."""
        with valueless():
            stages = [self._stage([Layer("decoder", index)]) for index in self.kinds]
            numbers = [[operators_of(each, self._given(each, 1, length)) for length in _FEW] for each in stages]
        return any(short != long for short, long in numbers)

    def measured(self, element: int, above: int, lengths: tuple[int, int, int]) -> PartCosts:
        """Measure all parts in sequences of three lengths; `element` and `above` are noted in the result."""
        batches = [(rows, lengths[place]) for rows, place in BATCHES]
        with valueless():
            tables = self._tables(batches)
            numbers = tables[0].numbers
            grown = [fitted(batches, [each.sizes[n] for each in tables]) for n in range(len(tables[0].sizes))]
            runs = [self._runs([Layer("decoder", index)], batches) for index in self.kinds]
            parts = [
                self._part(batches, found, numbers[index], causal=True)
                for index, found in zip(self.kinds, runs, strict=True)
            ]
            first, last = (
                self._part(batches, self._runs([layer], batches), ()) for layer in (Layer("embedding"), Layer("loss"))
            )
        before = fitted(batches, [each.before for each in runs[0]])
        return PartCosts(element, above, tuple(grown), before, first, last, tuple(parts))

    def _stage(self, layers: Sequence[Layer]) -> ForeignStage:
        return ForeignStage(self.blank, self.anatomy, layers, adapted=self.adapted)

    def _given(self, stage: ForeignStage, rows: int, length: int) -> Tensor:
        if stage.embeds:
            return torch.zeros(rows, length, dtype=torch.int64)
        # No gradient is needed before the first trained layer.
        wanted = not stage.own or min(stage.own) > self.first
        return torch.zeros(rows, length, self.hidden, dtype=self.dtype, requires_grad=wanted)

    @property
    def first(self) -> int:
        """The first layer with trained weights; -1 if something before the layers is trained."""
        if not self.adapted:
            return -1
        trained = [name for name, each in self.blank.named_parameters() if each.requires_grad]
        if any(self.anatomy.place(name) == 0 for name in trained):
            return -1
        inside = [name.removeprefix(f"{self.anatomy.layers}.") for name in trained if self.anatomy.place(name) == 1]
        return min(int(name.split(".")[0]) for name in inside)

    def _tables(self, batches: Sequence[tuple[int, int]]) -> list[_LayerTables]:
        """By batch, the tables that a forward makes once for all layers, as seen after the last kind of layer."""
        stage, found = self._stage([Layer("decoder", max(self.kinds))]), list[_LayerTables]()
        for batch in batches:
            given = self._given(stage, *batch)
            own = {storage_of(tensor) for tensor in (*held_tensors(stage), given)}
            found.append(_LayerTables(own))
            with found[-1].watching(stage, self.kinds):
                stage(given)
        return found

    def _runs(self, layers: Sequence[Layer], batches: Sequence[tuple[int, int]]) -> list[PassCosts]:
        stage = self._stage(layers)
        for parameter in stage.canonical_parameters().values():
            parameter.grad = torch.zeros_like(parameter)  # a microbatch's gradient is added to it and freed
        return [PassCosts(stage, self._given(stage, *batch)) for batch in batches]

    def _part(
        self,
        batches: Sequence[tuple[int, int]],
        found: Sequence[PassCosts],
        numbers: Sequence[int],
        *,
        causal: bool = False,
    ) -> LayerCost:
        """Return the costs of one part; `numbers` are the numbers of the tables among its arguments, in order."""
        longest, one = max(length for _, length in batches), found[0]
        flops, *halves = (
            fitted(batches, [getattr(each, name) for each in found])
            for name in ("flops", "input_flops", "weight_flops")
        )
        if causal:
            flops, *halves = (_causal(each, longest) for each in (flops, *halves))
        keeps = {n for storage, n in zip(one.arguments, numbers, strict=True) if storage in one.kept}
        kept = [
            sum(size for storage, size in each.kept.items() if storage not in {each.given, *each.arguments})
            for each in found
        ]
        waiting = [each.waiting for each in found]

        def beside(name: str, begins: Sequence[float]) -> Peak:
            return peak(
                batches,
                [[value - own for value in getattr(each, name)] for each, own in zip(found, begins, strict=True)],
            )

        return LayerCost(
            flops=flops,
            kept=fitted(batches, kept),
            keeps_input=one.given in one.kept,
            in_forward=beside("forward", kept),
            in_backward=beside("backward", kept),
            in_inputs=beside("inputs", kept),
            deferred=fitted(batches, waiting),
            in_weights=beside("weights", waiting),
            reads=tuple(sorted(set(numbers))),
            keeps=tuple(sorted(keeps)),
            back=(halves[0], halves[1]) if self.adapted else None,
            drawing=(beside("drawing_forward", kept), beside("drawing_backward", kept), beside("drawing_inputs", kept)),
        )


def _causal(flops: Growth, longest: int) -> Growth:
    """The operations of causal attention, from operations counted without a mask: half of all pairs are masked.
    Operations that do not depend on the number of sequences are counted per token."""
    return Growth(0.0, flops.token + flops.constant / longest, flops.pair / 2)


@dataclass(slots=True)
class _LayerTables:
    """The tensors, as storages, that layers are called with beside their hidden state, by kind of layer."""

    own: set[int]
    """Storages of the model's tensors, and of the stage's input."""
    storages: dict[int, int] = field(default_factory=dict)
    """Storage -> the number of its table."""
    sizes: list[float] = field(default_factory=list)
    numbers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Layer -> the numbers of its tables, in the order of arguments."""

    @contextmanager
    def watching(self, stage: ForeignStage, layers: Sequence[int]) -> Iterator[None]:
        """While entered, note the arguments of these layers, on any stage."""
        hooks = [
            stage.model.get_submodule(stage.anatomy.layer(index)).register_forward_pre_hook(
                self._note(index), with_kwargs=True
            )
            for index in layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, index: int) -> Callable[..., None]:
        def note(_: nn.Module, arguments: Any, named: Mapping[str, Any]) -> None:
            others = {key: value for key, value in named.items() if key != "hidden_states"}
            given = [each for each in tensors_of((arguments[1:], others)) if storage_of(each) not in self.own]
            for tensor in given:
                if storage_of(tensor) not in self.storages:
                    self.storages[storage_of(tensor)] = len(self.sizes)
                    self.sizes.append(float(tensor.untyped_storage().nbytes()))
            self.numbers[index] = tuple(self.storages[storage_of(tensor)] for tensor in given)

        return note


def rough(
    kinds: Sequence[Sequence[Parameter]], hidden: int, active: Callable[[Sequence[Parameter]], int]
) -> tuple[PartCosts, ...]:
    """Estimate from its matrices the costs of a model whose code reads values; a token meets `active(rows)` elements.
    Assumes that every product keeps its input, and that all heads together are as wide as the residual stream."""

    def layer(rows: Sequence[Parameter], element: int) -> LayerCost:
        widths = sum(sum(row.shape[-2:]) for row in rows if row.is_matrix and len(row.shape) == 2)
        weights = max((row.size for row in rows if row.is_matrix), default=0)
        flops = Growth(0.0, 2.0 * active(rows), 2.0 * hidden)
        kept, running = Growth(0.0, float(element * widths)), Growth(float(element * weights), 2.0 * element * hidden)
        return LayerCost(flops, kept, True, (), (running,), (running,), kept, (Growth(float(element * weights)),))

    def whole(element: int) -> PartCosts:
        beside = layer((), element)
        return PartCosts(element, 0, (), Growth(), beside, beside, tuple(layer(rows, element) for rows in kinds))

    return tuple(map(whole, _WIDTHS))


BATCHES = ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
"""The measured batches: (sequences, index of one of three lengths). There are as many as a `Growth` has numbers."""
_SEQUENCES = (1, 2, 4, 16, 64)
_LENGTHS = tuple(2**n for n in range(5, 21))


def fitted(batches: Sequence[tuple[int, int]], values: Sequence[float]) -> Growth:
    """The growth through the values that were measured with batches of (sequences, tokens of each)."""
    return _growth(_solved(batches, torch.tensor([values], dtype=torch.float64))[0], batches, max(values))


def peak(batches: Sequence[tuple[int, int]], traces: Sequence[Sequence[float]]) -> Peak:
    """The moments that are the largest for some batch; `traces` are the moments of each measured batch. If other
    lengths ran other operators, moments do not correspond: then the largest of each batch count as one moment."""
    if not any(traces):
        return ()
    if len({len(trace) for trace in traces}) > 1:
        return (fitted(batches, [max(trace, default=0.0) for trace in traces]),)
    values = torch.tensor(traces, dtype=torch.float64).T
    values = torch.unique(values, dim=0)
    solved = _solved(batches, values)
    grid = torch.tensor([_terms(b, s) for b in _SEQUENCES for s in _LENGTHS], dtype=torch.float64)
    chosen = sorted({int(place) for place in (solved @ grid.T).argmax(dim=0)})
    return tuple(_growth(solved[place], batches, float(values[place].max())) for place in chosen)


def _terms(sequences: int, length: int) -> list[float]:
    return [1.0, sequences * length, sequences * length**2, length, length**2]


def _solved(batches: Sequence[tuple[int, int]], values: Tensor) -> Tensor:
    """The numbers of a `Growth` [n, 5] for measurements [n, batches]."""
    matrix = torch.tensor([_terms(*batch) for batch in batches], dtype=torch.float64)
    found: Tensor = torch.linalg.solve(matrix, values.T).T
    return found


def _growth(solved: Tensor, batches: Sequence[tuple[int, int]], largest: float) -> Growth:
    """The growth with these numbers; numbers that are rounding errors are set to 0."""
    scale = [_terms(*batch) for batch in batches]
    bounds = [1e-6 * max(1.0, largest) / max(row[n] for row in scale) for n in range(5)]
    return Growth(
        *(0.0 if abs(each) < bound else round(each, 6) for each, bound in zip(solved.tolist(), bounds, strict=True))
    )


_ROUTED = (3, 5)
"""(sequences, tokens of each) of the forward in which routers are watched."""


def router_logits(config: Any, anatomy: Anatomy, index: int, hidden: int) -> RouterLogits:
    """The form of the logits that each router of layer `index` records. Raises torch's error for code that reads
    values, and CannotCut unless there is one number for each token and expert."""
    recorded = [_recorded(config, anatomy, index, hidden, cast) for cast in (False, True)]
    for each in recorded:
        if each.dim() != 3 or each.shape[1] != _ROUTED[0] * _ROUTED[1]:
            shape, given = list(each.shape[1:]), " x ".join(map(str, _ROUTED))
            message = f"the routers of {anatomy.layer(index)} record {shape} for {given} tokens"
            raise CannotCut(f"{message}, but a message carries [tokens, experts]")
    return RouterLogits(recorded[0].shape[2], *(each.dtype == torch.float32 for each in recorded))


def _recorded(config: Any, anatomy: Anatomy, index: int, hidden: int, cast: bool) -> Tensor:
    """The logits that leave with a layer's hidden state: with bfloat16 weights, or with products `cast` to bfloat16."""
    dtype = torch.float32 if cast else torch.bfloat16
    blank = make_model(config, "meta", dtype).train()
    with valueless(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        stage = ForeignStage(blank, anatomy, [Layer("decoder", index)])
        recorded: Tensor
        _, recorded = stage(torch.zeros(*_ROUTED, hidden, dtype=dtype))
    return recorded
