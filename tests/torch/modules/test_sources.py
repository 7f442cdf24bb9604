"""How a model of transformers is divided by NeMo's fields: layers per stage, rounding, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError
from ppctl.geometry.foreign_model import Anatomy
from ppctl.modules.sources import TransformersModel

MODEL = Anatomy(
    "transformer.h", 10, ("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head"),
    "transformer.wte", "lm_head", True, 1,
)  # fmt: skip
FIRST, LAST = ["transformer.wte", "wpe"], ["ln_f", "lm_head"]

PAIRS = dict(layers_per_stage=2, pp_schedule="interleaved_1f1b")


def layers(first: int, end: int) -> list[str]:
    return [f"h.{index}" for index in range(first, end)]


def cut(pp: int, **fields: Any) -> TransformersModel:
    return TransformersModel(None, MODEL, torch.float32, PipelineConfig(**fields), pp)


@pytest.mark.parametrize(
    ("pp", "fields", "decoders"),
    [
        (2, dict(), [5, 5]),
        (2, dict(pp_schedule="interleaved_1f1b"), [3, 3, 2, 2]),
        (2, dict(layers_per_stage=5), [5, 5]),
        (2, dict(PAIRS, round_virtual_stages_to_pp_multiple="up"), [2, 2, 2, 2, 1, 1]),
        (2, dict(PAIRS, round_virtual_stages_to_pp_multiple="down"), [3, 3, 2, 2]),
        (2, dict(module_fqns_per_model_part=[[*FIRST, *layers(0, 7)], [*layers(7, 10), *LAST]]), [7, 3]),
        (2, dict(module_fqns_per_model_part=[FIRST, [*layers(0, 10), "rotary_emb", *LAST]]), [0, 10]),
    ],
)  # fmt: skip
def test_the_layers_of_each_stage(pp: int, fields: dict[str, Any], decoders: list[int]) -> None:
    model = cut(pp, **fields)
    assert [sum(layer.kind == "decoder" for layer in stage) for stage in model.layers] == decoders
    indices = [layer.index for stage in model.layers for layer in stage if layer.kind == "decoder"]
    assert indices == list(range(10))
    assert str(model.layers[0][0]) == "embedding"
    assert str(model.layers[-1][-1]) == "loss"
    last = model.num_stages - 1
    assert model.ties == ({"transformer.wte.weight": 0, "lm_head.weight": last},)


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        (PAIRS, "PP-E119", "multiple of the pipeline ranks"),
        (dict(layers_per_stage=2, round_virtual_stages_to_pp_multiple="up"), "PP-E119", "single-stage schedule"),
        (dict(round_virtual_stages_to_pp_multiple="up"), "PP-E130", "layers_per_stage, which is not set"),
        (dict(module_fqns_per_model_part=[[*FIRST, *layers(0, 9)], LAST]), "PP-E131", "must name the 10 layers"),
        (dict(module_fqns_per_model_part=[[*layers(0, 9)], ["h.9", *LAST]]), "PP-E131", "alone, not left out"),
        (dict(module_fqns_per_model_part=[FIRST, [*FIRST, *layers(0, 10), *LAST]]), "PP-E131", "in part 0, 1"),
        (dict(module_fqns_per_model_part=[[*FIRST, *layers(0, 10), *LAST], []]), "PP-E131", "must be in part 1 alone"),
        (dict(module_fqns_per_model_part=[FIRST, layers(0, 10), LAST]), "PP-E131", "3 parts cannot be shared"),
        (dict(module_fqns_per_model_part=[[*FIRST, "h.x"], LAST]), "PP-E131", "'h.x' in part 0"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        cut(2, **fields)
    assert error.value.problems[0].code == code
    assert words in error.value.problems[0].message
