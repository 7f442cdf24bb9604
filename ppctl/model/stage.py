"""One stage of a decoder, built from its StageSpec: embedding, decoder layers, MTP, loss head, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ppctl.config.model_rules import turns_heads
from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.layers import KindName, Layer, cp_comm_type, holds_final_norm
from ppctl.geometry.rows import ONLY, WHOLE, Parameter, Parts, Place
from ppctl.model.attention import Attend, SelfAttention
from ppctl.model.dropout import Draws, Dropout, name_key
from ppctl.model.feed_forward import ExchangeRows, Experts, FeedForward, MixtureOfExperts
from ppctl.model.initialize import Initialize, initialize
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.layer import DecoderLayer
from ppctl.model.linear import Embedding, Linear, columns, make_weight
from ppctl.model.mtp import MultiTokenPrediction
from ppctl.model.norms import make_norm
from ppctl.model.packing import ROWS, Packing
from ppctl.model.rotary import Rotary
from ppctl.model.router import Router, SumOverTokens
from ppctl.model.split import TensorSplit
from ppctl.model.stage_model import Run
from ppctl.plan import StageSpec
from ppctl.sequence_halves import Halves
from ppctl.tensors.tensor_halves import own_halves


class StageModule(nn.Module):
    """The module of one stage. `layers` are in model order: embedding, decoder, mtp, loss.

    The module's own parameter names are the canonical global ones, whatever else is on the stage. The final norm is
    before the output; in a model with MTP, which reads normalised states, after the last decoder layer. Of every
    parameter it holds the part that `parts` say. Its methods are described where `StageModel` has them.
    """

    def __init__(
        self, layers: Sequence[Layer], model: ModelConfig, parts: Parts = WHOLE, kernels: Kernels = ON_CPU
    ) -> None:
        super().__init__()
        h, moe = model.hidden_size, moe_layer_pattern(model)
        self.parts = parts
        self.experts = parts.experts(model.num_moe_experts or 0)
        self.model = model
        self.split: TensorSplit | None = None
        self.context = ONLY
        embeds, learned = Layer("embedding") in layers, model.position_embedding_type == "learned_absolute"
        self.tok_embeddings = Embedding(model.vocab_size, h) if embeds else None
        self.position_embeddings = Embedding(model.max_position_embeddings, h) if embeds and learned else None
        self.after_embedding = Dropout(model.hidden_dropout)
        self.layers = nn.ModuleDict(
            {id_: DecoderLayer(model, moe=moe[int(id_)], kernels=kernels) for id_ in _ids("decoder", layers)}
        )
        self._runs: Sequence[Run] = list(self.layers.values())
        self.norm = make_norm(model, h) if holds_final_norm(model, layers) else None
        modules = _ids("mtp", layers)
        self.mtp = MultiTokenPrediction(model, modules, kernels) if modules else None
        self.output = Linear(h, model.vocab_size) if Layer("loss") in layers else None
        self.rotary = Rotary(model) if turns_heads(model) else None
        self.drops = bool(model.hidden_dropout or model.attention_dropout)
        self._rows = stage_parameters(model, layers)
        self._keep_own_parts()
        self._compare()

    def forward(self, *inputs: Tensor, tokens: Tensor | None = None, packing: Packing = ROWS) -> tuple[Tensor, ...]:
        """Run the stage on token ids [b, s] (int64) if it owns the embedding, else on hidden states [b, s, h].

        Token ids and `packing` cover whole rows, even if ranks share rows; hidden states cover a rank's own tokens. A
        stage with MTP modules and no embedding needs `tokens` as well; `packing` tells layers where documents end. From
        the first MTP module on there are several hidden states: the decoder's, then one per module. Returns hidden
        states, or logits [b, s, vocab_size] if the stage owns the loss: always new tensors, also from an empty
        stage, so that input and output are two nodes of the graph (one may be freed without the other).
        Raises ValueError if a model with dropout is trained without `packing.draws`.
        """
        if self.drops and packing.draws is None and torch.is_grad_enabled():
            raise ValueError("training a model with dropout needs Packing.draws, on which its draws depend")
        x, *others = inputs
        length = x.shape[1] if self.tok_embeddings is not None else self._length(x)
        positions = self._positions(length, packing.positions, x.device)
        draws = self._own_draws(packing.draws, length)
        if self.tok_embeddings is not None:
            tokens, x = x, self.after_embedding(self._embed(x, positions), draws)
        if self.layers or self.mtp is not None:
            turns = None if self.rotary is None else self.rotary.turns(x, length, positions)
            places = (turns, packing.documents, draws)
            for run in self._runs:
                x = run(x, *places)
        if self.norm is not None:
            x = self.norm(x)
        if self.mtp is not None:
            others.extend(self.mtp(x, tokens, *places))
        if self.output is not None:
            return tuple(columns(state, self.output, split=self.split)[0] for state in (x, *others))
        return tuple(state.clone() if any(state is given for given in inputs) else state for state in (x, *others))

    def _embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Rows for token ids [b, s], plus the positions' rows if positions are learned."""
        assert self.tok_embeddings is not None
        x: Tensor = self.tok_embeddings(self._own_halves(tokens))
        if self.position_embeddings is None:
            return x
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        learned: Tensor = self.position_embeddings(self._own_run(positions))
        return x + learned

    def _length(self, x: Tensor) -> int:
        """The tokens of a whole row, if the hidden state `x` [b, s, h] has this rank's own tokens of it."""
        return x.shape[1] * self.context.size * (self.split.size if self.split and self.split.sequence else 1)

    def _positions(self, length: int, given: Tensor | None, device: torch.device) -> Tensor | None:
        """The positions [b or 1, s] (int64) of the tokens in this rank's attention; None: 0 to s - 1."""
        if self.context.size == 1:
            return given
        return self._own_halves(torch.arange(length, device=device)[None] if given is None else given)

    def _own_halves(self, x: Tensor) -> Tensor:
        """This context-parallel rank's part of x [b, s]."""
        if self.context.size == 1:
            return x
        return own_halves(x, Halves(self.context.rank, self.context.size, x.shape[1]), 1)

    def _own_run(self, x: Tensor) -> Tensor:
        """The part of x [b, s] for the tokens that this rank has between blocks."""
        if self.split is None or not self.split.sequence:
            return x
        return x.chunk(self.split.size, dim=1)[self.split.rank]

    def _own_draws(self, draws: Draws | None, length: int) -> Draws | None:
        """`draws`, with the positions of the rank's own tokens in their row."""
        if draws is None or (self.split is None and self.context.size == 1):
            return draws
        positions = torch.arange(length, device=draws.samples.device)[None]
        return draws._replace(positions=self._own_run(self._own_halves(positions))[0])

    def name_dropouts(self, device: torch.device | str) -> None:
        """Let every dropout draw by its canonical name."""
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.key = torch.tensor(name_key(name), device=device)

    def canonical_parameters(self) -> dict[str, nn.Parameter]:
        """The module's own names are the canonical ones."""
        return dict(self.named_parameters())

    def canonical_buffers(self) -> dict[str, Tensor]:
        """The biases of the routers, which are trained without a gradient."""
        return dict(self.named_buffers())

    def parameter_rows(self) -> Mapping[str, Parameter]:
        """The rows of `geometry/parameters.py` by canonical name."""
        return self._rows

    def routers(self) -> tuple[Router, ...]:
        """The routers of the layers, in canonical order."""
        return tuple(module for module in self.modules() if isinstance(module, Router))

    def spread_experts(self, exchange: ExchangeRows) -> None:
        """Reach the experts of every layer through `exchange`."""
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.exchange = exchange

    def split_over(self, split: TensorSplit) -> None:
        """Exchange with the ranks that have the other parts, in every block."""
        self.split = split
        for module in self.modules():
            if isinstance(module, SPLIT) and module is not self.position_embeddings:
                module.split = split

    def share_sequences(self, place: Place, ways: Mapping[str, Attend]) -> None:
        """Give this stage only `place`'s tokens of every sequence, before its first forward; each layer reaches the
        other tokens in the one of `ways` that its `cp_comm_type` names."""
        self.context = place
        for layer, module in self.decoder_layers().items():
            attention = module.get_submodule("attention")
            assert isinstance(attention, SelfAttention)
            attention.shared = ways[cp_comm_type(self.model, layer)]
        if self.mtp is not None:
            self.mtp.own = self._own_halves

    def share_tokens(self, others: SumOverTokens) -> None:
        """Count the tokens of other ranks in the auxiliary losses of all routers."""
        for router in self.routers():
            router.others = others

    def decoder_layers(self) -> dict[Layer, nn.Module]:
        """The decoder layers, and those inside MTP modules as `mtp.N`."""
        layers = {Layer("decoder", int(name)): module for name, module in self.layers.items()}
        if self.mtp is not None:
            layers |= {Layer("mtp", int(name)): self.mtp.get_submodule(f"{name}.layer") for name in self.mtp.ids}
        return layers

    asks = True
    adds_to_loss = False

    @property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The output projection, because its result's gradient is [b, s, vocab_size]; and the experts' weights if a
        kernel from outside multiplies them, because autograd computes their gradients in I."""
        outside = [module for module in self.modules() if isinstance(module, Experts) and module.grouped]
        stacks = [parameter for module in outside for parameter in module.parameters()]
        return (*stacks,) if self.output is None else (self.output.weight, *stacks)

    def call_decoder_as(self, runs: Sequence[Run]) -> None:
        """Call the decoder layers through `runs` from now on."""
        self._runs = runs

    def _keep_own_parts(self) -> None:
        """Replace every parameter that is split here by one with the shape of the rank's part."""
        for name, parameter in self.canonical_parameters().items():
            row = self._rows.get(name)
            if row is None or tuple(parameter.shape) != WHOLE.shape(row):
                continue  # it has the rank's shape, or a wrong one
            if (shape := self.parts.shape(row)) != tuple(parameter.shape):
                owner, _, own = name.rpartition(".")
                setattr(self.get_submodule(owner), own, make_weight(*shape))

    def _compare(self) -> None:
        """Raise LookupError if the parameters are not the table's, which counts, norms and checkpoints read."""
        shapes = {name: self.parts.shape(row) for name, row in self._rows.items()}
        tensors: dict[str, Tensor] = {**self.canonical_parameters(), **self.canonical_buffers()}
        built = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wrong = [
            f"{name} is {built.get(name, 'not there')} in ppctl/model and {shapes.get(name, 'no row')} in the table"
            for name in built | shapes
            if built.get(name) != shapes.get(name)
        ]
        order = [name for name, row in self._rows.items() if row.gradient != "none"]
        if not wrong and list(self.canonical_parameters()) != order:
            wrong = ["parameters are in another order in ppctl/model than in the table"]
        if wrong:
            raise LookupError("; ".join([*wrong, "the table is in ppctl/geometry/parameters.py"]))


