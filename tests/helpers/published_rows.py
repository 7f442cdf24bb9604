"""The published steps and configurations of golden/published_rows.json as overrides of ppctl's, and why some are not.

What no source gives is taken alike for all: optimizer and gradients sharded over dp (all of the state where the row
says FSDP), sequence parallelism with tensor parallelism, messages beside computation, and the least recomputation that
fits the device. Must not know prices or floors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from published_runs import MEMORY

from ppctl.config.compose import compose
from ppctl.config.schema import RunConfig
from ppctl.plan import Plan, build_plan

ROWS = Path(__file__).parents[1] / "golden" / "published_rows.json"
GIB = 2**30

_GPT_OSS = (
    "model.hidden_size=2880 model.ffn_hidden_size=2880 model.moe_ffn_hidden_size=2880 model.num_attention_heads=64 "
    "model.num_query_groups=8 model.kv_channels=64 model.vocab_size=201088 model.moe_router_topk=4 "
    "model.add_qkv_bias=true model.rotary_base=150000"
)
_QWEN2 = "model.add_qkv_bias=true model.rotary_base=1000000"
MODELS = {
    **{name: f"model={name}" for name in ("deepseek_v3", "kimi_k2", "llama3_8b", "llama3_70b", "llama3_405b")},
    **{name: f"model={name}" for name in ("qwen3_30b_a3b", "mixtral_8x22b", "qwen3_235b_a22b", "qwen3_32b")},
    # From their public config.json; that every other layer attends to 128 tokens alone is not said.
    "gpt_oss_120b": f"model.num_layers=36 model.num_moe_experts=128 {_GPT_OSS}",
    "gpt_oss_20b": f"model.num_layers=24 model.num_moe_experts=32 {_GPT_OSS}",
}
"""A model by the name of its recipe -> the overrides that make it."""

_FOREIGN = {"GPT OSS 120B": "gpt_oss_120b", "GPT-OSS 120B": "gpt_oss_120b", "GPT-OSS 20B": "gpt_oss_20b"}
PRECISIONS = {
    **{"BF16": "bf16", "FP8": "fp8", "FP8-CS": "fp8", "FP8-CS (FP8-MX)": "fp8", None: "fp8"},
    **{"MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4"},
    **{"bf16": "bf16", "fp8cs": "fp8", "fp8sc": "fp8", "fp8ds": "fp8", "fp8mx": "mxfp8", "nvfp4": "nvfp4"},
}
"""What a source calls a precision (release 25.09 says none, and ran 8 bits) -> cost.matmul."""

OFFLOADED = {("gb200", "bf16"): 20, ("gb200", "fp8"): 40, ("gb300", "bf16"): 30, ("gb300", "fp8"): 20}
"""Layers whose activations the recipes of Llama 3 70B with FSDP leave to the host, which golden/published_rows.json
does not say (the same source: perf_recipes/llama/gb200/llama3.py and gb300/llama3.py)."""

_STAGES = {8: "Et*8|(t*8|)*6t*5{m}L", 16: "Et*4|(t*4|)*14t{m}L", 32: "Et|(tt|)*30{m}L"}
"""How 61 layers are spread over so many stages, where no source says it."""
_ACCOUNTED = "parallel.account_for_embedding_in_pipeline_split=true parallel.account_for_loss_in_pipeline_split=true"

_FIXED = (
    "mbs={mbs} gbs={gbs} seq={seq} tp={tp} cp={cp} pp={pp} vpp={vpp} nodes={nodes} gpus_per_node={per_node} "
    "parallel.bf16=true cost.stack=megatron cost.device={gpu} cost.matmul={precision} launch.transport=channels "
    "parallel.cross_entropy_loss_fusion=true parallel.data_parallel_sharding={sharding} "
    "model.max_position_embeddings={seq}"
)


class Setting(NamedTuple):
    """A published setting, and what was measured of it."""

    name: str
    model: str
    gpu: str
    precision: str
    release: str
    overrides: tuple[str, ...]
    recompute: tuple[str, ...] | None
    """None where no source gives it."""
    tokens: float = 0.0
    """Tokens per second and GPU; 0 of a configuration that was chosen and not measured."""
    layout_known: bool = True


class NotPlanned(Exception):
    """A row that ppctl has no plan for; its text says why."""


def settings(kind: str = "rows") -> tuple[list[Setting], dict[str, str]]:
    """All rows (or `chosen` ones) that can be planned, and of the others (name -> why not)."""
    found, missed = [], {}
    for row in json.loads(ROWS.read_text())[kind]:
        try:
            found.append(_setting(row))
        except NotPlanned as reason:
            missed[_name(row)] = str(reason)
    return found, missed


def newest(rows: list[Setting]) -> list[Setting]:
    """The newest release of each configuration, less those that the one rule sets aside: a row of which another of the
    same configuration and release differs by more than 1.5 times."""
    best: dict[tuple[str, ...], list[Setting]] = {}
    for row in rows:
        best.setdefault((row.gpu, row.precision, *row.overrides, *(row.recompute or ())), []).append(row)
    kept = []
    for same in best.values():
        last = [row for row in same if row.release == max(each.release for each in same)]
        if max(row.tokens for row in last) <= 1.5 * min(row.tokens for row in last):
            kept += last
    return kept


def _name(row: dict[str, Any]) -> str:
    words = [row.get("model") or row["name"], row["gpus"], row["gpu"], row["precision"]]
    sizes = [f"{axis}{row[axis]}" for axis in ("tp", "cp", "pp", "vpp", "ep") if row.get(axis) not in (None, 0, 1)]
    batch = [f"mbs{row.get('mbs') or row.get('lbs')}", f"gbs{row['gbs']}"]
    release, notes = (row.get("release") or "").split(), row.get("notes") or row.get("variant") or ""
    return " ".join(map(str, [*words, *sizes, *batch, *release[:1], notes.split(";")[0]])).strip()


def _setting(row: dict[str, Any]) -> Setting:
    known = _known(row)
    gpus, layers = row["gpus"], known["model"]
    per_node = min(gpus, 4 if known["gpu"].startswith("gb") else 8)
    whole = layers == "llama3_70b" and row["pp"] == 1 and "name" in row  # these recipes use FSDP
    fsdp = whole or (row.get("fsdp") or 0) > 1 or row.get("variant") == "fsdp"
    sharding = "full" if fsdp else "optimizer_gradients"
    sizes = {axis: row.get(axis) or 1 for axis in ("tp", "cp", "pp", "vpp", "ep")}
    batch = {"mbs": row.get("mbs") or row.get("lbs"), "gbs": row["gbs"], "seq": row["seq"] or 4096}
    if known["source"].startswith("NVIDIA-NeMo/Automodel") and sizes["pp"] > 1:
        batch["mbs"] = 1  # lbs is of a step
    text = _FIXED.format(**known, **sizes, **batch, nodes=gpus // per_node, per_node=per_node, sharding=sharding)
    words = [*MODELS[layers].split(), *text.split()]
    if sizes["ep"] > 1:
        words += [f"ep={sizes['ep']}", "etp=1"]
    if sizes["tp"] > 1:
        words.append("parallel.sequence_parallel=true")
    mtp = layers == "deepseek_v3" and "w/o" not in known["title"] and not known["source"].startswith("NVIDIA-NeMo/Auto")
    number = OFFLOADED.get((known["gpu"], known["precision"])) if layers == "llama3_70b" else None
    if sharding == "full" and number:
        words += ["parallel.cpu_offloading=true", f"parallel.cpu_offloading_num_layers={number}"]
    if layers == "deepseek_v3" and not mtp:
        words.append("model.mtp_num_layers=null")
    stages, layout = sizes["pp"] * sizes["vpp"], row.get("layout")
    said = isinstance(layout, str) and "|" in layout
    if said:
        words.append(f"layout={layout if mtp or 'm' not in layout else layout.replace('m', '')}")
    elif layers in ("deepseek_v3", "kimi_k2") and sizes["pp"] > 1:
        if stages not in _STAGES:
            raise NotPlanned(f"nothing says how 61 layers are spread over {stages} stages")
        words.append("layout=" + _STAGES[stages].format(m="m" if mtp else ""))
    elif layers == "llama3_405b":
        words += _ACCOUNTED.split()
    tokens = row.get("tokens_per_s_per_gpu") or row.get("tokens_per_s_per_gpu_from_step") or 0.0
    release = (row.get("release") or "").split()
    even = layers not in ("deepseek_v3", "kimi_k2", "llama3_405b") or sizes["pp"] == 1
    return Setting(
        *(_name(row), layers, known["gpu"], known["precision"], release[0] if release else row["source"].split(":")[0]),
        *(tuple(words), _recompute(row), tokens, said or even),
    )


def _known(row: dict[str, Any]) -> dict[str, str]:
    title = row.get("model") or row["name"]
    model = row.get("ppctl_recipe") or _FOREIGN.get(title) or title.split("_pretrain")[0]
    gpu = row["gpu"].upper().replace("DGX-", "").split()[0].lower() + "_500w" * ("500W" in row["gpu"])
    if model not in MODELS:
        raise NotPlanned("no config of this model")
    if gpu not in MEMORY:
        raise NotPlanned(f"no preset of {gpu}")
    if "LoRA" in str(row.get("section")):
        raise NotPlanned("adapters are planned for a model of transformers' own code alone")
    if not all(isinstance(row.get(key), int) for key in ("tp", "pp", "gbs")) or not (row.get("mbs") or row.get("lbs")):
        raise NotPlanned("its sizes are not known")
    names = {"model": model, "gpu": gpu, "precision": PRECISIONS[row["precision"]]}
    return {**names, "title": title, "source": str(row["source"])}


def _recompute(row: dict[str, Any]) -> tuple[str, ...] | None:
    said = row.get("recompute")
    if said is None or said == "selective":
        return None
    if said in ("none set in the recipe", {}):
        return ()
    if said == "full" or "full" in said.get("recompute_granularity", ""):
        words = {"train.recompute_granularity": "full"}
        if isinstance(said, dict):
            words |= {f"train.{key}": str(value) for key, value in said.items()}
        return tuple(f"{key}={value}" for key, value in words.items())
    if not said.get("recompute_modules"):
        return ("train.recompute_granularity=selective",)
    modules = ["experts" if name == "moe" else name for name in said["recompute_modules"]]
    return ("train.recompute_granularity=selective", f"train.recompute_modules=[{','.join(modules)}]")


def ladder(setting: Setting) -> Iterator[tuple[str, ...]]:
    """The recomputation that is known, or one after another from none to whole layers."""
    if setting.recompute is not None:
        yield setting.recompute
        return
    modules = ["layernorm", "mlp" if setting.model.startswith("llama") else "moe_act"]
    modules += ["mla_up_proj"] * (setting.model in ("deepseek_v3", "kimi_k2"))
    yield ()
    yield ("train.recompute_granularity=selective", f"train.recompute_modules=[{','.join(modules)}]")
    yield ("train.recompute_granularity=full",)


@cache
def config_of(setting: Setting, recompute: tuple[str, ...]) -> tuple[RunConfig, dict[str, str]]:
    """The composed config, and where its values come from."""
    composed = compose([*setting.overrides, *recompute])
    return composed.config, composed.provenance


def fitting(setting: Setting) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the recomputation that is known or the least that fits (the most, if none does), and this
    recomputation. Raises AssertionError for problems."""
    found = None
    for recompute in ladder(setting):
        plan = build_plan(*config_of(setting, recompute))
        assert not plan.problems, (setting.name, plan.problems)
        found = plan, recompute
        if peak_bytes(plan) <= MEMORY[setting.gpu] * GIB:
            break
    assert found is not None
    return found


def peak_bytes(plan: Plan) -> int:
    """The most that any rank is planned to hold."""
    return max(cost.peak_bytes for cost in plan.pp_ranks)
