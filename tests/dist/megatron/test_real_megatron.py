"""ppctl's functions beside those of the real megatron-core, on CPUs: a GPTModel trained three steps by each.

Losses, every gradient and every weight are compared bit by bit. Ours run first, in new processes.
"""

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from pairwise import pairwise
from ranks import run_ranks
from real_megatron import (
    Case,
    arguments_of,
    build,
    chunk_of,
    compared,
    config_of,
    differences,
    initialise,
    needs_megatron,
    on_cpus,
    run_steps,
    train,
    wrapped,
)

pytestmark = needs_megatron

SIZES = (
    (2, None, 1, 1),
    (4, None, 1, 1),
    (2, 2, 1, 1),
    (2, None, 2, 1),
    (2, 2, 2, 1),
    (1, None, 2, 1),
    (2, None, 1, 2),
)
MODELS = ("", "tied", "moe", "mtp", "moe mtp", "bias", "partial", "variable")
PARALLEL = ("", "ddp", "ddp overlap", "ddp overlap align", "dist", "dist overlap gather", "dist overlap gather align")
LOSSES = ("", "tokens", "triple")
OTHERS = ("", "fusion", "bf16", "batched", "sgd", "sp")


def is_valid(row):
    (pp, vpp, _, tp), model, parallel, loss, other = row
    ddp = parallel != ""
    return (
        (ddp or model != "tied")
        and (ddp or other not in ("fusion", "bf16"))
        and (ddp or loss != "tokens")  # Megatron's finalize_model_grads divides by them
        and ((vpp is not None and pp > 2) or other != "batched")
        and ("dist" not in parallel or other != "sgd")  # Megatron's distributed optimizer is Adam alone
        and (other == "sp") == (tp > 1)
        and ("gather align" not in parallel or vpp is not None)
        and (pp > 1 or model not in ("variable",))
    )


GRID = [row for row in itertools.product(SIZES, MODELS, PARALLEL, LOSSES, OTHERS) if is_valid(row)]
SMOKES = [
    ((2, 2, 1, 1), "moe mtp", "ddp overlap align", "", ""),
    ((2, None, 1, 1), "tied", "ddp overlap", "tokens", "fusion"),
]
CASES = [Case(*row[0], " ".join(row[1:])) for row in pairwise(GRID, SMOKES)]


def show(results, case):
    for result in results:
        assert result["differ"] == []
        assert result["compared"] > 0
        assert result["nonzero"] >= 0.9 * result["gradients"] > 0
        assert result["world"] == case.world
    losses = [result["losses"] for result in results]
    assert any(step and all(map(bool, step)) for rank in losses for step in rank), "no rank has a loss"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if number < len(SMOKES) else pytest.mark.whole) for number, case in enumerate(CASES)],
    ids=str,
)
def test_three_steps_have_the_bits_of_megatrons_own_functions(case):
    show(run_ranks(compared, case.world, case, timeout=110.0), case)


