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


def key(args):
    return json.dumps(args, sort_keys=True)


WORKS_HERE = {
    '{"group": 2, "m": 4, "overlap": true, "pp": 2, "vpp": 1}': "one chunk with overlap is a NameError there",
    '{"config_error": true, "group": 2, "m": 4, "overlap": true, "param_sync": true, "pp": 2, "vpp": 1}': (
        "one chunk with param_sync_func is an IndexError there"
    ),
    '{"config_error": true, "group": 4, "m": 5, "overlap": true, "pp": 2, "vpp": 2}': (
        "microbatches that leave a short last group are refused there"
    ),
    '{"config_error": true, "group": 3, "m": 2, "pp": 3, "vpp": 2}': "m smaller than the group is refused there",
    '{"config_error": true, "m": 4, "overlap": true, "pp": 3}': (
        "1F1B refuses overlap_p2p_comm there; channels overlap in every schedule"
    ),
}
"""Records that fail in the original and run here."""

REFUSED_HERE = {
    '{"config_error": true, "group": 1, "m": 4, "overlap": true, "pp": 2, "vpp": 2}': "PP-E306",
}
"""Records that both refuse: the code of the refusal."""

RIGHT_HERE = {
    '{"group": 2, "m": 4, "pp": 2, "vpp": 2}': (
        "with batched messages between two ranks a gradient is taken for an activation there: wrong from then on"
    ),
}
"""Records that the original computes wrongly: numbers are compared with the plain loop alone."""

UNSCALED_HERE = {
    '{"loss": "alias", "m": 4, "pp": 2}': "a logged loss shows the loss, not the loss divided by the microbatches",
}
"""Records whose stored data are spoilt by scaling in place."""


def by_size(records):
    sizes = {}
    for record in records:
        if key(record["args"]) not in REFUSED_HERE:
            sizes.setdefault(record["args"]["pp"], []).append(record)
    return sizes


def sampled():
    """A seeded sample of every size, and every record that is in a table or the only one of its kind."""
    named = {*WORKS_HERE, *RIGHT_HERE, *UNSCALED_HERE}
    named |= {key(r["args"]) for r in RECORDS if {"partial_ckpt", "param_sync"} & r["args"].keys()}
    chosen = []
    for size, records in by_size(RECORDS).items():
        sample = random.Random(size).sample(records, min(SAMPLE, len(records)))
        chosen += [r for r in records if r in sample or key(r["args"]) in named]
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
    if key(args) in RIGHT_HERE:
        return
    if key(args) not in UNSCALED_HERE:
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


@pytest.mark.parametrize(("args", "code"), REFUSED_HERE.items())
def test_what_would_hang_is_refused(args, code):
    with pytest.raises(RanksFailed, match=rf"ScheduleError: {code}"):
        run_ranks(trace_replay.replay_all, json.loads(args)["pp"], [json.loads(args)])


def test_the_tables_name_every_record_that_differs_and_no_other():
    failing = {key(record["args"]) for record in RECORDS if not record["ok"]}
    assert failing == WORKS_HERE.keys() | REFUSED_HERE.keys()
    wrong = {key(record["args"]) for record in RECORDS if record.get("grads_match_oracle") is False}
    assert wrong == RIGHT_HERE.keys()
