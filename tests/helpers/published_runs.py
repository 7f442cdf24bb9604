"""Published throughput of whole runs (facts of issue 4, 1.7 and 1.8) as ppctl configs, and what their plans say.

Every row is planned through `compose` and `build_plan`, as `ppctl plan` does. What no source gives is taken alike for
all rows: a microbatch of one sequence, an optimizer shared out over dp, and the least recomputation under which the
plan fits the device's memory (none; norms, experts' activations and MLA's up-projections; whole layers). Must not know
floors.
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from recorded_runs import GIB, Row

from ppctl.config.compose import compose
from ppctl.plan import Plan, build_plan

MEMORY = {"h100": 79.6, "h100_500w": 94.5, "b200": 167.0, "b300": 268.0, "gb200": 173.0, "gb300": 268.0}
"""GiB of a device, as its driver tells them."""

BRIDGE = "model=deepseek_v3 cost.matmul=fp8 etp=1 gbs=4096"
EVERYWHERE = (
    "parallel.bf16=true",
    "mbs=1",
    "parallel.data_parallel_sharding=optimizer_gradients",
    "model.max_position_embeddings=8192",
    "cost.stack=megatron",
    "launch.transport=channels",  # Megatron overlaps its messages
    "parallel.cross_entropy_loss_fusion=true",
)


class Published(NamedTuple):
    """One row: tokens per second and device, and its setting."""

    name: str
    tokens: float
    device: str
    setting: str
    missing: str = ""
    """What of the setting no source gives: such rows are listed, not counted."""

    @property
    def layers(self) -> str:
        """What its modules are called for recomputation."""
        return "mlp" if "llama" in self.setting else "moe_act"


_BRIDGE_4 = "nodes=64 gpus_per_node=4 " + BRIDGE
_BRIDGE_8 = "nodes=32 gpus_per_node=8 " + BRIDGE
_AUTOMODEL = "model.mtp_num_layers=null layout=Et|(tt|)*30L etp=1 gpus_per_node=8"
_DEEPSEEK_PP4 = f"model=deepseek_v3 pp=4 vpp=8 ep=64 {_AUTOMODEL}"

ROWS = (
    Published("DeepSeek-V3, 256 GB300", 6288, "gb300", f"{_BRIDGE_4} pp=2 vpp=8 ep=32 layout=Et*4|(t*4|)*14tmL"),
    Published("DeepSeek-V3, 256 GB200", 4912, "gb200", f"{_BRIDGE_4} pp=4 vpp=4 ep=64 layout=Et*4|(t*4|)*14tmL"),
    Published("DeepSeek-V3, 256 B200, pp 8", 3328, "b200", f"{_BRIDGE_8} pp=8 vpp=2 ep=32 layout=Et*4|(t*4|)*14tmL"),
    Published("DeepSeek-V3, 256 B200, pp 16", 2815, "b200", f"{_BRIDGE_8} pp=16 vpp=1 ep=8 layout=Et*4|(t*4|)*14tmL"),
    Published(
        "DeepSeek-V3, 1024 H100, fp8",
        1297,
        "h100",
        "model=deepseek_v3 cost.matmul=fp8 tp=2 parallel.sequence_parallel=true pp=8 vpp=4 ep=64 etp=1 gbs=8192 "
        "nodes=128 gpus_per_node=8 layout=Et|(tt|)*30mL",
    ),
    Published("DeepSeek-V3, 256 H100", 1002, "h100", f"{_DEEPSEEK_PP4} gbs=512 nodes=32"),
    Published("DeepSeek-V3, 1024 H100", 865, "h100", f"{_DEEPSEEK_PP4} gbs=8192 nodes=128"),
    Published("Kimi K2, 256 H100", 924, "h100", f"model=kimi_k2 pp=8 vpp=4 ep=32 gbs=512 nodes=32 {_AUTOMODEL}"),
    Published(
        "DeepSeek-V3, 256 B300",
        3541,
        "b300",
        f"{_BRIDGE_8} pp=8 vpp=1 ep=8 layout=Et*8|(t*8|)*6t*5mL",
        "vpp",
    ),
    Published(
        "Kimi K2, 256 GB300",
        5372,
        "gb300",
        "model=kimi_k2 cost.matmul=fp8 etp=1 gbs=4096 nodes=64 gpus_per_node=4 pp=4 vpp=4 ep=64 "
        "layout=Et*4|(t*4|)*14tL",
        "batch",
    ),
    Published(
        "Llama 3.1 405B, 1024 H100, fp8",
        327,
        "h100",
        "model=llama3_405b cost.matmul=fp8 tp=8 cp=2 parallel.sequence_parallel=true pp=8 vpp=8 gbs=1536 nodes=128 "
        "gpus_per_node=8 seq=8192 parallel.account_for_embedding_in_pipeline_split=true "
        "parallel.account_for_loss_in_pipeline_split=true",
        "batch",
    ),
    Published(
        "Llama 3 70B, 64 H100, fp8",
        1664,
        "h100",
        "model=llama3_70b cost.matmul=fp8 tp=4 parallel.sequence_parallel=true pp=8 vpp=5 gbs=128 nodes=8 "
        "gpus_per_node=8 seq=8192",
        "batch",
    ),
)


def planned(row: Published) -> Plan:
    """The plan with the least recomputation that fits."""
    overrides = [*row.setting.split(), f"cost.device={row.device}", *EVERYWHERE]
    if not any(word.startswith("seq=") for word in overrides):
        overrides.append("seq=4096")
    modules = ["layernorm", row.layers, *(["mla_up_proj"] if "moe" in row.layers else [])]
    selective = ["train.recompute_granularity=selective", f"train.recompute_modules=[{','.join(modules)}]"]
    plan = None
    for recompute in ([], selective, ["train.recompute_granularity=full"]):
        composed = compose([*overrides, *recompute])
        plan = build_plan(composed.config, composed.provenance)
        assert not plan.problems, plan.problems
        if max(cost.peak_bytes for cost in plan.pp_ranks) <= MEMORY[row.device] * GIB:
            break
    assert plan is not None
    return plan


def throughput_rows(*, all_rows: bool = False) -> list[Row]:
    """Tokens per second and device, planned and published: of the rows that count, or of all."""
    return [
        Row(row.name, planned(row).timing.tokens_per_s_per_device, row.tokens, not row.missing)
        for row in ROWS
        if all_rows or not row.missing
    ]


def kendall_tau(rows: list[Row]) -> float:
    """How far two orders agree: (pairs in the same order - pairs in the other) / pairs."""
    signs = [(one.planned - other.planned) * (one.recorded - other.recorded) for one, other in combinations(rows, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)
