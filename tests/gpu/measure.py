"""The measurements of `first_run.sh`: each prints what it does, and as its last line one JSON object for the page.

    measure.py facts                     what the machine has
    measure.py same CASE                 several ranks on the device(s): their losses against one rank's on the CPU
    measure.py nccl CASE                 the same over NCCL, where it connects as many ranks as the case has
    measure.py memory dense|moe          bytes allocated after every action of a step, against the plan's
    measure.py rate dense|moe            mfu and memory against the plan's, and a bare torch loop of the same layers
    measure.py compiled|fp8 dense|moe    the same with train.compile; with products in 8 bits as well
    measure.py restart                   a rank that is killed under an agent, and the losses of the start behind it
    measure.py profile dense|moe [compiled]  seconds of a step by class of kernel, and those without any
    measure.py PROBE [NAME]              what `device_probes.py` asks of the device alone

`--device cpu` takes tiny sizes. Exit codes: 0 measured, 1 failed, 77 skipped (the last line says why).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import restarted_run
import torch
import torch.distributed as dist
from device_probes import PROBES, Skipped
from step_profile import profiled

from ppctl.comm.groups import nccl_version
from ppctl.engine.stage import StageProgram
from ppctl.host.accelerators import device_called
from ppctl.host.devices import SEVERAL_RANKS, nccl_shares_gpus
from ppctl.launch.planning import planned
from ppctl.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.schedule.action import Op
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

SKIPPED = 77
_WARM = 3
"""Steps whose times do not count: compilation, autotuning."""

ONE_RANK = (
    *("pp=1", "vpp=1", "layout=null", "nodes=1", "gpus_per_node=1", "mbs=1"),
    "parallel.data_parallel_sharding=none",
)
MODELS = {
    "dense": ("+recipe=llama3_8b", *ONE_RANK),
    "moe": ("+recipe=qwen3_30b_a3b", "ep=1", *ONE_RANK),
}
"""One rank with a cut model, as many layers as the device holds."""
LAYERS = (32, 24, 20, 16, 12, 8, 6, 4, 2, 1)

SMALL = (
    *("+recipe=quickstart", "steps=4", "gbs=8", "mbs=1", "seq=64", "vpp=1", "optim.warmup_steps=2"),
    *("model.num_layers=4", "model.hidden_size=64", "model.ffn_hidden_size=128", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "pipeline.pp_schedule=1f1b"),
)
EXPERTS = ("model.num_moe_experts=4", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=64")
LATENT = (
    *("model.multi_latent_attention=true", "model.q_lora_rank=32", "model.kv_lora_rank=32"),
    *("model.qk_head_dim=16", "model.qk_pos_emb_head_dim=16", "model.v_head_dim=16"),
)
CASES = {
    "pp2": ("pp=2", "launch.transport=plain"),
    "pp2-channels": ("pp=2", "vpp=2", "pipeline.pp_schedule=interleaved_1f1b", "launch.transport=channels"),
    "ep2-dualpipev": (
        *EXPERTS,
        *("pp=2", "vpp=2", "ep=2", "dp=2", "pipeline.pp_schedule=dualpipev", "launch.transport=channels"),
    ),
    "tp2-sp": ("pp=1", "tp=2", "parallel.sequence_parallel=true"),
    "cp2": ("pp=1", "cp=2"),
    "dp2-full": ("pp=1", "dp=2", "parallel.data_parallel_sharding=full"),
    "offload": ("pp=2", "parallel.cpu_offloading=true", "parallel.cpu_offloading_num_layers=1"),
    "async-save": ("pp=2", "checkpoint.interval=2", "checkpoint.async=true"),
    "mla": (*EXPERTS, *LATENT, "pp=2", "ep=2", "dp=2", "launch.transport=plain"),
    "replay": ("pp=2", "train.replay=1", "parallel.deterministic_mode=true"),
    "tp2-compiled": (
        *("pp=1", "tp=2", "parallel.sequence_parallel=true", "train.compile=true"),
        *("train.recompute_granularity=selective", "train.recompute_modules=[core_attn]"),
    ),
}
ALONE = (
    *("pp=1", "vpp=1", "tp=1", "cp=1", "ep=1", "dp=1", "pipeline.pp_schedule=1f1b", "launch.transport=auto"),
    *("parallel.sequence_parallel=false", "parallel.data_parallel_sharding=none", "parallel.cpu_offloading=false"),
    *("parallel.cpu_offloading_num_layers=0", "checkpoint.interval=0", "launch.device=cpu", "launch.share_gpu=false"),
    *("train.replay=0", "parallel.deterministic_mode=false", "train.compile=false"),
)
"""Behind a case: the same model and batches on one rank of the CPU."""
EIGHT_BITS = {"dense": ("model.fp8=hybrid",), "moe": ("model.fp8=e4m3", "model.fp8_recipe=rowwise")}
"""What torch multiplies on Hopper: experts row by row in e4m3 alone."""
LIMITS = (
    *("launch.start_limit=40s", "launch.edge_limit=25s", "launch.first_step_limit=40s"),
    "launch.step_limit=20s",
)
"""On a GPU: what hangs is told by ppctl's watch, in its log, before the limit of `first_run.sh` ends all."""
_APART = 1e-4
"""The largest relative difference of a loss: fp32 sums in another order, on another device, over four steps."""


