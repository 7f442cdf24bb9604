"""Megatron's traces replayed through the public API on gloo ranks: order, data, gradients and sync events.

Bit by bit equal to a plain loop; to the record, as far as float64 printed by another build can be. Differences from the
originals are on purpose, and every one of them is in a table here.
"""

import json
import random
from pathlib import Path

import pytest
import torch
import trace_replay
from ranks import RanksFailed, run_ranks

RECORDS = json.loads((Path(__file__).parents[2] / "golden" / "trace.json").read_text())["records"]
SAMPLE = 4
"""Records of each pipeline size in a normal run."""


WORKS_HERE = {
    "one chunk is a NameError there with overlap, an IndexError with param_sync_func": lambda args: (
        args.get("vpp") == 1
    ),
    "a last group that does not fill the pipeline is refused there": lambda args: (
        "group" in args and 0 < args["m"] % args["group"] < args["pp"]
    ),
    "1F1B refuses overlap_p2p_comm there; channels overlap in every schedule": lambda args: (
        "vpp" not in args and args.get("overlap", False)
    ),
}
"""Arguments that fail in the original and run here."""


def is_refused(args):
    """Whether both refuse the arguments, here with PP-E306: groups that do not fill the pipeline would hang it."""
    return args.get("group", args["pp"]) < args["pp"]


def is_right_here(args):
    """Whether the original computes wrongly, so that numbers are compared with the plain loop alone.

    With batched messages between two ranks a gradient is taken for an activation there.
    """
    batched = not (args.get("overlap") or args.get("batch_false") or args.get("forward_only"))
    return args["pp"] == 2 and args.get("vpp", 1) > 1 and batched


def is_unscaled(args):
    """Whether the stored data are spoilt there: a logged loss shows the loss divided by the microbatches."""
    return args.get("loss") == "alias"


def by_size(records):
    sizes = {}
    for record in records:
        if not is_refused(record["args"]):
            sizes.setdefault(record["args"]["pp"], []).append(record)
    return sizes


def sampled():
    """A seeded sample of every size, and every record that differs from the original or is the only one of its kind."""
    differ = (is_right_here, is_unscaled, *WORKS_HERE.values())
    named = [r for r in RECORDS if any(differs(r["args"]) for differs in differ)]
    named += [r for r in RECORDS if {"partial_ckpt", "param_sync"} & r["args"].keys()]
    chosen = []
    for size, records in by_size(RECORDS).items():
        sample = random.Random(size).sample(records, min(SAMPLE, len(records)))
        chosen += [r for r in records if r in sample or r in named]
    return by_size(chosen)


def check(records):
    cases = [record["args"] for record in records]
    by_rank = run_ranks(trace_replay.replay_all, cases[0]["pp"], cases)
    for record, *ranks in zip(records, *by_rank, strict=True):
        check_record(record, ranks)


def check_record(record, ranks):
    args = record["args"]
    losses, gradients = trace_replay.plain_loop(args)
    for rank, (events, store, own_gradients, config_untouched) in enumerate(ranks):
        assert config_untouched
        check_store(args, losses, store if rank == len(ranks) - 1 else None)
        assert rank == len(ranks) - 1 or store == []
        for chunk, gradient in enumerate(own_gradients):
            reference = gradients[rank + args["pp"] * chunk]
            assert (gradient is None) == bool(args.get("forward_only")), args
            assert gradient is None or torch.equal(gradient, reference), args
        if record["ok"]:
            check_against_original(record["ranks"][rank], args, events, store, own_gradients)


def check_store(args, losses, store):
    """On the last rank: what the loss functions made of every microbatch, in order, bit by bit."""
    if store is None:
        return
    name = {"3": "lm loss sum", "alias": "raw"}.get(args.get("loss"), "lm loss")
    assert [entry[name] for entry in store] == losses, args
    if args.get("loss") == "alias":
        assert all(e["alias"].item() == e["same_obj"].item() == e["raw"] for e in store)


def check_against_original(rank, args, events, store, gradients):
    assert events == [event for event in rank["events"] if event[0] != "comm"], args
    if is_right_here(args):
        return
    if not is_unscaled(args):
        assert [list(entry) for entry in store] == [list(entry) for entry in rank["forward_data_store"]]
        for entry, told in zip(store, rank["forward_data_store"], strict=True):
            assert entry == pytest.approx(told, rel=1e-12), args
    if not args.get("forward_only"):
        sums = [gradient.abs().sum().item() for gradient in gradients]
        assert sums == pytest.approx(rank["grad_abs_sum_per_chunk"], rel=1e-12), args


@pytest.mark.shows("parallel.grad_sync_func", "parallel.param_sync_func")
@pytest.mark.parametrize("pp", sorted(by_size(RECORDS)))
def test_a_sample_of_the_traces(pp):
    check(sampled()[pp])


@pytest.mark.whole
@pytest.mark.parametrize("pp", sorted(by_size(RECORDS)))
def test_all_traces(pp):
    check(by_size(RECORDS)[pp])


@pytest.mark.parametrize("args", [r["args"] for r in RECORDS if is_refused(r["args"])], ids=json.dumps)
def test_what_would_hang_is_refused(args):
    with pytest.raises(RanksFailed, match="ScheduleError: PP-E306"):
        run_ranks(trace_replay.replay_all, args["pp"], [args])


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: json.dumps(record["args"]))
def test_the_rules_name_every_record_that_differs_and_no_other(record):
    args = record["args"]
    assert record["ok"] != (is_refused(args) or any(fails(args) for fails in WORKS_HERE.values()))
    assert (record.get("grads_match_oracle") is False) == is_right_here(args)
