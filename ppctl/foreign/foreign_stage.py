"""A stage of a transformers model, with the interface that training needs (`model/stage_model.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError, Problem
from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.cut import cut_around, saved
from ppctl.foreign.cut_stage import CutStage, Departed, Forward
from ppctl.foreign.library import call, config_from, known_rows, make_model, recorded
from ppctl.foreign.peft_adapters import AdapterDropout, add_adapters, canonical
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.foreign_model import Anatomy, ForeignModel
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import WHOLE, Parameter, Parts, Role
from ppctl.model.dropout import Draws, name_key
from ppctl.model.initialize import Initialize, initial_value, initialize
from ppctl.model.packing import ROWS, Packing
from ppctl.model.stage_model import Run, StageModel
from ppctl.plan import StageSpec

_FILLED = "_is_hf_initialized"
"""An attribute of tensors that makes transformers' initialising functions skip them."""


class ForeignStage(CutStage, StageModel):
    """One stage of a transformers model: layers before the cut return the arrived tensor, the stage's last layer
    ends the forward.

    `model` is the whole model on meta (`library.make_model`). Parameters get memory on `device` without values; buffers
    that are not saved are made again by the model's own code. A tied head is a parameter of its own (decision 3). Other
    ranks share neither weights nor sequences with it: plans refuse these axes (`config/model_rules.py`).
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
        self.anatomy, self.adapted = anatomy, adapted
        self.embeds, self.ends = Layer("embedding") in layers, Layer("loss") in layers
        self.own = [layer.index for layer in layers if layer.kind == "decoder"]
        self._own_layers: dict[int, _OwnLayer] = {}
        self._arrived_logits: Sequence[Tensor] = ()
        self._draws: Draws | None = None
        super().__init__(model, cut_around(anatomy, layers), 1, torch.device(device), uses=anatomy.uses[1:])
        if adapted:
            self._names = {canonical(name): name for name in self._names}
            for name, module in self.model.named_modules():
                if isinstance(module, AdapterDropout):
                    module.key = torch.tensor(name_key(name.rpartition(".")[0]), device=device)
        _make_buffers(self.model, [name for name, _ in self.model.named_modules() if self.holds(name)])

    def forward(  # type: ignore[override]  # training calls its stages in its own way
        self,
        *inputs: Tensor,
        tokens: Tensor | None = None,
        packing: Packing = ROWS,
        beside: Mapping[str, Tensor] = MappingProxyType({}),
        hides: bool | None = None,
        packed: bool | None = None,
    ) -> tuple[Tensor, ...]:
        """Take token ids [b, s] or a hidden state [b, s, h]; return a hidden state or logits [b, s, vocabulary].

        If the model's own code adds to the loss (`anatomy.routers`), a hidden state comes with the logits that the
        routers of all layers before the cut recorded, [routers, b * s, experts], and in training the logits come with
        that part of the loss (a number). `beside` are named arguments of the model's forward on every stage: a mask,
        positions. `hides` says whether the mask hides tokens, `packed` whether positions restart within a row; with
        None the model's own code reads the tensors. Raises ValueError for `packing` with documents or positions: rows
        are whole sequences.
        """
        if packing.documents is not None or packing.positions is not None:
            raise ValueError("a transformers model takes whole rows, without documents or positions")
        given, *logits = inputs
        if not self.cut.parts[self.number]:
            return tuple(each.clone() for each in inputs)
        self._arrived_logits = [each for stacked in logits for each in stacked.unbind()]
        self._draws = packing.draws
        try:
            left = self._left(None if self.embeds else given, partial(self._called, given, beside, hides, packed))
        finally:
            self._arrived_logits = ()
        return left if isinstance(left, tuple) else (left,)

    def _called(
        self, given: Tensor, beside: Mapping[str, Tensor], hides: bool | None, packed: bool | None
    ) -> tuple[Tensor, ...]:
        """Run the whole model's forward and return its outputs; raises Departed at the cut after this stage."""
        # On other stages the embedding is an unread stand-in.
        begin = {"input_ids": given} if self.embeds else {"inputs_embeds": torch.zeros_like(given)}
        if self.adds_to_loss and self.ends:
            return call(self.model, **begin)
        packed = packed if "position_ids" in beside else False
        with known_rows(packed=packed, hides=hides):
            return (self.model(**begin, **beside, use_cache=False, return_dict=True).logits,)

    @property
    def adds_to_loss(self) -> bool:
        """Whether the model's own code adds to the loss."""
        return bool(self.anatomy.routers)

    @property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The head's weight, if it is trained here: the gradient of its result is large, [b, s, vocabulary]."""
        weight = self.model.get_parameter(f"{self.anatomy.head}.weight") if self.ends else None
        return () if weight is None or not weight.requires_grad else (weight,)

    def canonical_parameters(self) -> Mapping[str, nn.Parameter]:
        """This stage's trained parameters by the names that the whole model gives them."""
        return {name: each for name, each in self.all_parameters().items() if each.requires_grad}

    @property
    def frozen(self) -> Mapping[str, nn.Parameter]:
        """Untrained parameters by canonical name: weights beside adapters, and those that the model itself freezes."""
        return {name: each for name, each in self.all_parameters().items() if not each.requires_grad}

    def canonical_buffers(self) -> Mapping[str, Tensor]:
        """This stage's saved buffers, and weights that are not trained."""
        return {**{name: each.detach() for name, each in self.frozen.items()}, **super().canonical_buffers()}

    def parameter_rows(self) -> Mapping[str, Parameter]:
        """Names, shapes and roles, found by the kind of module and the number of dims; buffers included."""
        rows = {
            name: row_of(self.model, self.anatomy, self._names.get(name, name), self.adapted)._replace(name=name)
            for name in (*self.canonical_parameters(), *self.canonical_buffers())
        }
        return rows | {name: rows[name]._replace(gradient="none") for name in self.frozen}

    def decoder_layers(self) -> Mapping[Layer, nn.Module]:
        """The layers of this stage, each called as (hidden state, positional arguments, arguments by name, draws)."""
        return {Layer("decoder", index): layer for index, layer in self._own_layers.items()}

    def call_decoder_as(self, runs: Sequence[Run]) -> None:
        """From now on call each layer through its run. Raises ValueError unless there is one run for each layer."""
        if len(runs) != len(self.own):
            raise ValueError("a transformers model calls its layers one by one: several cannot be replaced by one")
        for index, run in zip(self.own, runs, strict=True):
            self._own_layers[index].run = run

    def _refuse_axes(self, *_: Any, **__: Any) -> None:
        """Raise ConfigError: a model's own code needs whole weights and sequences. Plans refuse this (PP-E103)."""
        message = "a model whose code is transformers' runs with whole weights and sequences"
        raise ConfigError(Problem("PP-E103", message, "tp=1 cp=1 ep=1 etp=1"))

    split_over = share_sequences = share_tokens = spread_experts = _refuse_axes

    # --- what is replaced --------------------------------------------------------------------------------------------

    def _index(self, name: str) -> int | None:
        inside = name.removeprefix(f"{self.anatomy.layers}.")
        return None if inside == name else int(inside)

    def _own(self, name: str, forward: Forward) -> Forward:
        """The forward of a module of this stage; layers are called through their runs (`call_decoder_as`), if set."""
        index = self._index(name)
        if index is None:
            return forward
        module = self.model.get_submodule(name)
        drops = [each for each in module.modules() if isinstance(each, AdapterDropout)]
        layer = _OwnLayer(forward, f"{name} ({type(module).__name__})", drops)
        self._own_layers[index] = layer

        def run(*arguments: Any, **named: Any) -> Any:
            state, rest = _hidden_state(arguments, named), arguments[1:]
            if index == 0 and self._arrived is not None:
                state = self._arrived
            others = {key: value for key, value in named.items() if key != "hidden_states"}
            output = (layer.run or layer)(state, rest, others, self._draws)
            if index == self.own[-1] and not self.ends:
                logits = recorded() if self.adds_to_loss else ()
                raise Departed(output[0] if self.anatomy.returned else output, *_stacked(logits))
            return output

        return run

    def _before(self, name: str, module: nn.Module) -> Forward:
        """The forward of a module of an earlier stage: a layer returns the arrived tensor."""
        index = self._index(name)
        if index is None:
            return _beside_embedding(module) if name != self.anatomy.embedding else module.forward

        def stand_in(*_: Any, **__: Any) -> Any:
            if index == 0:  # the logits of all earlier stages' routers, in the order of layers
                recorded().extend(self._arrived_logits)
            others = [None] * (self.anatomy.returned - 1)
            return (self._arrived, *others) if self.anatomy.returned else self._arrived

        return stand_in

    def _behind(self, *positional: Any, **named: Any) -> Any:
        """Raise Departed in place of a later stage's module, which only a stage without layers reaches."""
        raise Departed(_hidden_state(positional, named))


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
    """Build a stage on meta, give its parameters memory on `device` in `dtype`, and let `initialize` fill them. Raises
    LookupError if the installed transformers builds other parameters than the description says."""
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
    """A layer as recomputation calls it: a function of tensors by position. It owns no parameters."""

    def __init__(self, function: Forward, name: str, drops: Sequence[AdapterDropout]) -> None:
        super().__init__()
        self.function = function
        self.name = name
        self.drops = tuple(drops)
        self.run: Forward | None = None
        """The function that the stage calls instead of this module, if set (`call_decoder_as`)."""

    def forward(
        self, state: Tensor, arguments: tuple[Any, ...], named: Mapping[str, Any], draws: Draws | None = None
    ) -> Any:
        """Run the layer's own forward; a list that it returns becomes a tuple. A second run draws the same."""
        for each in self.drops:
            each.draws = draws
        output = self.function(state, *arguments, **named)
        return tuple(output) if isinstance(output, list) else output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in one graph. A call raises ConfigError (PP-E551) if the compiler refuses it."""
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


def row_of(model: nn.Module, anatomy: Anatomy, name: str, adapted: bool = False) -> Parameter:
    """The row of a parameter or saved buffer, by its name in the model; if `adapted`, frozen ones keep their roles."""
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
    """The role of a parameter: matrices decay; embeddings, norms and biases do not. The matrices that Muon updates are
    found by structure: weights of modules `inside` the layers, and stacks of experts' matrices."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if own.endswith("bias"):  # experts' biases have more dims: gate_up_proj_bias [experts, width]
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


