"""A stage of a model of transformers: the model's whole forward, in which only what lies beyond the cut is replaced.

Knows how modules of other stages stand in for themselves, what training asks of a stage (`model/stage_model.py`), and
how a description becomes a stage with initial weights. Must not know families, files or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem
from ppctl.foreign.adapters import add_adapters, canonical
from ppctl.foreign.anatomy import CannotCut, further_names
from ppctl.foreign.library import call, config_from, make_model, mask_hides, recorded, rows_are_packed, rows_are_whole
from ppctl.foreign.stage_memory import give_memory, make_buffers
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.foreign_model import Anatomy, ForeignModel
from ppctl.geometry.layers import Layer
from ppctl.geometry.parts import WHOLE, Parts
from ppctl.geometry.rows import Parameter, Role
from ppctl.model.initialize import Initialize, initial_value, initialize
from ppctl.model.packing import ROWS, Packing
from ppctl.model.stage_model import Run, StageModel
from ppctl.plan import StageSpec

Forward = Callable[..., Any]


class _Departed(Exception):
    """Ends a forward at the cut behind a stage: nothing that follows belongs to it."""

    def __init__(self, state: Tensor, router_logits: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.state, self.router_logits = state, router_logits


class ForeignStage(nn.Module, StageModel):
    """One stage of a model, which is called as a whole.

    `model` is the whole model on meta (`library.make_model`), which the stage keeps and changes. Parameters of this
    stage get memory on `device` without values; those of others are one number each, spread over their shape, so that
    code which reads a dtype, a device or a shape finds them. A layer before the cut returns what arrived, the last
    layer of the stage ends the forward. Buffers that are not saved are made again by the model's own code. Names are
    those of the whole model; a tied head is a parameter of its own (decision 3). Other ranks share neither weights nor
    sequences with it: plans refuse these axes (`config/model_rules.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        layers: Sequence[Layer],
        device: torch.device | str = "cpu",
        *,
        adapted: bool = False,
    ) -> None:
        super().__init__()
        self.anatomy = anatomy
        self.embeds, self.ends = Layer("embedding") in layers, Layer("loss") in layers
        self.own = [layer.index for layer in layers if layer.kind == "decoder"]
        self.empty = not layers
        self._arrived: Tensor | None = None
        self._arrived_logits: Sequence[Tensor] = ()
        self._beside: Mapping[str, Tensor] = {}
        self._known: tuple[bool | None, bool | None] = None, None
        self.model = model
        untie(model, anatomy)
        shared = further_names(model)
        for name, module in model.named_modules():
            give_memory(module, torch.device(device), owned=self._holds(name))
        for name, owner in shared.items():
            path, _, key = name.rpartition(".")
            model.get_submodule(path)._parameters[key] = model.get_parameter(owner)
        make_buffers(model, [name for name, _ in model.named_modules() if self._holds(name)])
        held = [name for name, _ in model.named_parameters() if self._holds(name.rpartition(".")[0])]
        self._names = {canonical(name): name for name in held} if adapted else {name: name for name in held}
        """Canonical name -> the module's own, which differs beside adapters."""
        self.adapted = adapted
        self._own_layers = {index: _own_layer(self._layer(index), anatomy.layer(index)) for index in self.own}
        self._connect()

    def forward(
        self,
        *inputs: Tensor,
        tokens: Tensor | None = None,
        packing: Packing = ROWS,
        beside: Mapping[str, Tensor] = MappingProxyType({}),
        hides: bool | None = None,
        packed: bool | None = None,
    ) -> tuple[Tensor, ...]:
        """As `StageModel`: token ids [b, s] or hidden state [b, s, h] in, hidden state or logits [b, s, words] out.

        Where the model's own code adds to the loss (`anatomy.routers`), a hidden state has beside it what the routers
        of all layers before the cut recorded, [routers, b * s, experts], if there are any; and the logits, in training,
        that further part of the loss (a number). Rows are whole sequences: `packing` with documents or positions is
        refused. `beside` is what the model's forward gets by name on every stage: a mask, positions. `hides` says
        whether the mask hides tokens, `packed` whether positions begin anew within a row, where somebody knows: the
        model's own code reads both otherwise.
        """
        if packing.documents is not None or packing.positions is not None:
            raise ValueError("a model of transformers takes whole rows, without documents or positions")
        given, *logits = inputs
        if self.empty:
            return tuple(each.clone() for each in inputs)
        self._arrived, self._beside = None if self.embeds else given, beside
        self._known = hides, packed if "position_ids" in beside else False
        self._arrived_logits = [each for stacked in logits for each in stacked.unbind()]
        try:
            return self._called(given)
        except _Departed as departed:
            state = departed.state
            outputs = (state.clone() if state is given else state,)
            return (*outputs, _stacked(departed.router_logits)) if departed.router_logits else outputs
        finally:
            self._arrived, self._arrived_logits, self._beside = None, (), {}

    def _called(self, given: Tensor) -> tuple[Tensor, ...]:
        """What the whole model returns; raises _Departed at the cut behind this stage."""
        if self.adds_to_loss and self.ends:
            logits, added = call(self.model, **self._begin(given))
            return (logits,) if added is None else (logits, added)
        hides, packed = self._known
        documents = nullcontext() if packed is None else rows_are_packed() if packed else rows_are_whole()
        with documents, nullcontext() if hides is None else mask_hides(some=hides):
            given_to_all = {**self._begin(given), **self._beside}
            return (self.model(**given_to_all, use_cache=False, return_dict=True).logits,)

    @property
    def adds_to_loss(self) -> bool:
        """Whether the model's own code adds to the loss."""
        return bool(self.anatomy.routers)

    @property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The head's weight: the gradient of its result is [b, s, words]."""
        trained = self.ends and not self.adapted
        return (self.model.get_parameter(f"{self.anatomy.head}.weight"),) if trained else ()

    def canonical_parameters(self) -> Mapping[str, nn.Parameter]:
        """By the names that the whole model gives them."""
        return {name: found for name, found in self._all().items() if found.requires_grad}

    @property
    def frozen(self) -> Mapping[str, nn.Parameter]:
        """What is not trained, by canonical name: weights beside adapters, and what the model's own code leaves."""
        return {name: found for name, found in self._all().items() if not found.requires_grad}

    def _all(self) -> dict[str, nn.Parameter]:
        return {name: self.model.get_parameter(own) for name, own in self._names.items()}

    def canonical_buffers(self) -> Mapping[str, Tensor]:
        """The buffers of this stage that a state dict has, and weights that are not trained."""
        saved = {
            f"{path}.{key}": buffer
            for path, module in self.model.named_modules()
            if self._holds(path)
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        }
        return {**{name: found.detach() for name, found in self.frozen.items()}, **saved}

    def parameter_rows(self) -> Mapping[str, Parameter]:
        """Names, shapes and roles, told by the kind of module and the number of dims; buffers included."""
        rows = {
            name: row_of(self.model, self.anatomy, self._names.get(name, name), self.adapted)._replace(name=name)
            for name in (*self.canonical_parameters(), *self.canonical_buffers())
        }
        return rows | {name: rows[name]._replace(gradient="none") for name in self.frozen}

    def decoder_layers(self) -> Mapping[Layer, nn.Module]:
        """The layers of this stage; each is called as (hidden state, positional arguments, arguments by name)."""
        return {Layer("decoder", index): layer for index, layer in self._own_layers.items()}

    def call_decoder_as(self, runs: Sequence[Run]) -> None:
        """Call each layer through its run from now on: one run for each, in order."""
        if len(runs) != len(self.own):
            raise ValueError("a model of transformers calls its layers one by one: several cannot be replaced by one")
        for index, run in zip(self.own, runs, strict=True):
            self._own_layers[index].run = run

    def _refuse_axes(self, *_: Any, **__: Any) -> None:
        """Refused: the model's own code computes with whole weights and sequences. Plans say so before (PP-E103)."""
        message = "a model whose code is transformers' runs with whole weights and sequences"
        raise ConfigError(Problem("PP-E103", message, "tp=1 cp=1 ep=1 etp=1"))

    split_over = share_sequences = share_tokens = spread_experts = _refuse_axes

    # --- what is replaced --------------------------------------------------------------------------------------------

    def _layer(self, index: int) -> nn.Module:
        return self.model.get_submodule(self.anatomy.layer(index))

    def _holds(self, path: str) -> bool:
        """Whether the module with this name computes on this stage; what has no weights does on every one."""
        inside = path.removeprefix(f"{self.anatomy.layers}.")
        if inside != path:
            return int(inside.split(".")[0]) in self.own
        return not ((path in self.anatomy.first and not self.embeds) or (path in self.anatomy.last and not self.ends))

    def _begin(self, given: Tensor) -> dict[str, Tensor]:
        """What the model's forward starts from: token ids, or a stand-in for their embedding."""
        if self.embeds:
            return {"input_ids": given}
        return {"inputs_embeds": torch.zeros_like(given)}

    def _connect(self) -> None:
        """Replace the forwards of what other stages hold, and of the layers on both sides of the cuts."""
        for index in range(self.anatomy.count):
            layer: Any = self._layer(index)
            layer.forward = self._calling(index) if index in self.own else self._standing_in(index)
        for name in () if self.embeds else self.anatomy.first:
            if name != self.anatomy.embedding:
                module: Any = self.model.get_submodule(name)
                module.forward = _beside_embedding(module)

    def _standing_in(self, index: int) -> Forward:
        """The forward of a layer of another stage."""

        def forward(*arguments: Any, **named: Any) -> Any:
            if self._arrived is None:  # this stage has the embedding and no layer
                raise _Departed(_hidden_state(arguments, named))
            if index == 0:  # what all routers of earlier stages recorded, in the order of layers
                recorded().extend(self._arrived_logits)
            return self._returned(self._arrived)

        return forward

    def _calling(self, index: int) -> Forward:
        """The forward of an own layer, through whatever stands for it (`call_decoder_as`)."""
        layer, leaves = self._own_layers[index], index == self.own[-1] and not self.ends

        def forward(*arguments: Any, **named: Any) -> Any:
            state, rest = _hidden_state(arguments, named), arguments[1:]
            if index == 0 and self._arrived is not None:
                state = self._arrived
            others = {key: value for key, value in named.items() if key != "hidden_states"}
            output = (layer.run or layer)(state, rest, others)
            if leaves:
                logits = list(recorded()) if self.adds_to_loss else ()
                raise _Departed(output[0] if self.anatomy.returned else output, logits)
            return output

        return forward

    def _returned(self, state: Tensor) -> Any:
        """A hidden state in the form in which this model's layers return it."""
        return (state, *[None] * (self.anatomy.returned - 1)) if self.anatomy.returned else state


def build_foreign_stage(
    spec: StageSpec,
    model: ModelConfig,
    foreign: ForeignModel,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parts: Parts = WHOLE,
    initialize: Initialize = initialize,
) -> ForeignStage:
    """Build a stage on meta, give what it owns memory on `device` in `dtype`, and let `initialize` fill it.

    Raises LookupError where the installed transformers builds other parameters than the description says.
    """
    whole = make_model(config_from(foreign.config), "meta", dtype).train()
    if foreign.adapters is not None:
        whole = add_adapters(whole, foreign.adapters, foreign.anatomy, dtype)
    stage = ForeignStage(whole, foreign.anatomy, spec.layers, device, adapted=foreign.adapters is not None)
    rows = {row.name: row for row in stage.parameter_rows().values()}
    expected = stage_parameters(model, spec.layers)
    built, described = ({name: row.shape for name, row in each.items()} for each in (rows, expected))
    wrong = sorted(name for name in built | described if built.get(name) != described.get(name))
    if wrong:
        message = (
            f"the installed transformers builds other parameters than {foreign.transformers}, which described the model"
        )
        raise LookupError(f"{message}: {', '.join(wrong[:5])}")
    initialize({**stage.frozen, **stage.canonical_parameters()}, model, seed, parts)
    with torch.no_grad():
        for name, buffer in stage.canonical_buffers().items():
            if name in stage.frozen:
                continue
            buffer.copy_(initial_value(name, model, seed))
    return stage


class _OwnLayer(nn.Module):
    """A layer as recompute and others see it: a function of tensors by position. It owns no parameters."""

    def __init__(self, function: Forward, name: str) -> None:
        super().__init__()
        self.function = function
        self.name = name
        self.run: Forward | None = None
        """What is called in its place."""

    def forward(self, state: Tensor, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The layer's own forward."""
        output = self.function(state, *arguments, **named)
        return tuple(output) if isinstance(output, list) else output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, in one graph. A call raises ConfigError (PP-E551) where the compiler refuses it."""
        super().compile(*args, fullgraph=True, **kwargs)
        compiled: Any = self._compiled_call_impl

        def call(*inputs: Any) -> Any:
            try:
                return compiled(*inputs)
            except torch._dynamo.exc.TorchDynamoException as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                message = f"{self.name} cannot be compiled: {reason}"
                raise ConfigError(Problem("PP-E551", message, "train.compile=false")) from error

        self._compiled_call_impl = call


def _own_layer(layer: nn.Module, name: str) -> _OwnLayer:
    return _OwnLayer(layer.forward, f"{name} ({type(layer).__name__})")


def row_of(model: nn.Module, anatomy: Anatomy, name: str, adapted: bool = False) -> Parameter:
    """The row of a parameter or saved buffer of a model, by its name there; `adapted` says that weights are frozen."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in module._buffers:
        return Parameter(name, tuple(model.get_buffer(name).shape), "correction", gradient="none")
    shape = tuple(model.get_parameter(name).shape)
    if not adapted and not model.get_parameter(name).requires_grad:
        return Parameter(name, shape, "correction", gradient="none")
    if name in anatomy.uses[1:]:
        return Parameter(name, shape, "embedding", copy_of=anatomy.uses[0])
    return Parameter(name, shape, _role(module, own, len(shape), inside=anatomy.place(name) == 1))


def _role(module: nn.Module, own: str, dims: int, *, inside: bool) -> Role:
    """What optimizers and the norm have to know: matrices decay, embeddings, norms and biases do not.

    Muon's, by structure: what a module `inside` the layers calls its weight, and stacks of experts' matrices.
    """
    if isinstance(module, nn.Embedding):
        return "embedding"
    if own.endswith("bias"):  # experts have one for each: gate_up_proj_bias [experts, width]
        return "bias"
    if dims == 1:
        return "norm"
    filters = isinstance(module, nn.modules.conv._ConvNd)
    hidden = inside and not filters and (dims == 3 or (dims == 2 and own == "weight"))
    return "matrix" if hidden else "other"


def untie(model: nn.Module, anatomy: Anatomy) -> None:
    """Give a tied head a parameter of its own, with the same values."""
    if anatomy.tied:
        weight = model.get_parameter(f"{anatomy.embedding}.weight")
        model.get_submodule(anatomy.head).weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def _stacked(router_logits: Sequence[Tensor]) -> Tensor:
    if len({(each.shape, each.dtype) for each in router_logits}) > 1:
        raise CannotCut("its routers record tensors of several shapes or dtypes, but a message carries one kind")
    return torch.stack(tuple(router_logits))


def _hidden_state(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """What a layer gets from the one before: its first argument in every model of transformers."""
    state: Tensor = arguments[0] if arguments else named["hidden_states"]
    return state


def _beside_embedding(module: nn.Module) -> Forward:
    """The forward of a module that runs before the layers of another stage: nobody reads what it returns."""

    def forward(*arguments: Any, **named: Any) -> Tensor:
        given: Tensor = next(value for value in (*arguments, *named.values()) if isinstance(value, Tensor))
        if isinstance(module, nn.Embedding):
            return torch.zeros((), device=given.device, dtype=module.weight.dtype).expand(
                *given.shape, module.embedding_dim
            )
        return given

    return forward