def adopted(case, schedule, memory=None):
    """Ours in Megatron's places under a schedule, then Megatron's own after `release`: what differs, and what was
    said."""
    on_cpus()
    import megatron.core.pipeline_parallel  # noqa: F401

    import ppctl

    theirs_before = sys.modules["megatron.core.pipeline_parallel.schedules"].get_forward_backward_func
    early = str(ppctl.adopt(schedule, memory=memory))
    initialise(case)
    table = str(ppctl.adopt(schedule, memory=memory))
    from megatron.core.pipeline_parallel import get_forward_backward_func

    assert get_forward_backward_func is ppctl.get_forward_backward_func is not theirs_before
    ours = train(case, get_forward_backward_func)
    from ppctl.megatron import forward_backward as functions

    ran = str(functions._requested)
    ppctl.release()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    assert get_forward_backward_func is theirs_before
    return differences(ours, train(case, get_forward_backward_func)), early, table, ran


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (Case(2, words="ddp overlap"), "zb_h1"),
        pytest.param(Case(4, words="tied ddp overlap align"), "zb_h2", marks=pytest.mark.whole),
        pytest.param(Case(2, 2, words="dist overlap gather align"), "interleaved_zero_bubble", marks=pytest.mark.whole),
        pytest.param(Case(2, None, 2, words="moe dist bf16"), "auto", marks=pytest.mark.whole),
        pytest.param(Case(2, 2, 2, words="ddp overlap"), "auto", marks=pytest.mark.whole),
        pytest.param(Case(2, None, 1, 2, "sp ddp overlap"), "zb_h1", marks=pytest.mark.whole),
        pytest.param(Case(2, words="fusion ddp overlap"), "zb_h1", marks=pytest.mark.whole),
        pytest.param(Case(2, words="moe mtp ddp"), "gpipe", marks=pytest.mark.whole),
    ],
    ids=str,
)
def test_adopted_schedules_have_the_bits_of_megatrons_own(case, schedule):
    for differ, early, table, ran in run_ranks(adopted, case.world, case, schedule, timeout=110.0):
        assert differ == []
        assert "they are not made yet" in early and "undone: this one counts" in table
        assert f"pp {case.pp}" in table and schedule in table and ran.startswith(schedule)
        assert "megatron.core.pipeline_parallel.get_forward_backward_func" in table


def on_a_v(case, schedule):
    """A GPTModel on a V against the same layers in Megatron's own loop: by name what a layer's gradients are."""
    on_cpus()
    initialise(case)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    import ppctl

    refused = ""
    ppctl.adopt(schedule)
    try:
        train(case, ppctl.get_forward_backward_func)
    except ppctl.errors.ConfigError as error:
        refused = str(error)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config, chunks = config_of(case), []
    for number in range(2):
        placed = ppctl.on_v(groups, number)
        stage = groups.pp.rank() if number == 0 else 2 * case.pp - 1 - groups.pp.rank()
        torch.manual_seed(100 + stage)
        ends = {"pre_process": stage == 0, "post_process": stage == 2 * case.pp - 1}
        chunks.append(chunk_of(case, config, number, pg_collection=placed, **ends))
    numbers = [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]
    chunks, optimizer = wrapped(case, config, chunks)
    ours = run_steps(case, chunks, optimizer, ppctl.get_forward_backward_func)
    ppctl.release()
    config, chunks = config_of(case), []
    for number in range(2):
        stage = number * case.pp + groups.pp.rank()
        torch.manual_seed(100 + stage)
        ends = {"pre_process": stage == 0, "post_process": stage == 2 * case.pp - 1}
        chunks.append(chunk_of(case, config, number, **ends))
    loop_numbers = [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]
    chunks, optimizer = wrapped(case, config, chunks)
    theirs = run_steps(case, chunks, optimizer, get_forward_backward_func)
    return refused, numbers, loop_numbers, by_chunk(ours), by_chunk(theirs)


def by_chunk(found):
    """(chunk, name without it) -> bytes of a value; and the losses."""
    parts = {}
    for name, value in found.items():
        _, step, kind, *rest = name.split()
        if kind == "losses":
            parts.setdefault("losses", []).append(value)
        else:
            parts[int(rest[0]), f"{step} {kind} {rest[1]}"] = value.numpy().tobytes()
    return parts


@pytest.mark.whole
@pytest.mark.parametrize("schedule", ["zbv_zero_bubble", "v_min"])
def test_a_v_has_the_bits_and_layer_numbers_of_megatrons_loop_or_is_refused(schedule):
    case = Case(2, 2)
    results = run_ranks(on_a_v, 2, case, schedule, timeout=110.0)
    stages = {}
    for rank, (refused, numbers, loop_numbers, _, _) in enumerate(results):
        assert "PP-E396" in refused and "the model was built for a loop" in refused
        stages[rank], stages[3 - rank] = numbers[:1], numbers[1:]
        assert loop_numbers == [rank + 1, rank + 3]
    assert stages == {0: [1], 1: [2], 2: [3], 3: [4]}, "layers are numbered in the model's order"
    losses = [result[3]["losses"] for result in results], [result[4]["losses"] for result in results]
    assert losses[0][0] == losses[1][1] and losses[0][0][0]
    for rank, (_, _, _, ours, _) in enumerate(results):
        loop_rank = 1 - rank  # stage 3 - rank is on this rank of the loop, as its second chunk
        for there, chunk in ((results[rank][4], 0), (results[loop_rank][4], 1)):
            pairs = [(key, value) for key, value in ours.items() if key[0] == chunk]
            assert pairs and all(there[key] == value for key, value in pairs)


