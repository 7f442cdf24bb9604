"""A batch in microbatches: what is divided, what goes to all of them, and what only looks as if it should."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError
from ppctl.modules.batch import GivenBatch, Microbatch, divide

ROWS, TOKENS, WIDTH = 8, 6, 5


def divided(first: Tensor, **more: Tensor) -> GivenBatch:
    labels = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return divide(
        {"input_ids": first, **more, "labels": labels}, PipelineConfig(pp_microbatch_size=2), torch.device("cpu")
    )


def ids() -> Tensor:
    return torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("attention_mask", (1, TOKENS)),
        ("attention_mask", (1, 1, TOKENS, TOKENS)),
        ("attention_mask", (TOKENS, TOKENS)),
        ("position_ids", (TOKENS,)),
        ("position_ids", (3, ROWS, TOKENS)),
        ("rope", (TOKENS, WIDTH)),
        ("bias", (3, TOKENS, TOKENS)),
        ("scale", ()),
    ],
)
def test_what_is_for_all_rows_goes_to_every_microbatch_as_it_is(name: str, shape: tuple[int, ...]) -> None:
    value = torch.zeros(shape)
    assert all(each.named[name] is value for each in divided(ids(), **{name: value}).microbatches)


@pytest.mark.parametrize(
    "shape", [(2, TOKENS), (4, TOKENS), (ROWS + 1, TOKENS), (2, 1, 1, TOKENS), (4, TOKENS, TOKENS)]
)
def test_a_mask_of_another_number_of_rows_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ConfigError, match=rf"PP-E130: attention_mask .* has {shape[0]} rows, but there are 8 sequences"
    ):
        divided(ids(), attention_mask=torch.zeros(shape))


def test_any_tensor_of_tokens_needs_the_rows_of_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"PP-E130: segments \[2, 6\] has 2 rows"):
        divided(ids(), segments=torch.zeros(2, TOKENS))
    with pytest.raises(ConfigError, match=r"PP-E130: argument 1 \[4, 6\] has 4 rows"):
        divide(((ids(), torch.zeros(4, TOKENS)), ids()), PipelineConfig(pp_microbatch_size=2), torch.device("cpu"))


def test_a_table_beside_numbers_is_the_models_own_matter() -> None:
    table = torch.zeros(3, WIDTH)
    found = divide(((torch.zeros(ROWS, WIDTH), table), torch.zeros(ROWS)), PipelineConfig(), torch.device("cpu"))
    assert all(each.positional[1] is table for each in found.microbatches)


def test_rows_are_divided_and_the_first_is_known_as_it_was_given() -> None:
    tokens, mask = ids(), torch.ones(ROWS, TOKENS)
    found = divided(tokens, attention_mask=mask)
    assert torch.equal(torch.cat([each.named["input_ids"] for each in found.microbatches]), tokens)
    assert found.on_host and found.given.named["attention_mask"].data_ptr() == mask.data_ptr()
    elsewhere = Microbatch((torch.zeros(2, device="meta"),), {}, None)
    assert not replace(found, given=elsewhere).on_host


@pytest.mark.parametrize(
    ("mask", "hides"),
    [
        (torch.ones(ROWS, TOKENS), [False] * 4),
        (torch.ones(1, TOKENS, dtype=torch.int64), [False] * 4),
        ((torch.arange(ROWS) != 3)[:, None].expand(ROWS, TOKENS), [False, True, False, False]),
        (torch.zeros(1, TOKENS), [True] * 4),
        (torch.ones(ROWS, 1, TOKENS, TOKENS), [None] * 4),
    ],
)
def test_what_a_mask_hides_is_known_where_somebody_wants_to_know(mask: Tensor, hides: list[bool | None]) -> None:
    given = {"input_ids": ids(), "attention_mask": mask, "labels": ids()}
    config, cpu = PipelineConfig(pp_microbatch_size=2), torch.device("cpu")
    assert [each.hides for each in divide(given, config, cpu, reads_masks=True).microbatches] == hides
    assert [each.hides for each in divide(given, config, cpu).microbatches] == [None] * 4


def test_where_positions_begin_anew_is_known_as_well() -> None:
    places = torch.arange(TOKENS).repeat(ROWS, 1)
    places[5, 2:] -= 2
    given = {"input_ids": ids(), "position_ids": places + 3, "labels": ids()}
    found = divide(given, PipelineConfig(pp_microbatch_size=2), torch.device("cpu"), reads_masks=True)
    assert [each.packed for each in found.microbatches] == [False, False, True, False]
