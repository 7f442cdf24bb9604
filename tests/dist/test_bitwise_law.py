"""The bitwise law: whatever the cut, five steps give the bits of one plain-torch process."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.plan.build import build_plan
from ppctl.schedule.action import Op
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import to_slots
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

STEPS = 5
SEQ = 16


def config_of(
    text: Path,
    *,
    pp: int,
    vpp: int | None,
    m: int,
    layout: str | None = None,
    tied: bool = False,
    dp: int = 1,
    **parallel: object,
) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(
            num_layers=6,
            hidden_size=16,
            ffn_hidden_size=24,
            num_attention_heads=2,
            num_query_groups=1,
            share_embeddings_and_output_weights=tied,
        )
    )
    config.parallel.pipeline_model_parallel_size = pp
    config.parallel.virtual_pipeline_model_parallel_size = vpp
    config.parallel.data_parallel_size = dp
    config.parallel.pipeline_model_parallel_layout = layout
    config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm, config.parallel.batch_p2p_sync = (
        True,
        False,
        False,
    )
    config.parallel.deallocate_pipeline_outputs = True
    for key, value in parallel.items():
        owner = next(
            part for part in (config.pipeline, config.train, config.optim, config.parallel) if hasattr(part, key)
        )
        setattr(owner, key, value)
    config.data.path, config.data.seq_length = str(text), SEQ
    config.train.steps, config.train.micro_batch_size = STEPS, 2
    config.train.global_batch_size = 2 * m * dp
    config.optim.lr, config.optim.warmup_steps = 1e-3, 2
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cpu", 1, pp * dp
    return config


def train_cut(mapping: dict, loss_fn: Callable | None = None) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Runs in a rank: losses, norms and this rank's weights after STEPS steps."""
    config = from_mapping(mapping)
    config.pipeline.loss_fn = loss_fn
    given = {} if config.pipeline.pp_batch_size == 1 else {"pipeline.pp_batch_size": "command line"}
    plan = build_plan(config, given)
    assert not plan.problems, plan.problems
    rank = torch.distributed.get_rank()
    session = build_session(config, plan, rank, torch.device("cpu"))
    trainer = Trainer(session, session.batches(), lambda: False)
    records = [trainer.step(step).record for step in range(STEPS)]
    weights = {name: p.detach().numpy().copy() for name, p in session.weights.master.items()}
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], weights


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    words = random.Random(0).choices(["the", "of", "stage", "rank", "bubble", "and", "a", "layer"], k=3000)
    path.write_text(" ".join(words))
    return path


@cache
def reference(text: Path, m: int, tied: bool, eps: float = 1e-8, scale_grads: bool = False, clip_grad: float = 1.0):
    config = config_of(text, pp=1, vpp=1, m=m, tied=tied)
    config.optim.eps, config.optim.clip_grad = eps, clip_grad
    return train_reference(
        config.model, config.optim, config.train.seed, microbatches(config, STEPS), scale_grads=scale_grads
    )


def hold_to_reference(text: Path, *, m: int, tied: bool = False, **cut: object) -> None:
    losses, norms, weights, *_ = reference(text, m, tied, scale_grads=bool(cut.get("scale_grads_in_schedule")))
    config = config_of(text, m=m, tied=tied, **cut)  # type: ignore[arg-type]
    got = run_ranks(train_cut, cut["pp"], to_mapping(config), config.pipeline.loss_fn)
    seen: set[str] = set()
    for rank, (rank_losses, rank_norms, rank_weights) in enumerate(got):
        assert rank_losses == losses, f"rank {rank}"
        assert rank_norms == norms, f"rank {rank}"
        for name, value in rank_weights.items():
            assert (value == weights[name].numpy()).all(), f"rank {rank}: {name}"
        seen |= rank_weights.keys()
    assert seen == weights.keys()
    assert losses[-1] < losses[0]


def numbers_of_microbatches(pp: int) -> list[int]:
    return sorted({1, 2, pp, pp + 1, 2 * pp + 1})


GRID = [
    (pp, vpp, m) for pp in (1, 2, 4) for vpp in (1, 2, 3) for m in numbers_of_microbatches(pp) if vpp == 1 or m >= pp
]
SAMPLE = random.Random(7).sample(GRID, 8)


@pytest.mark.parametrize(("pp", "vpp", "m"), SAMPLE)
def test_any_cut_gives_the_bits_of_one_process(text, pp, vpp, m):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m)


@pytest.mark.whole
@pytest.mark.parametrize(("pp", "vpp", "m"), GRID)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("deallocate", [False, True])
def test_every_cut_gives_the_bits_of_one_process(text, pp, vpp, m, tied, deallocate):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=tied, deallocate_pipeline_outputs=deallocate)


