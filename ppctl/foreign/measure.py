"""What one layer of a model of transformers costs, measured on tensors that have shapes and no values.

Knows torch's operators and storages. Must not know plans. Operations are counted by torch's FlopCounterMode, kept bytes
by what autograd saves, and what lives only for a moment by the storages that exist. Three lengths of a sequence give
what grows with tokens and with pairs of tokens (`Growth`). Experts are stood in for by balanced ones: how many rows
each gets depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.geometry.foreign_model import Anatomy, Growth, LayerCost, RouterLogits
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import Parameter

_LONGEST = 1024
"""Tokens of the longest sequence that is measured, in models that allow as many."""
_SEQUENCES, _TOKENS = 3, 5
"""Of the forward in which routers are watched."""
_WIDTHS = {4: torch.float32, 2: torch.bfloat16}
_ATTENTION_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


_LONGEST_LOOP = 64
"""The same of a layer that goes from token to token in a loop, of which each turn takes a millisecond to measure."""
_FEW = (2, 4)
"""Tokens of two sequences that tell whether a layer does."""


class _Found(NamedTuple):
    flops: float
    kept: float
    in_forward: float
    in_backward: float
    calls: int
    """Of torch's operators in the forward."""


def layer_cost(
    blank: nn.Module, anatomy: Anatomy, index: int, hidden: int, positions: int, experts: tuple[int, int] | None
) -> Mapping[int, LayerCost]:
    """What the layer with this index costs, by bytes of an element. `blank` is the whole model on meta.

    `experts` are the routed ones and how many a token goes to. Raises what torch does for code that reads values.
    """
    found = {}
    for width, dtype in _WIDTHS.items():
        copied = deepcopy(blank).to(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            stage = ForeignStage(copied, anatomy, [Layer("decoder", index)])
            if experts is not None:
                _balance(stage, *experts)
            few = [_measured(stage, length, hidden, dtype).calls for length in _FEW]
            longest = max(4, min(_LONGEST if few[0] == few[1] else _LONGEST_LOOP, positions))
            lengths = longest // 4, longest // 2, longest
            measured = [_measured(stage, length, hidden, dtype) for length in lengths]
        flops, *held = (_fitted(lengths, [each[i] for each in measured]) for i in range(4))
        # Half of all pairs are masked: a token does not see those behind it.
        causal = Growth(0.0, flops.token + flops.constant / longest, flops.pair / 2)
        found[width] = LayerCost(causal, *held)
    return found


def router_logits(
    blank: nn.Module, anatomy: Anatomy, index: int, hidden: int, experts: tuple[int, int] | None
) -> RouterLogits:
    """What each router of the layer with this index records. `blank` is the whole model on meta.

    Raises as `layer_cost`, and CannotCut where that is not one number for each token and expert.
    """
    recorded = [_recorded(blank, anatomy, index, hidden, experts, cast) for cast in (False, True)]
    for each in recorded:
        if each.dim() != 3 or each.shape[1] != _SEQUENCES * _TOKENS:
            shape = list(each.shape[1:])
            message = f"the routers of {anatomy.layer(index)} record {shape} of {_SEQUENCES} x {_TOKENS} tokens"
            raise CannotCut(f"{message}: a hop carries [tokens, experts]")
    return RouterLogits(recorded[0].shape[2], *(each.dtype == torch.float32 for each in recorded))


def _recorded(
    blank: nn.Module, anatomy: Anatomy, index: int, hidden: int, experts: tuple[int, int] | None, cast: bool
) -> Tensor:
    """What leaves a layer beside its hidden state, without values: with 16-bit weights, or with products `cast`."""
    dtype = torch.float32 if cast else torch.bfloat16
    copied = deepcopy(blank).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        stage = ForeignStage(copied, anatomy, [Layer("decoder", index)])
        if experts is not None:
            _balance(stage, *experts)
        recorded: Tensor
        _, recorded = stage(torch.zeros(_SEQUENCES, _TOKENS, hidden, dtype=dtype))
    return recorded


def _measured(stage: ForeignStage, length: int, hidden: int, dtype: torch.dtype) -> _Found:
    """One forward and backward of one sequence."""
    for parameter in stage.canonical_parameters().values():
        parameter.grad = torch.zeros_like(parameter)  # that of a microbatch is added to it, and free
    (layer,) = stage.decoder_layers().values()
    counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION_ON_CPU: _attention_flops})
    live, kept, own = _Live(), dict[int, int](), {_storage(tensor) for tensor in _held(stage)}

    def run(state: Tensor, rest: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        outside = own | {_storage(tensor) for tensor in _tensors((rest, dict(named)))}

        def pack(tensor: Tensor) -> Tensor:
            if _storage(tensor) not in outside:
                kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor), live, counter:
            return layer(state, rest, named)

    stage.call_decoder_as([run])
    given = torch.zeros(1, length, hidden, dtype=dtype, requires_grad=True)
    output, *_ = stage(given)
    inside = sum(kept.values()) - kept.get(_storage(given), 0)
    forward, calls = live.peak, live.calls
    live.peak = 0
    live.storages.pop(_storage(output), None)  # a stage's output is a message, or the next layer's input
    gradient = torch.zeros_like(output)
    with live:
        output.backward(gradient)
    in_forward, in_backward = (max(0, peak - inside) for peak in (forward, live.peak))
    return _Found(counter.get_total_flops(), sum(kept.values()), in_forward, in_backward, calls)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _fitted(lengths: Sequence[int], values: Sequence[float]) -> Growth:
    """The parabola through three points; what is no growth is none."""
    matrix = torch.tensor([[1.0, n, n * n] for n in lengths], dtype=torch.float64)
    found = torch.linalg.solve(matrix, torch.tensor(values, dtype=torch.float64)).tolist()
    return Growth(
        *(
            0.0 if abs(each) < 1e-6 * max(1.0, *values) / lengths[-1] ** n else round(each, 6)
            for n, each in enumerate(found)
        )
    )