SPLIT = (SelfAttention, FeedForward, Embedding)
"""The blocks that exchange columns with other ranks."""


def _ids(kind: KindName, layers: Sequence[Layer]) -> list[str]:
    return [str(layer.index) for layer in layers if layer.kind == kind]


def build_stage(
    spec: StageSpec,
    model: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parts: Parts = WHOLE,
    initialize: Initialize = initialize,
    kernels: Kernels = ON_CPU,
) -> StageModule:
    """Build a stage with these `parts`, give it memory on `device` in `dtype`, and let `initialize` fill it."""
    module = _given_memory(meta_stage(spec.layers, model, parts, kernels), dtype, device)
    initialize(module.canonical_parameters(), model, seed, parts)
    for router in module.routers():
        router.reset_bias(device)
    module.name_dropouts(device)
    return module


def meta_stage(
    layers: Sequence[Layer], model: ModelConfig, parts: Parts = WHOLE, kernels: Kernels = ON_CPU
) -> StageModule:
    """A stage whose parameters have shapes but no memory."""
    with torch.device("meta"):
        return StageModule(layers, model, parts, kernels)


def _given_memory(module: StageModule, dtype: torch.dtype, device: torch.device | str) -> StageModule:
    """`module.to(dtype).to_empty(device=device)`, without importing sympy as these two do."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=device)

    apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], StageModule] = module._apply
    return apply(empty)
