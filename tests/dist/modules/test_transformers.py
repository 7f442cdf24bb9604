"""Models of transformers through `ppctl.pipeline`, as instances and directories: the bits of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import LAYERS, WORDS, model_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ppctl
from ppctl.errors import PpctlError
from ppctl.model.loss import microbatch_loss
from ppctl.modules.calls import run_dry

STEPS, ROWS, TOKENS = 2, 4, 12
NAMES = [
    ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.rotary_emb"],
    ["model.layers.3", "model.norm", "lm_head", "model.rotary_emb"],
]
SOURCES: list[tuple[str, bool, dict[str, Any]]] = [
    ("Granite", False, dict(pp_schedule="interleaved_1f1b", layers_per_stage=1)),
    ("Llama", True, dict(module_fqns_per_model_part=NAMES)),
    ("Gemma2", True, dict(layers_per_stage=2)),
]
"""Architecture, whether it is given as a directory, and how it is cut; the heads of Granite and Gemma 2 are tied."""


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, WORDS, (ROWS, TOKENS + 1), generator=generator) for _ in range(STEPS)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in drawn]


def by_stages(directory: str) -> list[tuple[list[float], float, dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for kind, stored, fields in SOURCES:
        model = f"{directory}/{kind}" if stored else model_of(kind)
        pipeline = ppctl.pipeline(model, ppctl.PipelineConfig(**fields))
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
        losses, gradients = [], {}
        for tokens, labels in data():
            losses.append(pipeline.step({"input_ids": tokens, "labels": labels}))
            gradients = {name: p.grad.clone() for name, p in pipeline.named_parameters()}
            optimizer.step()
            pipeline.zero_grad()
        evaluated = pipeline.eval(data()[0])
        last = pipeline.info.has_last_stage
        state = {name: value.clone() for name, value in pipeline.state_dict().items()}
        pipeline.load_state_dict(model_of(kind).state_dict())
        if last:
            assert evaluated is not None
        again = pipeline.eval(data()[0])
        found.append(
            (
                [float(each) for each in [*losses, again]] if last else [],
                float(evaluated) if last else 0.0,
                gradients,
                state,
            )
        )
        pipeline.close()
    return found


def by_a_plain_loop(kind: str) -> tuple[list[float], float, dict[str, Tensor], dict[str, Tensor]]:
    model: Any = model_of(kind)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is table.weight
    if tied:
        head.weight = nn.Parameter(table.weight.detach().clone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def shares(batch: tuple[Tensor, Tensor]) -> list[Tensor]:
        rows = zip(*(each.split(1) for each in batch), strict=True)
        logits = ((model(input_ids=tokens, use_cache=False).logits, labels) for tokens, labels in rows)
        return [microbatch_loss(out, labels, torch.ones(1, TOKENS), float(ROWS * TOKENS)) for out, labels in logits]

    with torch.no_grad():
        first = float(torch.stack(shares(data()[0])).sum())
    losses, gradients = [], {}
    for batch in data():
        rows = zip(*(each.split(1) for each in batch), strict=True)
        parts = []
        for tokens, labels in rows:
            out = model(input_ids=tokens, use_cache=False).logits
            parts.append(microbatch_loss(out, labels, torch.ones(1, TOKENS), float(ROWS * TOKENS)))
            parts[-1].backward()
        losses.append(float(torch.stack([part.detach() for part in parts]).sum()))
        if tied:
            table.weight.grad += head.weight.grad
            head.weight.grad = table.weight.grad.clone()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = float(torch.stack(shares(data()[0])).sum())
    return [*losses, first], evaluated, gradients, dict(model.named_parameters())


def test_a_model_of_transformers_has_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    for kind in ("Llama", "Gemma2"):
        model_of(kind).save_pretrained(tmp_path / kind)
    ranks = run_ranks(by_stages, 2, str(tmp_path), timeout=300.0)
    for place, (kind, _, _) in enumerate(SOURCES):
        losses, evaluated, gradients, weights = by_a_plain_loop(kind)
        assert len(set(losses)) == STEPS
        (told,) = [found[place] for found in ranks if found[place][0]]
        assert told[0] == losses, kind
        assert told[1] == evaluated, kind
        for which, expected in ((2, gradients), (3, weights)):
            found: dict[str, Tensor] = {}
            for rank in ranks:
                found |= rank[place][which]
            assert found.keys() == expected.keys(), kind
            assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == [], kind
    assert LAYERS == 4, "one layer on each of four stages"


PADDED = ("Gemma2", "GPT2", "OPT", "Bloom")
"""Windows and soft caps; learned positions; positions counted from the mask; a bias made of the mask."""


def padded() -> dict[str, Tensor]:
    tokens, labels = data()[0]
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[0, :5] = mask[2, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


def positions(mask: Tensor) -> dict[str, Tensor]:
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def padded_by_stages() -> list[tuple[float | None, dict[str, Tensor]]]:
    found = []
    for kind in PADDED:
        batch = padded()
        if kind == "GPT2":
            batch |= positions(batch["attention_mask"])
        pipeline = ppctl.pipeline(model_of(kind))
        loss = pipeline.step(**batch)
        gradients = {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
        found.append((None if loss is None else float(loss), gradients))
        pipeline.close()
    return found


def test_masks_and_positions_of_a_batch_reach_the_models_own_code_on_every_stage() -> None:
    ranks = run_ranks(padded_by_stages, 2, timeout=300.0)
    for place, kind in enumerate(PADDED):
        model: Any = model_of(kind)
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        tied = head.weight is table.weight
        if tied:
            head.weight = nn.Parameter(table.weight.detach().clone())
        batch = padded()
        labels = batch.pop("labels")
        if kind == "GPT2":
            batch |= positions(batch["attention_mask"])
        counts, losses = (labels != -100).float(), []
        for row in range(ROWS):
            logits = model(**{name: each[row : row + 1] for name, each in batch.items()}, use_cache=False).logits
            mask, wanted = counts[row : row + 1], labels[row : row + 1].clamp(min=0)
            losses.append(microbatch_loss(logits, wanted, mask, counts.sum()))
            losses[-1].backward()
        if tied:
            table.weight.grad += head.weight.grad
            head.weight.grad = table.weight.grad.clone()
        (loss,) = [rank[place][0] for rank in ranks if rank[place][0] is not None]
        assert loss == float(torch.stack([each.detach() for each in losses]).sum()), kind
        gradients = {**ranks[0][place][1], **ranks[1][place][1]}
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == expected.keys(), kind
        assert [name for name, value in gradients.items() if not torch.equal(value, expected[name])] == [], kind


class Reads(TorchDispatchMode):
    """Counts the values that a host reads: on a GPU it would wait for each."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def packed() -> dict[str, Tensor]:
    """Rows of which two are of two documents each."""
    tokens, labels = data()[0]
    places = torch.arange(TOKENS).repeat(ROWS, 1)
    places[1, 5:] -= 5
    places[2, 7:] -= 7
    return {"input_ids": tokens, "position_ids": places, "labels": labels}


