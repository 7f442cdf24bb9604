"""The proof that a model can be cut: its miniature gives the same bits whole and in stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.comm.buffers import Message
from ppctl.foreign.anatomy import CannotCut
from ppctl.foreign.foreign_stage import ForeignStage, untie
from ppctl.foreign.library import call, make_model
from ppctl.foreign.miniature import CODE_FAILS, VOCABULARY, dropout_fields, line_of, miniatures, small_model
from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.layers import Layer
from ppctl.geometry.rows import Start
from ppctl.model.loss import microbatch_loss

_MICROBATCHES, _ROWS, _TOKENS = 2, 2, 20
_RUNS = 4
"""The most stages with layers; the embedding and the head are one more each."""


@dataclass(frozen=True, slots=True)
class CutProof:
    """A model whose cut gives the bits of the whole."""

    anatomy: Anatomy
    stages: tuple[str, ...]
    """The layers of each stage of the cut model."""
    gradients: int
    """How many gradients were compared."""
    starts: Mapping[str, Start]
    """How the model's own code initialises each parameter and saved buffer."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread while entered: several threads add up the rows of experts in an order that varies between runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def prove(config: Any) -> CutProof:
    """Run a miniature of a model whole and cut, in float32 on the CPU, and compare all results to the bit.

    Two microbatches go forward and backward, with ppctl's loss on the model's logits and what the model's own code adds
    to it; the embedding, the head, and up to four runs of layers are stages of their own. Raises CannotCut naming the
    first module that differs, or that asks for what another stage has.
    """
    blank, whole, anatomy, starts = small_model(config)
    untie(whole, anatomy)
    batches = [_batch(number, whole) for number in range(_MICROBATCHES)]
    states, expected, loss = _run_whole(whole, anatomy, batches)
    _check_draws(whole, anatomy, batches[0][0], states[0])
    parts = list(_divide(anatomy.count))
    stages = [_stage(blank, anatomy, part, whole) for part in parts]
    _run_cut(stages, anatomy, batches, states, loss)
    gradients = [(n, p.grad) for stage in stages for n, p in stage.canonical_parameters().items()]
    _compare_gradients(dict(gradients), expected)
    return CutProof(anatomy, tuple(map(_text, parts)), len(gradients), starts)


@_one_thread()
def drops_of(config: Any) -> dict[str, float]:
    """The fields by which a model drops something in training, with their values: draws would depend on the cut. A
    field counts if a miniature draws with it, because some such fields are for models with other heads."""
    return {name: value for name, value in dropout_fields(config).items() if _draws(config, name)}


def _draws(config: Any, name: str) -> bool:
    """Whether a miniature in which only this field drops something varies for the same tokens; True if none runs."""
    for small in miniatures(config, drops=name):
        with suppress(*CODE_FAILS), torch.no_grad():
            torch.manual_seed(0)
            model = make_model(small, "cpu").train()
            tokens = _batch(0, model)[0]
            return not torch.equal(*(model(input_ids=tokens, use_cache=False).logits for _ in range(2)))
    return True


