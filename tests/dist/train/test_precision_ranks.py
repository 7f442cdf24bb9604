"""float64, float16 with a loss scale, autocast and deterministic kernels, on two pipeline ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense_runs import config_of, hold_to_reference, reference, session_of, train_cut, trainer_of
from one_save import save_checkpoint
from ranks import RanksFailed, run_ranks

from ppctl.config.learning_rate import lr_at
from ppctl.config.mapping import to_mapping
from ppctl.config.schema import RunConfig
from ppctl.train.snapshot import load_checkpoint


def train(mapping: dict, steps: int) -> tuple[list[dict], dict[str, torch.Tensor], set[torch.dtype]]:
    """(records, masters by name, dtypes of the weights that the stages compute with)."""
    session = session_of(mapping)
    trainer = trainer_of(session)
    records = [trainer.step(step).record for step in range(steps)]
    masters = {name: p.detach().clone() for name, p in session.replica.weights.master.items()}
    return records, masters, {p.dtype for p in session.replica.weights.model.values()}


def changed(config: RunConfig, **changes: object) -> dict:
    for key, value in changes.items():
        section, field = key.split("__")
        setattr(getattr(config, section), field, value)
    return to_mapping(config)


def test_any_cut_in_float64_gives_the_bits_of_one_process(text: Path) -> None:
    hold_to_reference(text, pp=2, vpp=2, m=4, tied=True, params_dtype="float64")


@pytest.mark.shows("parallel.params_dtype")
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_replicas_in_float64_agree_with_one_process_to_1e_12(text: Path, sharding: str) -> None:
    """A number that passed through float32 on its way would differ by 1e-8. eps as in the bitwise law's test of dp."""
    losses, norms, weights, *_ = reference(text, 4, False, eps=1e-4, dtype="float64")
    mapping = changed(
        config_of(text, pp=1, vpp=1, m=2, dp=2, data_parallel_sharding=sharding),
        parallel__params_dtype="float64",
        optim__eps=1e-4,
    )
    for rank, (rank_losses, rank_norms, masters) in enumerate(run_ranks(train_cut, 2, mapping)):
        assert rank_losses == pytest.approx(losses, rel=1e-12)
        assert rank_norms == pytest.approx(norms, rel=1e-12)
        for name, value in masters.items():
            expected = weights[name].numpy()
            if sharding == "full":
                flat = expected.reshape(-1)
                expected = flat[rank * len(value) : (rank + 1) * len(value)]
            assert value.dtype == "float64", name
            assert abs(value[: len(expected)] - expected).max() <= 1e-12 * abs(expected).max(), name


def test_float16_leaves_out_the_steps_that_overflow_on_all_ranks_alike(text: Path) -> None:
    cut = {"pp": 2, "vpp": 1, "m": 4}
    mapping = changed(
        config_of(text, **cut),
        parallel__fp16=True,
        optim__initial_loss_scale=2.0**24,
        train__steps=9,
        optim__hysteresis=1,
    )
    (records, masters, dtypes), (others, _, _) = run_ranks(train, 2, mapping, 9)
    assert [r["skipped"] for r in records] == [r["skipped"] for r in others], "all ranks alike"
    skipped = sum(r["skipped"] for r in records)
    assert 1 <= skipped < 8, "2^24 overflows, and soon fits"
    assert [r["loss_scale"] for r in records] == [2.0 ** (24 - min(i, skipped)) for i in range(9)]
    assert dtypes == {torch.float16} and {p.dtype for p in masters.values()} == {torch.float32}


@pytest.mark.shows("parallel.fp16")
def test_float16_follows_float32_under_any_scale_until_one_overflows(text: Path) -> None:
    cut = {"pp": 2, "vpp": 2, "m": 4}
    base = run_ranks(train, 2, to_mapping(config_of(text, **cut)), 3)[0][0]
    plain, scaled = (
        run_ranks(train, 2, changed(config_of(text, **cut), parallel__fp16=True, optim__loss_scale=scale), 3)[0][0]
        for scale in (1.0, 1024.0)
    )
    for records in (plain, scaled):
        assert [r["loss"] for r in records] == pytest.approx([r["loss"] for r in base], rel=1e-3)
        assert [r["grad_norm"] for r in records] == pytest.approx([r["grad_norm"] for r in base], rel=1e-2)
    with pytest.raises(RanksFailed, match="PP-E733"):
        run_ranks(train, 2, changed(config_of(text, **cut), parallel__fp16=True, optim__loss_scale=2.0**40), 1)