def tied_on_a_v():
    on_cpus()
    case = Case(2, 2, words="tied ddp")
    initialise(case)
    import ppctl
    from ppctl.megatron.pipelines import misplaced_on_v
    from ppctl.schedule.action import Placement

    _, chunks, _ = build(case)
    for chunk, (first, last) in zip(chunks, [(True, False), (False, True)], strict=True):
        chunk.module.pre_process, chunk.module.post_process = first, last
    return misplaced_on_v(chunks, Placement("v", 2, 4), 0), ppctl.__name__


@pytest.mark.whole
def test_a_tied_embedding_on_a_v_is_refused_by_name():
    for told, _ in run_ranks(tied_on_a_v, 2, timeout=110.0):
        assert "Megatron shares their weight between two ranks" in told


def with_megatrons_communicator(case):
    """Ours with Megatron's P2PCommunicator and its groups passed by hand, and through the chooser of a later call."""
    on_cpus()
    initialise(case)
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving as theirs,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection

    import ppctl

    def run(function):
        torch.manual_seed(5)
        config, chunks, optimizer = build(case)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        more = {"p2p_communicator": P2PCommunicator(groups.pp, config), "pg_collection": groups}
        return run_steps(case, chunks, optimizer, lambda: function, **more)

    functions = [
        ppctl.forward_backward_pipelining_without_interleaving,
        ppctl.megatron.forward_backward._choose_and_call,
        theirs,
    ]
    one, two, three = map(run, functions)
    return differences(one, three) + differences(two, three)


@pytest.mark.whole
def test_megatrons_own_communicator_and_groups_are_accepted():
    assert run_ranks(with_megatrons_communicator, 4, Case(2, None, 2, words="ddp"), timeout=110.0) == [[]] * 4


def under_timers(case):
    """The timers of Megatron that a step starts, by name, and the log that Megatron makes of them."""
    on_cpus()
    initialise(case)
    from megatron.core.timers import Timers

    import ppctl

    config, chunks, _ = build(case)
    config.timers = timers = Timers(log_level=2, log_option="max")
    ppctl.get_forward_backward_func()(**arguments_of(case, chunks, 0))
    return sorted(timers._timers), timers.get_all_timers_string()


@pytest.mark.whole
def test_megatrons_timers_show_a_step():
    first, _ = run_ranks(under_timers, 2, Case(2), timeout=110.0)
    names, log = first
    assert names == [
        "backward-compute",
        "backward-recv",
        "forward-backward",
        "forward-compute",
        "forward-send",
        "forward-send-backward-recv",
    ]
    assert "forward-send-backward-recv" in log


def by_the_page(code):
    """The page's script, then a step through the name that Megatron's trainer asks for."""
    on_cpus()
    exec(code, {})
    case = Case(2)
    initialise(case)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    import ppctl

    assert get_forward_backward_func is ppctl.get_forward_backward_func
    adopted_losses = train(case, get_forward_backward_func)
    ppctl.release()
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return differences(adopted_losses, train(case, get_forward_backward_func))


@pytest.mark.whole
def test_the_pages_script_is_all_that_a_trainer_adds():
    page = (Path(__file__).parents[3] / "docs" / "inside-megatron.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    assert run_ranks(by_the_page, 2, code, timeout=110.0) == [[], []]