def _batch(number: int, model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, labels and loss mask [rows, tokens] of one microbatch, from the first half of the vocabulary."""
    generator = torch.Generator().manual_seed(number)
    words = VOCABULARY
    with suppress(*CODE_FAILS):  # a model without a table of embeddings is refused later
        words = min(words, model.get_input_embeddings().weight.shape[0])
    drawn = torch.randint(0, max(1, words // 2), (_ROWS, _TOKENS + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:], torch.ones(_ROWS, _TOKENS)


_Losses = tuple[Tensor, ...]
"""The losses of one microbatch: ppctl's, and the part that the model's own code adds, if any."""


def _losses(outputs: Sequence[Tensor], labels: Tensor, mask: Tensor) -> _Losses:
    logits, *added = outputs
    return microbatch_loss(logits, labels, mask, float(_MICROBATCHES * mask.numel())), *added


def _objective(losses: _Losses) -> Tensor:
    loss, *added = losses
    return loss + added[0] / _MICROBATCHES if added else loss


def _run_whole(
    model: nn.Module, anatomy: Anatomy, batches: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> tuple[list[list[Tensor]], dict[str, Tensor | None], list[_Losses]]:
    """(by microbatch the first layer's input and every layer's output; gradients by name; losses)."""
    states, losses = list[list[Tensor]](), list[_Losses]()
    for tokens, labels, mask in batches:
        with _watched(model, anatomy) as watched:
            outputs = call(model, input_ids=tokens)
        states.append(watched)
        losses.append(_losses(outputs, labels, mask))
        _objective(losses[-1]).backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return states, trained, losses


@contextmanager
def _watched(model: nn.Module, anatomy: Anatomy) -> Iterator[list[Tensor]]:
    """A context with a list, to which each layer of the model adds the hidden state that it returns."""
    states: list[Tensor] = []

    def keep(_: nn.Module, arguments: Any, output: Any) -> None:
        states.append((output[0] if anatomy.returned else output).detach().clone())

    hooks = [model.get_submodule(anatomy.layer(index)).register_forward_hook(keep) for index in range(anatomy.count)]
    yield states
    for hook in hooks:
        hook.remove()


def _check_draws(model: nn.Module, anatomy: Anatomy, tokens: Tensor, states: Sequence[Tensor]) -> None:
    """Raise CannotCut, naming the first such layer, if a second run gives other results for the same tokens."""
    with _watched(model, anatomy) as again:  # with gradients, as before: a mask with a gradient takes another kernel
        model(input_ids=tokens, use_cache=False)
    for index, (one, other) in enumerate(zip(states, again, strict=True)):
        if not torch.equal(one, other):
            reason = (
                "draws random numbers in training, or keeps state between calls: its results would depend on the cut"
            )
            raise CannotCut(f"{anatomy.layer(index)} {reason}")


def _divide(count: int) -> Iterator[tuple[Layer, ...]]:
    runs = min(count, _RUNS)
    bounds = [number * count // runs for number in range(runs + 1)]
    yield (Layer("embedding"),)
    for first, end in pairwise(bounds):
        yield tuple(Layer("decoder", index) for index in range(first, end))
    yield (Layer("loss"),)


def _text(part: tuple[Layer, ...]) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}"


def _stage(blank: nn.Module, anatomy: Anatomy, part: tuple[Layer, ...], whole: nn.Module) -> ForeignStage:
    """A stage with the whole model's parameters and saved buffers; all other buffers are its own."""
    try:
        stage = ForeignStage(blank, anatomy, part)
    except CODE_FAILS as error:
        raise CannotCut(
            f"the buffers of {_text(part)} cannot be made apart from the model: {line_of(error)}"
        ) from error
    saved = whole.state_dict()
    with torch.no_grad():
        for name, tensor in (*stage.canonical_parameters().items(), *stage.canonical_buffers().items()):
            tensor.copy_(saved[name])
    return stage


def _run_cut(
    stages: Sequence[ForeignStage],
    anatomy: Anatomy,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    states: Sequence[Sequence[Tensor]],
    losses: Sequence[_Losses],
) -> None:
    """Run all microbatches forward and backward, stage by stage like an engine. Raises CannotCut if results differ."""
    for mb, (tokens, labels, mask) in enumerate(batches):
        given: Message = (tokens,)
        hops = list[tuple[Message, Message]]()
        for stage in stages:
            outputs = _called(stage, given, anatomy)
            if stage.own and not torch.equal(outputs[0], states[mb][stage.own[-1]]):
                raise CannotCut(_differs(anatomy, stage, mb))
            hops.append((given, outputs))
            given = tuple(output.detach().requires_grad_() for output in outputs)
        *before, (entered, outputs) = hops
        of_parts = _losses(outputs, labels, mask)
        _compare_losses(anatomy, of_parts, losses[mb])
        _objective(of_parts).backward()
        for given, left in reversed(before):
            torch.autograd.backward(left, [each.grad for each in entered])
            entered = given


def _compare_losses(anatomy: Anatomy, of_parts: _Losses, expected: _Losses) -> None:
    """Raise CannotCut unless the losses, and what routers add to them, are equal, bit by bit."""
    (loss, *added), (whole, *all_added) = of_parts, expected
    if not torch.equal(loss, whole):
        raise CannotCut(f"{anatomy.head}: with the same states before it the loss differs")
    if len(added) != len(all_added) or not all(map(torch.equal, added, all_added)):
        raise CannotCut(
            f"{anatomy.head}: with all hidden states and all that routers record equal, what the model's own code adds "
            "to the loss differs: it reads something else of earlier layers"
        )


def _called(stage: ForeignStage, given: Message, anatomy: Anatomy) -> Message:
    """Run a stage; return its output. Raises CannotCut if its code fails without the other stages."""
    try:
        output: Message = stage(*given)
    except CODE_FAILS as error:
        at = anatomy.layer(stage.own[0]) if stage.own else anatomy.embedding if stage.embeds else anatomy.head
        raise CannotCut(f"{at} or a later layer reads something from another stage: {line_of(error)}") from error
    return output


def _differs(anatomy: Anatomy, stage: ForeignStage, mb: int) -> str:
    first, last = anatomy.layer(stage.own[0]), anatomy.layer(stage.own[-1])
    where = first if first == last else f"{first} to {last}"
    return (
        f"{where}: with the same hidden state before it, the result differs in microbatch {mb}. "
        "It reads something else of earlier layers, such as keys and values that several layers share"
    )


def _compare_gradients(gradients: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> None:
    """Raise CannotCut unless all parameters have gradients equal to the expected ones, bit by bit."""
    if missing := expected.keys() - gradients.keys():
        raise CannotCut(f"{min(missing)} is on no stage")
    for name, gradient in expected.items():
        own = gradients[name]
        if (own is None) != (gradient is None) or (
            own is not None and gradient is not None and not torch.equal(own, gradient)
        ):
            raise CannotCut(f"{name}: its gradient differs, so something besides the hidden state connects the stages")