def facts(name: str, device: str) -> dict[str, Any]:
    """Versions and the device."""
    cuda = torch.cuda.is_available()
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
        subprocess.run(["nvidia-smi", "topo", "-m"], check=False)
    free, total = torch.cuda.mem_get_info() if cuda else (None, None)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl_version() or ())) or None,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "devices": torch.cuda.device_count(),
        "total_bytes": total,
        "free_bytes": free,
        "commit": commit or "unknown",
    }


def words_of(model: str, device: str, *more: str) -> tuple[list[str], Plan]:
    """The overrides of a model that fits, and its plan: the most layers that leave a part of the free memory."""
    if device == "cpu":
        words = [*MODELS[model], "+scale=smoke", "launch.device=cpu", "gbs=2", "seq=64", "model.num_layers=2", *more]
        return words, _plan_of(words)
    free, _ = torch.cuda.mem_get_info()
    preset = device_called(torch.cuda.get_device_name())
    own = [f"launch.device_memory={free >> 20}MiB", "launch.memory_reserve=2GiB", "gbs=8", "seq=4096", *more]
    own += [] if preset is None else [f"cost.device={preset.name}"]
    for layers in LAYERS:
        words = [*MODELS[model], "launch.device=cuda", *own, f"model.num_layers={layers}"]
        _, plan, problems = planned(words, for_training=True)
        if plan is not None and not problems and not plan.tight:
            return words, plan
    raise Skipped(f"{free >> 30} GiB of free memory hold no layer of {MODELS[model][0]}")


def _plan_of(words: Sequence[str]) -> Plan:
    _, plan, problems = planned(words, for_training=True)
    if plan is None or problems:
        raise RuntimeError(str(problems))
    return plan


def trainer_of(words: Sequence[str], plan: Plan, device: str) -> Trainer:
    """One rank's trainer in this process."""
    print("+ ppctl train", *words, flush=True)
    composed, *_ = planned(words, for_training=True)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    session = build_session(
        composed.config, plan, 0, torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    )
    return Trainer(session, session.data.batches())


