"""Published configurations fit the devices that ran them, and DeepSeek-V3's plan takes what its report says.

The seconds of all measured rows, with whole models held out: `benchmarks/calibrate.py`.
"""

import random

import pytest
from published_rows import GIB, MEMORY, Setting, fitting, peak_bytes, settings

from ppctl.config.compose import compose
from ppctl.errors import ConfigError
from ppctl.plan import build_plan

REPORTED = 14.8e12 / (2.664e6 * 3600)
"""Tokens per second and H800 of DeepSeek-V3's pre-training (arXiv 2412.19437, table 1): 14.8T in 2.664M hours."""

SHORT = {"LLAMA3_70B 64 DGX-GB200 FP8 mbs2 gbs256 26.04.01": "176 of 173 GiB: 40 of its 80 layers wait on the host"}
"""Planned to need more than their device has, though they ran."""

CONTRADICTORY = {
    "deepseek_v3_pretrain_256gpu_gb200_fp8mx_partial_cg_dev_config": "PP-E220",
    "deepseek_v3_pretrain_256gpu_gb300_fp8mx_partial_cg_dev_config": "PP-E220",
    "deepseek_v3_pretrain_1024gpu_h100_fp8sc_config": "PP-E220",
    "deepseek_v3_pretrain_1024gpu_h100_fp8sc_large_scale_config": "PP-E220",
    "deepseek_v3_pretrain_64gpu_h100_bf16_config": "PP-E205",
    "deepseek_v3_pretrain_64gpu_h100_fp8cs_config": "PP-E205",
}
"""Recipes whose layout has more stages than pp x vpp, or whose ep needs more ranks than there are; they cannot run."""


def known() -> list[Setting]:
    """Every configuration whose recomputation and layout are known, measured or chosen, once."""
    found = {}
    for kind in ("rows", "chosen"):
        for each in settings(kind)[0]:
            if each.recompute is not None and each.layout_known:
                found.setdefault((each.overrides, each.recompute), each)
    return list(found.values())


def judged(rows: list[Setting]) -> tuple[dict[str, str], dict[str, str]]:
    """Those that are planned to need more than their device has, and those that the plan refuses, with its code."""
    short, refused = {}, {}
    for row in rows:
        try:
            peak = peak_bytes(fitting(row)[0]) / GIB
        except ConfigError as error:
            refused[row.name.split()[0]] = error.problems[0].code
        else:
            if peak > MEMORY[row.gpu]:
                short[row.name] = f"{peak:.0f} of {MEMORY[row.gpu]:.0f} GiB"
    return short, refused


def test_a_sample_of_published_configurations_fits_its_devices() -> None:
    short, refused = judged(random.Random(31).sample(known(), 12))
    assert short.keys() <= SHORT.keys(), short
    assert refused.items() <= CONTRADICTORY.items()


@pytest.mark.whole
def test_published_configurations_fit_their_devices() -> None:
    short, refused = judged(known())
    assert {name: text.partition(":")[0] for name, text in SHORT.items()} == short
    assert refused == CONTRADICTORY


def test_deepseek_v3_is_planned_to_take_what_its_report_took() -> None:
    words = (
        "+recipe=deepseek_v3 cost.stack=megatron cost.matmul=fp8 launch.transport=channels launch.device_memory=null"
    )
    recomputed = "train.recompute_modules=[layernorm,mla_up_proj,moe_act]"  # section 3.2.3
    composed = compose([*words.split(), recomputed])
    plan = build_plan(composed.config, composed.provenance)
    assert not plan.problems
    assert plan.schedule.pairs
    assert plan.timing.tokens_per_s_per_device == pytest.approx(REPORTED, rel=0.15)
