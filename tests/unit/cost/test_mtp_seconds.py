"""What surrounds the layer of an MTP module: once a forward, for a rank's own tokens."""

from __future__ import annotations

import pytest

from ppctl.config.schema import ModelConfig
from ppctl.cost.setting import Setting
from ppctl.cost.times import layer_seconds, layer_work, machine_of
from ppctl.geometry.layers import Kind
from ppctl.host.accelerators import preset
from ppctl.topology import ParallelSizes

MODEL = ModelConfig(hidden_size=4096, ffn_hidden_size=11_008, num_attention_heads=32, num_query_groups=8)
MTP = Kind("mtp", False)


def over(tp: int, *, sequence_parallel: bool = False) -> Setting:
    return Setting(1, 4096, 2, ParallelSizes(tp, tp=tp, edp=tp), sequence_parallel=sequence_parallel)


def test_its_projection_is_whole_on_every_rank_for_the_tokens_that_the_rank_has() -> None:
    def projected(setting: Setting) -> tuple[float, float]:
        (work,) = [work for work in layer_work(MODEL, MTP, setting) if work.module == "mtp" and work.matmul]
        return work.matmul, work.weights

    alone = 2 * 4096 * (2 * 4096) * 4096, 2 * 4096**2
    assert projected(over(1)) == projected(over(8)) == alone
    assert projected(over(8, sequence_parallel=True)) == (alone[0] / 8, alone[1])


@pytest.mark.parametrize("setting", [over(1), over(8), over(8, sequence_parallel=True)])
def test_full_recomputation_makes_its_layer_again_and_nothing_around(setting: Setting) -> None:
    machine = machine_of(preset("h100"), "bfloat16", setting.sizes, MODEL)

    def again(kind: Kind) -> float:
        once, twice = (layer_seconds(layer_work(MODEL, kind, setting), machine, made) for made in ((), None))
        return twice.input_gradient - once.input_gradient

    assert again(MTP) == pytest.approx(again(MTP._replace(name="decoder")), rel=1e-9)