def rate(model: str, device: str, *more: str) -> dict[str, Any]:
    """A step's median rate beside the plan's, and the pipeline's seconds beside a bare loop's over the same layers."""
    words, plan = words_of(model, device, *more)
    trainer = trainer_of(words, plan, device)
    rounds = 6 if device == "cuda" else 2
    trainer.dry_pass(0)
    records = [trainer.step(step).record for step in range(_WARM + rounds)]
    (program,) = trainer.programs[0]
    contenders = {"ppctl": lambda: trainer._run_pipeline(0), "loop": lambda: bare_loop(trainer, program)}
    seconds = {name: [timed(trainer, run) for _ in range(rounds)] for name, run in contenders.items()}
    ours, loop = (statistics.median(seconds[name]) for name in contenders)
    mfu = [record["mfu"] for record in records[_WARM:]]
    cuda = device == "cuda"
    return {
        "layers": len(trainer.session.own.stages[0].layers),
        "mfu": None if None in mfu else statistics.median(mfu),
        "planned_mfu": plan.timing.mfu,
        "tokens_per_s": statistics.median(record["tokens_per_s"] for record in records[_WARM:]),
        "pipeline_s": ours,
        "bare_loop_s": loop,
        "measured_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "planned_bytes": max(rank.peak_bytes for rank in plan.pp_ranks),
        "gradients": trainer.session.model.kernels.names()["gradients"],
        "losses": [record["loss"] for record in records],
    }


def bare_loop(trainer: Trainer, program: StageProgram) -> None:
    """Forward and backward of every microbatch through the stage's own layers: no list, no recorder, no messages."""
    trainer._begin(0)
    for mb in range(trainer.session.plan.num_microbatches):
        loss, *_ = program.forward(mb, ())
        loss.backward()


def timed(trainer: Trainer, run: Callable[[], object]) -> float:
    """Seconds of one run, with an idle device before and behind it."""
    settle = torch.cuda.synchronize if trainer.on_gpu else lambda: None
    settle()
    begun = time.perf_counter()
    run()
    settle()
    return time.perf_counter() - begun


def compiled(model: str, device: str) -> dict[str, Any]:
    """`rate` of compiled layers."""
    return rate(model, device, "train.compile=true")


def fp8(model: str, device: str) -> dict[str, Any]:
    """`rate` of compiled layers whose products are in 8 bits."""
    return rate(model, device, "train.compile=true", *EIGHT_BITS[model])


def where(model: str, device: str, how: str = "") -> dict[str, Any]:
    """Where the seconds of a warmed step go, of compiled layers if that is `how`."""
    words, plan = words_of(model, device, *["train.compile=true"] * (how == "compiled"))
    trainer = trainer_of(words, plan, device)
    trainer.dry_pass(0)
    for step in range(_WARM):
        trainer.step(step)
    layers = len(trainer.session.own.stages[0].layers)
    return {"layers": layers, "how": how} | profiled(lambda: trainer.step(_WARM), device)


def memory(model: str, device: str) -> dict[str, Any]:
    """What is allocated after every action of the third step, and what the plan counts then."""
    words, plan = words_of(model, device)
    trainer = trainer_of(words, plan, device)
    recorder, held = trainer.session.pipeline.recorder, list[tuple[int, int | None]]()
    end, now = recorder.end, torch.cuda.memory_allocated if device == "cuda" else (lambda: None)

    def count(index: int) -> None:
        end(index)
        held.append((index, now()))

    for step in range(2):
        trainer.step(step)
    recorder.end = count  # type: ignore[method-assign]
    trainer.step(2)
    levels = planned_levels(plan, picture(plan, trainer.session.config).memory[0])
    actions = plan.schedule.actions[0]
    rows = [
        {"action": str(actions[index]), "measured_bytes": level, "planned_bytes": levels[index]}
        for index, level in held
        if actions[index].op in (Op.F, Op.B)
    ]
    peak, outside = None, None
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        peak, outside = torch.cuda.max_memory_allocated(), total - free - torch.cuda.memory_reserved()
    planned = plan.pp_ranks[0].peak_bytes
    return {"actions": rows, "peak_bytes": peak, "planned_bytes": planned, "outside_bytes": outside}


def planned_levels(plan: Plan, of_rank: Any) -> list[int]:
    """Bytes after each action: what is always there, and every microbatch between its F and its B."""
    level, levels = of_rank.fixed, []
    for action in plan.schedule.actions[0]:
        if action.op is Op.F:
            level += of_rank.per_microbatch[action.stage]
        elif action.op is Op.B:
            level -= of_rank.per_microbatch[action.stage]
        levels.append(level)
    return levels