def _stacked(router_logits: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len({(each.shape, each.dtype) for each in router_logits}) > 1:
        raise CannotCut("its routers record tensors of several shapes or dtypes, but a message carries one kind")
    return (torch.stack(tuple(router_logits)),) if router_logits else ()


def _hidden_state(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """A layer's hidden state, which is the first argument of a layer in every transformers model."""
    state: Tensor = arguments[0] if arguments else named["hidden_states"]
    return state


def _beside_embedding(module: nn.Module) -> Forward:
    """The forward of another stage's module that runs before the layers: its results are not read."""

    def forward(*arguments: Any, **named: Any) -> Tensor:
        given: Tensor = next(value for value in (*arguments, *named.values()) if isinstance(value, Tensor))
        if isinstance(module, nn.Embedding):
            return torch.zeros((), device=given.device, dtype=module.weight.dtype).expand(
                *given.shape, module.embedding_dim
            )
        return given

    return forward


@torch.no_grad()
def _make_buffers(model: nn.Module, names: Sequence[str]) -> None:
    """Let the model's own code make the unsaved buffers in these modules, such as rotary frequencies: by
    `_init_weights` of the buffer's module, or of the nearest module around it. All classes support this, since
    transformers builds on meta."""
    for module in model.modules():
        stand_ins = (each for each in vars(module).values() if isinstance(each, Tensor))
        for tensor in (*(each for _, each in saved(module)), *stand_ins):
            setattr(tensor, _FILLED, True)
    for name in names:
        if model.get_submodule(name)._non_persistent_buffers_set:
            _initializer(model, name)(model.get_submodule(name))
    for name in reversed(names):
        if any(map(_is_unset, model.get_submodule(name).modules())):
            _initializer(model, name)(model.get_submodule(name))


def _initializer(model: nn.Module, name: str) -> Callable[..., Any]:
    """`_init_weights` of the module with this name, or of the nearest module around it, as transformers chooses it."""
    while name and not hasattr(model.get_submodule(name), "_init_weights"):
        name = name.rpartition(".")[0]
    owner: Any = model.get_submodule(name)
    initialize: Callable[..., Any] = owner._init_weights
    return initialize


def _is_unset(module: nn.Module) -> bool:
    """Whether a module has an unsaved buffer with memory but without values."""
    buffers = [module._buffers.get(key) for key in module._non_persistent_buffers_set]
    if torch._C._len_torch_dispatch_stack():
        return False  # measured or rehearsed without values
    return any(b is not None and not hasattr(b, _FILLED) and bool(b.isnan().any()) for b in buffers)