class _Live(TorchDispatchMode):
    """The most bytes at once of storages that were made inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(tensor) for tensor in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in _tensors(result):
            if _storage(tensor) not in given:
                storage = tensor.untyped_storage()
                self.storages[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: each for key, each in self.storages.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _held(stage: nn.Module) -> Iterator[Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _balance(stage: nn.Module, number: int, chosen: int) -> None:
    """Let every module that holds all experts' matrices compute as if each expert got equally many rows."""
    for module in stage.modules():
        own = [p for p in module._parameters.values() if p is not None and p.dim() == 3 and p.shape[0] == number]
        if len(own) == 2:
            module.forward = _balanced(own, chosen)


def _balanced(matrices: Sequence[Tensor], chosen: int) -> Any:
    """Two grouped products with what is between them, over `chosen` rows of each token."""

    def forward(states: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        spread = rows.repeat(chosen, 1)
        for matrix in matrices:
            one = matrix[0] if matrix.shape[1] == spread.shape[-1] else matrix[0].T
            if one.shape[0] != spread.shape[-1]:  # gate and up were one product
                gate, up = spread.chunk(2, dim=-1)
                spread = nn.functional.silu(gate) * up
                one = matrix[0] if matrix.shape[1] == spread.shape[-1] else matrix[0].T
            spread = spread @ one
        return (spread * spread.new_ones(spread.shape[0], 1)).view(chosen, *states.shape).sum(dim=0)

    return forward


def rough_cost(rows: Sequence[Parameter], hidden: int, active: int) -> Mapping[int, LayerCost]:
    """A layer whose code reads values: by its matrices, of which a token meets `active` elements.

    Every product keeps its input; scores are those of heads as wide as the residual stream together.
    """
    widths = sum(sum(row.shape[-2:]) for row in rows if row.is_matrix and len(row.shape) == 2)
    weights = max((row.size for row in rows if row.is_matrix), default=0)
    nothing = Growth(0.0, 0.0, 0.0)
    flops = Growth(0.0, 2.0 * active, 2.0 * hidden)
    return {
        width: LayerCost(
            flops,
            Growth(0.0, float(width * widths), 0.0),
            nothing,
            Growth(float(width * weights), 2.0 * width * hidden, 0.0),
        )
        for width in _WIDTHS
    }