def same(case: str, device: str, *more: str, **environment: str) -> dict[str, Any]:
    """The losses of several ranks and of one rank on the CPU with the same model and batches."""
    shared = ("launch.share_gpu=true",) if device == "cuda" and not more else more
    words = (*SMALL, *CASES[case], f"launch.device={device}")
    several = _trained([*words, *shared, *limits_of(words)], **environment)
    one = _trained([*words, *ALONE])
    return compared(several, one) | {"words": " ".join(CASES[case])}


def limits_of(words: Sequence[str]) -> tuple[str, ...]:
    """Limits for what is not compiled, on a GPU: there a run has it to itself, and messages that may hang."""
    return LIMITS if "launch.device=cuda" in words and "train.compile=true" not in words else ()


def compared(losses: Sequence[float], one_rank: Sequence[float]) -> dict[str, Any]:
    """A row with both, and `failed` if they differ."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, one_rank, strict=True))
    row: dict[str, Any] = {"losses": list(losses), "one_rank": list(one_rank), "apart": apart}
    return row | ({"failed": f"losses differ by {apart:.2g}"} if apart > _APART else {})


def restart(name: str, device: str) -> dict[str, Any]:
    """The losses of a run whose rank 1 is killed, beside those of one rank on the CPU."""
    over_nccl = device == "cuda" and torch.cuda.device_count() > 1
    share = [f"launch.share_gpu={str(not over_nccl).lower()}"] if device == "cuda" else []
    words = (*SMALL, *CASES["pp2"], f"steps={restarted_run.STEPS}", f"launch.device={device}", *share)
    found, losses = restarted_run.killed_once([*words, *limits_of(words)])
    return found | compared(losses, _trained([*words, *ALONE])) | {"over_nccl": over_nccl}


def _trained(overrides: Sequence[str], **environment: str) -> list[float]:
    """The losses of a run's steps."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "ppctl", "train", *overrides, f"log.dir={runs}", "--json"]
        print("+", " ".join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | environment)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}")
        return restarted_run.losses_of(Path(json.loads(done.stdout)["run"]))


def nccl(case: str, device: str) -> dict[str, Any]:
    """`same`, over NCCL: a device for every rank, or a version of it that takes several on one."""
    several = {SEVERAL_RANKS: "1"}
    if device != "cuda":
        raise Skipped("there is no CUDA device")
    ranks = _plan_of([*SMALL, *CASES[case], "launch.device=cuda"]).sizes.world
    if torch.cuda.device_count() >= ranks:
        return same(case, device, "launch.share_gpu=false")
    if nccl_shares_gpus(nccl_version(), several):
        return same(case, device, "launch.share_gpu=true", **several)
    version = ".".join(map(str, nccl_version() or ()))
    raise Skipped(f"{ranks} ranks need {ranks} devices: NCCL {version} takes one rank a GPU, 2.30.7 takes several")


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    **{"facts": facts, "same": same, "nccl": nccl, "memory": memory, "rate": rate, "compiled": compiled, "fp8": fp8},
    **{"profile": where, "restart": restart},
    **PROBES,
}


def main() -> int:
    """Measure one thing."""
    random.seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("how", nargs="?", choices=("compiled",), help="of profile")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    how = [arguments.how] if arguments.how else []
    if how and arguments.step != "profile":
        parser.error(f"{arguments.step} takes no {arguments.how}")
    if arguments.step not in PROBES:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as a run sets it
    try:
        if arguments.device == "cuda" and arguments.step != "facts" and not torch.cuda.is_available():
            raise Skipped("there is no CUDA device")
        found = STEPS[arguments.step](arguments.name, arguments.device, *how)
    except Skipped as reason:
        found = {"skipped": str(reason)}
    print(json.dumps({"step": arguments.step, "name": arguments.name} | found), flush=True)
    code = SKIPPED if "skipped" in found else int("failed" in found)
    os._exit(code)  # without the end of process groups that were not closed


if __name__ == "__main__":
    sys.exit(main())