@pytest.mark.parametrize(
    ("pp", "vpp", "layout"),
    [
        pytest.param(4, 1, "E||t*6|L", id="empty stage"),
        pytest.param(4, 1, "E|t*3|t*3|L", id="E alone and L alone"),
        pytest.param(2, 3, "E|t*2||t*3|t|L", id="empty stage among chunks"),
        pytest.param(2, 2, "Et*5|t||L", id="uneven"),
        pytest.param(1, 4, "Et|t*4||tL", id="one rank, four chunks"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_any_layout_gives_the_bits_of_one_process(text, pp, vpp, layout, tied):
    hold_to_reference(text, pp=pp, vpp=vpp, m=4, layout=layout, tied=tied)


@pytest.mark.parametrize("deallocate", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_schedule_and_deallocation_change_no_bit(text, schedule, deallocate):
    hold_to_reference(text, pp=2, vpp=1, m=5, tied=True, pp_schedule=schedule, deallocate_pipeline_outputs=deallocate)


@pytest.mark.parametrize(("pp", "vpp", "m", "extra"), [(4, 1, 9, 1), (4, 1, 6, 3), (3, 1, 2, "auto"), (4, 2, 9, 1)])
def test_a_longer_warmup_changes_no_bit(text, pp, vpp, m, extra):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, extra_warmup=extra)


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "calls", "how"),
    [
        (1, 1, 4, 2, {}),
        (2, 1, 6, 3, {}),
        (2, 2, 4, 2, {}),
        (4, 1, 4, 4, {"variable_seq_lengths": True}),
        (3, 1, 6, 2, {"batch_p2p_comm": True, "overlap_p2p_comm": False}),
    ],
)
def test_several_schedule_calls_a_step_change_no_bit(text, pp, vpp, m, calls, how):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, pp_batch_size=2 * m // calls, **how)


@pytest.mark.parametrize(("pp", "vpp", "m", "calls"), [(1, 1, 3, 1), (2, 2, 4, 1), (3, 1, 6, 2)])
def test_scaling_in_the_schedule_weighs_every_microbatch_alike(text, pp, vpp, m, calls):
    how = {"scale_grads_in_schedule": True} | ({"pp_batch_size": 2 * m // calls} if calls > 1 else {})
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=True, **how)


def own_loss(logits, labels):
    """Cross entropy over the labels that count, as a user would write it."""
    counts = (labels != -100).float()
    each = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)
    return (each * counts).sum()


def own_mean(logits, labels):
    return own_loss(logits, labels) / float((labels != -100).sum())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_given_loss_is_a_sum_over_tokens_or_a_mean(text, scaled):
    how = {"loss_fn": own_mean if scaled else own_loss, "scale_grads_in_schedule": scaled}
    hold_to_reference(text, pp=2, vpp=1, m=3, **how)


FUSED = dict(batch_p2p_comm=True, batch_p2p_sync=True, overlap_p2p_comm=False)
MODES = {
    "fused": FUSED,
    "one by one": dict(overlap_p2p_comm=False),
    "variable": dict(variable_seq_lengths=True),
    "fused, variable": dict(FUSED, variable_seq_lengths=True),
    "warm-up and flush overlapped": dict(overlap_p2p_comm_warmup_flush=True),
    "a backend of its own": dict(pipeline_model_parallel_comm_backend="gloo"),
}
MODE_SAMPLE = [(mode, *cut) for mode, cut in zip(MODES, random.Random(9).sample(GRID[6:], len(MODES)), strict=True)]


@pytest.mark.parametrize(("mode", "pp", "vpp", "m"), [*MODE_SAMPLE, ("fused", 2, 2, 5), ("fused", 4, 1, 9)])
def test_how_messages_travel_changes_no_bit(text, mode, pp, vpp, m):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, tied=m % 2 == 0, **MODES[mode])


@pytest.mark.whole
@pytest.mark.parametrize(("pp", "vpp", "m"), [cut for cut in GRID if cut[0] > 1])
@pytest.mark.parametrize("mode", MODES)
def test_how_messages_travel_changes_no_bit_in_any_cut(text, mode, pp, vpp, m):
    hold_to_reference(text, pp=pp, vpp=vpp, m=m, **MODES[mode])


def v_shaped(pp: int, m: int) -> str:
    """ZBV with its backwards made whole, as CSV: the turn of the V is on one rank, and so are its two ends."""
    rows = make_schedule("zbv_zero_bubble", pp=pp, vpp=2, num_microbatches=m).actions
    return "".join(",".join(str(a).replace("I", "B") for a in row if a.op is not Op.W) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("csv", "pp", "m"),
    [
        pytest.param("0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", 2, 3, id="loop"),
        pytest.param(v_shaped(2, 5), 2, 5, id="V"),
        pytest.param(v_shaped(3, 4), 3, 4, id="V of three"),
        pytest.param(to_slots(make_schedule("interleaved_1f1b", pp=2, vpp=3, num_microbatches=3)), 2, 3, id="dumped"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_given_schedule_gives_the_bits_of_one_process(text, tmp_path, csv, pp, m, tied):
    path = tmp_path / "schedule.csv"
    path.write_text(csv)
    hold_to_reference(text, pp=pp, vpp=None, m=m, tied=tied, pp_schedule_csv=str(path))


def test_two_replicas_agree_with_one_process_to_a_millionth(text):
    """dp changes the order of the sum over microbatches: each rank sums its own first. All else is the same.

    eps is 1e-4 on both sides: AdamW divides by sqrt(v) + eps, and at 1e-8 the last bit of a nearly zero gradient can
    decide about a whole step of its weight.
    """
    losses, norms, weights, *_ = reference(text, 4, False, eps=1e-4)
    config = config_of(text, pp=2, vpp=1, m=2, dp=2)
    config.optim.eps = 1e-4
    for rank_losses, rank_norms, rank_weights in run_ranks(train_cut, 4, to_mapping(config)):
        assert rank_losses == pytest.approx(losses, rel=1e-6)
        assert rank_norms == pytest.approx(norms, rel=1e-6)
        for name, value in rank_weights.items():
            expected = weights[name].numpy()
            assert abs(value - expected).max() / abs(expected).max() <= 1e-6, name
