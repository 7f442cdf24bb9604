"""The protocol of a stage's module: all that training, checkpoints, recompute and the compiler ask of it.

ppctl's own decoder meets it (`ppctl.model.stage`). A model of another origin meets it by inheriting from `StageModel`
beside `nn.Module`: only the abstract methods have to be written, the others report that the model has nothing of the
kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ppctl.geometry.canonical_names import expert_name
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import Parameter, Place
from ppctl.model.attention import Attend
from ppctl.model.feed_forward import ExchangeRows
from ppctl.model.packing import ROWS, Packing
from ppctl.model.router import Router, SumOverTokens
from ppctl.model.split import TensorSplit

Run = Callable[..., Tensor]
"""One layer, or several neighbours called as one: (x, *what every layer takes) -> x."""


class StageModel(Protocol):
    """The module of one stage. Names are canonical: global, and the same in every cut."""

    @abstractmethod
    def __call__(self, *inputs: Tensor, tokens: Tensor | None = None, packing: Packing = ROWS) -> tuple[Tensor, ...]:
        """The stage's outputs for one microbatch: new tensors, even if the stage changes nothing.

        The first stage gets token ids [b, s] (int64), every other one the tensors of its edge. `tokens` are the token
        ids again, for stages with an embedding or MTP modules; `packing` says where documents end. The last stage
        returns logits [b, s, vocab_size], and further ones for each MTP module. Training computes the loss from them,
        and then overwrites them with their gradient, unless autograd keeps them for the stage's own backward.
        """

    @abstractmethod
    def canonical_parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name, in canonical order; each use of a shared parameter under a name of its own."""

    @abstractmethod
    def parameter_rows(self) -> Mapping[str, Parameter]:
        """The row of each parameter and each buffer by name: role, weight decay, experts, whose copy it is."""

    @abstractmethod
    def train(self, mode: bool = True, /) -> Any:
        """Enter training mode or, with False, evaluation mode, as `nn.Module` does."""

    def canonical_buffers(self) -> Mapping[str, Tensor]:
        """The tensors that are trained without a gradient, and belong in a checkpoint, by name."""
        return {}

    @property
    def experts(self) -> range:
        """The routed experts of each layer that this rank holds, in the order of the parameters' first dimension."""
        return range(0)

    def routers(self) -> Sequence[Router]:
        """The routers of the layers, in canonical order: they keep auxiliary losses and counts of tokens."""
        return ()

    def spread_experts(self, exchange: ExchangeRows) -> None:
        """From now on reach the experts through `exchange`. Called only if ranks hold different experts."""

    def split_over(self, split: TensorSplit) -> None:
        """From now on exchange columns through `split`. Called only if ranks hold different parts of weights."""
        raise NotImplementedError(f"{type(self).__name__} has no weights that tensor parallelism can split")

    def share_sequences(self, place: Place, ways: Mapping[str, Attend]) -> None:
        """From now on have a part of every sequence. Called only if ranks share sequences."""
        raise NotImplementedError(f"{type(self).__name__} cannot share sequences with other ranks")

    def share_tokens(self, others: SumOverTokens) -> None:
        """From now on count other ranks' tokens in auxiliary losses. Called only if ranks share a microbatch."""

    def decoder_layers(self) -> Mapping[Layer, nn.Module]:
        """The layers that can be compiled and recomputed one by one; those inside MTP modules as `mtp.N`."""
        return {}

    @property
    def asks(self) -> bool:
        """Whether every product asks if its weight's gradient is deferred, as those of `model/linear.py` do.

        If False, torch's functions are watched while a schedule splits backwards into I and W.
        """
        return False

    @property
    def whole(self) -> Sequence[Tensor]:
        """Weights whose gradients a split backward computes in I, for example if operands are too large to be kept."""
        return ()

    @property
    def adds_to_loss(self) -> bool:
        """Whether the last stage's last output, in training, is not logits but a number that the model itself adds to a
        microbatch's loss, with coefficients applied. The objective has the number's mean over the microbatches.
        """
        return False

    def call_decoder_as(self, runs: Sequence[Run]) -> None:
        """From now on call the layers of kind `decoder` through `runs`, which together stand for all these layers in
        order."""


def pieces(name: str, tensor: Tensor, row: Parameter, experts: range) -> Iterator[tuple[str, Tensor]]:
    """A parameter, or a tensor of its shape, as checkpoints name it: (name, tensor or view).

    A further use of a shared parameter goes by the name of its owner; a stack of experts is taken apart into single
    ones, `experts`, so that no name depends on which rank holds them.
    """
    if not row.experts:
        yield row.copy_of or name, tensor
        return
    for expert, part in zip(experts, tensor.unbind(), strict=True):
        yield expert_name(name, expert), part