def save_and_load(mapping: dict, directory: str) -> tuple[dict, dict]:
    """The loss scale's state when it was saved, and after loading into a new session."""
    session = session_of(mapping)
    trainer = trainer_of(session)
    for step in range(3):
        trainer.step(step)
    path = save_checkpoint(session, Path(directory), 3, 24)
    dist.barrier()
    again = session_of(mapping)
    load_checkpoint(again, path)
    return session.replica.loss_scale.state(), again.replica.loss_scale.state()


def test_the_loss_scale_goes_on_from_a_checkpoint(text: Path, tmp_path: Path) -> None:
    mapping = changed(
        config_of(text, pp=2, vpp=1, m=4), parallel__fp16=True, optim__initial_loss_scale=2.0**30, optim__hysteresis=1
    )
    for saved, loaded in run_ranks(save_and_load, 2, mapping, str(tmp_path)):
        assert saved == loaded
        assert saved["scale"] == 2.0**27


def go_on(mapping: dict, directory: str, first: int, last: int) -> tuple[list[dict], set[float]]:
    """Steps `first` to `last` and a checkpoint; (records, the counts of AdamW's updates by parameter)."""
    session = session_of(mapping)
    if first:
        load_checkpoint(session, Path(directory) / f"step-{first}")
    trainer = trainer_of(session, first)
    records = [trainer.step(step).record for step in range(first, last)]
    save_checkpoint(session, Path(directory), last, last * session.config.train.global_batch_size)
    return records, {entry["step"].item() for entry in session.replica.optimizer.state.values()}


def test_steps_that_are_left_out_use_up_nothing_of_the_learning_rates_schedule(text: Path, tmp_path: Path) -> None:
    """Through a checkpoint in another cut, in the middle of the steps that are left out, and one behind them."""
    records: list[dict] = []
    for (first, last), pp in zip([(0, 5), (5, 11), (11, 14)], [2, 1, 2], strict=True):
        config = config_of(text, pp=pp, vpp=1, m=4)
        mapping = changed(
            config,
            parallel__fp16=True,
            optim__initial_loss_scale=2.0**27,
            optim__hysteresis=1,
            optim__lr=5e-3,
            optim__warmup_steps=2,
            train__steps=14,
        )
        ((own, counts), *others) = run_ranks(go_on, pp, mapping, str(tmp_path), first, last)
        records += own
        made = sum(not record["skipped"] for record in records)
        assert [counts, *(theirs for _, theirs in others)] == [{float(made)}] * pp, "bias correction counts updates"
    done = [sum(not record["skipped"] for record in records[:number]) for number in range(14)]
    assert [record["skipped"] for record in records[:6]] == [True] * 6 and 3 <= done[-1] < 8
    assert [record["lr"] for record in records] == [lr_at(updates, config.optim, 14) for updates in done]
    assert records[0]["lr"] == records[5]["lr"] == 2.5e-3


@pytest.mark.shows("parallel.enable_autocast", "parallel.autocast_dtype")
@pytest.mark.parametrize("modules", [None, ["core_attn", "mlp", "layernorm"]], ids=["kept", "recomputed"])
def test_autocast_computes_in_bfloat16_and_keeps_float32(text: Path, modules: list[str] | None) -> None:
    cut = {"pp": 2, "vpp": 1, "m": 4}
    base, _ = run_ranks(train, 2, to_mapping(config_of(text, **cut)), 3)
    config = config_of(text, **cut)
    if modules is not None:
        config.train.recompute_granularity, config.train.recompute_modules = "selective", modules
    mapping = changed(config, parallel__enable_autocast=True, parallel__autocast_dtype="bfloat16")
    records, _, dtypes = run_ranks(train, 2, mapping, 3)[0]
    losses, expected = [r["loss"] for r in records], [r["loss"] for r in base[0]]
    assert losses != expected
    assert losses == pytest.approx(expected, rel=1e-2)
    assert dtypes == {torch.float32}


def fill_without_an_order(mapping: dict) -> bool:
    """Whether an operation that has no deterministic kernel is refused once a session is built."""
    session_of(mapping)
    try:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]), accumulate=False)
    except RuntimeError as error:
        return "deterministic" in str(error)
    return False


@pytest.mark.shows("parallel.deterministic_mode")
def test_deterministic_mode_refuses_other_kernels(text: Path) -> None:
    cut = {"pp": 1, "vpp": 1, "m": 1}
    assert run_ranks(fill_without_an_order, 1, changed(config_of(text, **cut), parallel__deterministic_mode=True)) == [
        True
    ]
    assert run_ranks(fill_without_an_order, 1, to_mapping(config_of(text, **cut))) == [False]
