"""`ppctl resume` refuses another micro batch exactly where it changes what is minimised, and no change of ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from command import TINY
from ranks import run_ranks

from ppctl.cli import main as front
from ppctl.cli import resume, train
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import new_run
from ppctl.plan.build import build_plan
from ppctl.runs.rundir import RunDir
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

PERSON = Started("person")
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=12")
BALANCED = (*EXPERTS, "model.moe_aux_loss_coeff=0.5")
BY_SEQUENCE = (*BALANCED, "model.moe_router_load_balancing_type=seq_aux_loss")
MASKED = ("data.eod_mask_loss=true",)
SCALED = (*MASKED, "pipeline.scale_grads_in_schedule=true")
TWO_REPLICAS = ("gpus_per_node=2",)
SHARED_EXPERTS = (*TWO_REPLICAS, "ep=2")
CALLS = ("pipeline.pp_batch_size=2",)

CHANGES = [
    pytest.param(BALANCED, ("mbs=2",), True, id="aux_loss, mbs"),
    pytest.param(
        BALANCED,
        ("pipeline.pp_microbatch_size=2",),
        True,
        id="aux_loss, mbs by its other name",
        marks=pytest.mark.whole,
    ),
    pytest.param(BALANCED, ("mbs=2", *TWO_REPLICAS), True, id="aux_loss, mbs and dp", marks=pytest.mark.whole),
    pytest.param(BALANCED, TWO_REPLICAS, False, id="aux_loss, dp"),
    pytest.param(BALANCED, SHARED_EXPERTS, False, id="aux_loss, dp and ep", marks=pytest.mark.whole),
    pytest.param(BALANCED, CALLS, False, id="aux_loss, pp_batch_size"),
    pytest.param(BALANCED, ("pp=2", "vpp=2", "layout=E|tt|tt|ttL"), False, id="aux_loss, pp and layout"),
    pytest.param(BY_SEQUENCE, ("mbs=2",), False, id="seq_aux_loss, mbs"),
    pytest.param(
        (*EXPERTS, "model.moe_z_loss_coeff=0.1"), ("mbs=2",), False, id="z-loss, mbs", marks=pytest.mark.whole
    ),
    pytest.param(
        ("model.mtp_num_layers=1",), ("mbs=2",), False, id="multi-token prediction, mbs", marks=pytest.mark.whole
    ),
    pytest.param(MASKED, ("mbs=2",), False, id="masked tokens, mbs"),
    pytest.param(SCALED, ("mbs=2",), True, id="scale_grads_in_schedule, mbs"),
    pytest.param(SCALED, TWO_REPLICAS, False, id="scale_grads_in_schedule, dp"),
    pytest.param(SCALED, CALLS, False, id="scale_grads_in_schedule, pp_batch_size", marks=pytest.mark.whole),
    pytest.param(
        (*BALANCED, "model.moe_layer_freq=[0]*6"),
        ("mbs=2",),
        False,
        id="aux_loss without experts, mbs",
        marks=pytest.mark.whole,
    ),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, words = tmp_path_factory.mktemp("text") / "corpus.jsonl", random.Random(0)
    lines = [" ".join(words.choices(["stage", "rank", "bubble"], k=words.randrange(1, 12))) for _ in range(80)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def stopped_run(text: Path, settings: tuple[str, ...]) -> RunDir:
    """A run of these settings that was stopped after step 1."""
    typed = ["+recipe=quickstart", *TINY, f"data.path={text}", "pp=1", "vpp=1", "steps=9", *settings]
    run = new_run(train.prepare(front.parse("train", train, typed), PERSON), PERSON)
    (run.checkpoints / "step-1").mkdir()
    (run.checkpoints / "latest").write_text("step-1\n")
    run.write_status("stopped", step=1)
    return run


def gone_on(run: RunDir, *typed: str) -> RunConfig:
    """The config that the run would go on with."""
    return resume.prepare(front.parse("resume", resume, list(typed)), run, PERSON)[0].config


def first_norm(mapping: dict) -> float:
    """In a rank: the norm of the gradients of the objective at the initial weights."""
    config = from_mapping(mapping)
    plan = build_plan(config, {"pipeline.pp_batch_size": "command line"} if config.pipeline.pp_batch_size > 1 else {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    norm: float = Trainer(session, session.data.batches()).step(0).record["grad_norm"]
    return norm


def norm_of(config: RunConfig) -> float:
    norm: float = run_ranks(first_norm, build_plan(config, {}).sizes.world, to_mapping(config))[0]
    return norm


@pytest.mark.parametrize(("settings", "change", "refused"), CHANGES)
def test_what_changes_the_objective_is_refused_and_what_does_not_is_not(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    change: tuple[str, ...],
    refused: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = stopped_run(text, settings)
    before, after = norm_of(run.read_config()), norm_of(gone_on(run, *change, "--allow"))
    if not refused:
        assert after == pytest.approx(before, rel=1e-6)
        assert gone_on(run, *change) == gone_on(run, *change, "--allow")
        return
    assert after != pytest.approx(before, rel=1e-4)
    with pytest.raises(ConfigError, match=r"PP-E617: train.micro_batch_size was 1 and would be 2") as caught:
        gone_on(run, *change)
    assert len(caught.value.problems) == 1
    words = caught.value.problems[0].remedy.split()
    assert gone_on(run, *words[words.index("resume") + 1 :]).train.micro_batch_size == 2