@pytest.mark.parametrize("kind", ["Llama", "Gemma2"])
@pytest.mark.parametrize(
    ("given", "hides", "begins"),
    [(padded, [True, False, True, False], [None] * ROWS), (packed, [None] * ROWS, [False, True, True, False])],
)
def test_masks_and_positions_are_read_ahead_of_the_pipeline_and_in_no_forward(
    given: Callable[[], dict[str, Tensor]], hides: list[bool | None], begins: list[bool | None], kind: str
) -> None:
    pipeline = ppctl.pipeline(model_of(kind))
    batch = pipeline._begin(given())
    assert [(each.hides, each.packed) for each in batch.microbatches] == list(zip(hides, begins, strict=True))
    with Reads() as reads:
        run_dry(pipeline._run_of(batch), torch.device("cpu"))
    assert reads.number == 0


def test_documents_in_a_row_are_kept_apart_by_their_positions() -> None:
    batch, model = packed(), model_of("Llama")
    labels = batch.pop("labels")
    with torch.no_grad():
        rows = [
            model(**{name: each[row : row + 1] for name, each in batch.items()}, use_cache=False).logits
            for row in range(ROWS)
        ]
    shares = [
        microbatch_loss(logits, labels[row : row + 1], torch.ones(1, TOKENS), torch.tensor(ROWS * TOKENS))
        for row, logits in enumerate(rows)
    ]
    apart = ppctl.pipeline(model).eval(labels=labels, **batch)
    together = ppctl.pipeline(model_of("Llama")).eval(input_ids=batch["input_ids"], labels=labels)
    assert apart is not None and together is not None and torch.equal(apart, torch.stack(shares).sum())
    assert not torch.equal(apart, together)


def test_what_a_pipeline_would_do_otherwise_than_transformers_is_refused() -> None:
    pipeline = ppctl.pipeline(model_of("Llama"))
    tokens, labels = data()[0]
    cases: dict[str, dict[str, Any]] = {
        "does not shift them": dict(input_ids=tokens, labels=tokens.clone()),
        "not token_type_ids": dict(input_ids=tokens, token_type_ids=tokens, labels=labels),
        "takes input_ids": dict(attention_mask=tokens, labels=labels),
    }
    for words, batch in cases.items():
        with pytest.raises(PpctlError, match=f"PP-E130.*{words}"):
            pipeline.step(**batch)
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    assert pipeline.step(input_ids=tokens, labels=shifted) is not None
    with pytest.raises(PpctlError, match=r"PP-E130.*does not shift them"):  # also in a batch whose shape is known
        pipeline.step(input_ids=tokens, labels=tokens.clone())
    for few in (1, ROWS // 2, ROWS + 1):
        mask = torch.ones(few, tokens.shape[1], dtype=torch.int64)
        if few == 1:
            assert pipeline.step(input_ids=tokens, attention_mask=mask, labels=shifted) is not None
            continue
        with pytest.raises(PpctlError, match=rf"PP-E130.*attention_mask \[{few}, .* has {few} rows"):
            pipeline.step(input_ids=tokens, attention_mask=mask, labels=shifted)
    with pytest.raises(PpctlError, match=r"PP-E130.*output_router_logits"):
        ppctl.pipeline(model_of("Qwen3Moe balanced"))
