"""One stage of a decoder, built from its StageSpec: embedding, decoder layers, MTP, loss head, or nothing.

Knows which modules a stage's layers stand for and their canonical order. Must not know pp, vpp, ranks' neighbours,
the schedule or the optimizer: a stage's weights and outputs depend on its layers and the model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ppctl.config.model_rules import turns_heads
from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.layers import KindName, Layer, holds_final_norm
from ppctl.geometry.moe_layer_freq import moe_layer_pattern
from ppctl.geometry.parameters import Parameter
from ppctl.model.dropout import Dropout, name_key
from ppctl.model.feed_forward import ExchangeRows, MixtureOfExperts
from ppctl.model.initialize import Initialize, initialize
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.layer import DecoderLayer
from ppctl.model.linear import Embedding, Linear, make_weight
from ppctl.model.mtp import MultiTokenPrediction
from ppctl.model.norms import make_norm
from ppctl.model.packing import ROWS, Packing
from ppctl.model.rotary import Rotary
from ppctl.model.router import Router
from ppctl.model.stage_model import Run
from ppctl.plan import StageSpec


class StageModule(nn.Module):
    """What one stage computes. `layers` are in model order: embedding, decoder, mtp, loss.

    The module's own parameter names are the canonical global ones, whatever else is on the stage. The final norm is
    before the output; in a model with MTP, which reads normalised states, after the last decoder layer. Of the routed
    experts only `experts` are kept (None: all). Its methods are described where `StageModel` has them.
    """

    def __init__(
        self, layers: Sequence[Layer], model: ModelConfig, experts: range | None = None, kernels: Kernels = ON_CPU
    ) -> None:
        super().__init__()
        h, moe = model.hidden_size, moe_layer_pattern(model)
        self.experts = range(model.num_moe_experts or 0) if experts is None else experts
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
        self._keep_own_experts()
        self._compare()

    def forward(self, *inputs: Tensor, tokens: Tensor | None = None, packing: Packing = ROWS) -> tuple[Tensor, ...]:
        """Token ids [b, s] (int64) where the stage owns the embedding, else hidden states [b, s, h], through the stage.

        A stage with MTP modules and no embedding needs `tokens` as well; `packing` tells layers where documents end.
        From the first MTP module on there are several hidden states: the decoder's, then one per module. Returns hidden
        states, or logits [b, s, vocab_size] where the stage owns the loss: always new tensors, also from an empty
        stage, so that input and output are two nodes of the graph (one may be freed without the other).
        """
        if self.drops and packing.draws is None and torch.is_grad_enabled():
            raise ValueError("a model with dropout is trained with Packing.draws: what its draws depend on")
        x, *others = inputs
        if self.tok_embeddings is not None:
            tokens, x = x, self.after_embedding(self._embed(x, packing), packing.draws)
        if self.layers or self.mtp is not None:
            tables = (None, None) if self.rotary is None else self.rotary.tables(x, packing.positions)
            places = (*tables, packing.documents, packing.draws)
            for run in self._runs:
                x = run(x, *places)
        if self.norm is not None:
            x = self.norm(x)
        if self.mtp is not None:
            others.extend(self.mtp(x, tokens, *places))
        if self.output is not None:
            return tuple(self.output(state) for state in (x, *others))
        return tuple(state.clone() if any(state is given for given in inputs) else state for state in (x, *others))

    def _embed(self, tokens: Tensor, packing: Packing) -> Tensor:
        """Rows for token ids [b, s], plus those of their positions where these are learned."""
        assert self.tok_embeddings is not None
        x: Tensor = self.tok_embeddings(tokens)
        if self.position_embeddings is None:
            return x
        counted = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = x + self.position_embeddings(counted if packing.positions is None else packing.positions)
        return x

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

    def decoder_layers(self) -> dict[Layer, nn.Module]:
        """The decoder layers, and those inside MTP modules as `mtp.N`."""
        found = {Layer("decoder", int(name)): module for name, module in self.layers.items()}
        if self.mtp is not None:
            found |= {Layer("mtp", int(name)): self.mtp.get_submodule(f"{name}.layer") for name in self.mtp.ids}
        return found

    asks = True

    @property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The output projection: the gradient of its result is [b, s, vocab_size]."""
        return () if self.output is None else (self.output.weight,)

    def call_decoder_as(self, runs: Sequence[Run]) -> None:
        """Call the decoder layers through `runs` from now on."""
        self._runs = runs

    def _keep_own_experts(self) -> None:
        """Replace every whole stack of experts for one of as many as are kept here."""
        for name, row in self._rows.items():
            if row.experts > len(self.experts):
                owner, _, stack = name.rpartition(".")
                setattr(self.get_submodule(owner), stack, make_weight(len(self.experts), *row.shape))

    def _compare(self) -> None:
        """Refuse to be built of other parameters than the table has: counts, norms and checkpoints read that."""
        count = len(self.experts)
        shapes = {name: (count, *row.shape) if row.experts else row.shape for name, row in self._rows.items()}
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


def _ids(kind: KindName, layers: Sequence[Layer]) -> list[str]:
    """The indexes of the layers of a kind, as names of modules."""
    return [str(layer.index) for layer in layers if layer.kind == kind]


def experts_of(model: ModelConfig, rank: int, size: int) -> range:
    """The routed experts of one of `size` ranks that share them: equal runs of neighbours."""
    count = (model.num_moe_experts or 0) // size
    return range(rank * count, (rank + 1) * count)


def build_stage(
    spec: StageSpec,
    model: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    experts: range | None = None,
    initialize: Initialize = initialize,
    kernels: Kernels = ON_CPU,
) -> StageModule:
    """Build a stage without weights, give it memory on `device` in `dtype`, and let `initialize` fill it.

    Of the routed experts it holds `experts`, by default all. `kernels` suit the device; the default suits a CPU.
    """
    module = _given_memory(meta_stage(spec.layers, model, experts, kernels), dtype, device)
    initialize(module.canonical_parameters(), model, seed, module.experts)
    for router in module.routers():
        router.reset_bias(device)
    module.name_dropouts(device)
    return module


def meta_stage(
    layers: Sequence[Layer], model: ModelConfig, experts: range | None = None, kernels: Kernels = ON_CPU
) -> StageModule:
    """A stage whose parameters have shapes but no memory."""
    with torch.device("meta"):
        return StageModule(layers, model, experts, kernels)


def _given_memory(module: StageModule, dtype: torch.dtype, device: torch.device | str) -> StageModule:
    """`module.to(dtype).to_empty(device=device)`, without sympy, which that imports."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype, device=device)

    apply: Callable[[Callable[[torch.Tensor], torch.Tensor]], StageModule] = module._apply
    return apply(empty)
