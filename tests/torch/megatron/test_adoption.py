"""`ppctl.adopt` and `ppctl.release` with stand-ins for Megatron's modules: places, sizes, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

import ppctl
from ppctl.errors import ConfigError, PpctlError, ScheduleError
from ppctl.megatron import forward_backward as functions
from ppctl.megatron.pipelines import on_v, v_channels
from ppctl.schedule.action import Op
from ppctl.schedule.simulate import simulate
from ppctl.schedule.trace import bubble_fraction

NAMES = (
    "get_forward_backward_func",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)


def module(monkeypatch, name, **things):
    made = ModuleType(name)
    vars(made).update(things)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def megatron(monkeypatch):
    """Modules of Megatron as they are after its imports, and a trainer that took names from them under its own."""
    theirs = {name: lambda name=name: name for name in NAMES}
    communicator = type("P2PCommunicator", (), {})
    core = "megatron.core.pipeline_parallel"
    schedules = module(monkeypatch, f"{core}.schedules", **theirs, P2PCommunicator=communicator)
    module(monkeypatch, f"{core}.p2p_communication", P2PCommunicator=communicator)
    trainer = module(monkeypatch, "a_trainer", choose=theirs["get_forward_backward_func"], other=print)
    yield SimpleNamespace(schedules=schedules, trainer=trainer, theirs=theirs, communicator=communicator)
    ppctl.release()


def groups_of(monkeypatch, pp, vpp):
    """Megatron's `parallel_state` with these sizes."""
    state = {"model_parallel_is_initialized": lambda: True, "get_pipeline_model_parallel_world_size": lambda: pp}
    state["get_virtual_pipeline_model_parallel_world_size"] = lambda: vpp
    return module(monkeypatch, "megatron.core.parallel_state", **state)


def codes(caught):
    return [problem.code for problem in caught.value.problems]


def test_every_place_gets_ours_and_gets_megatrons_back(megatron):
    done = ppctl.adopt()
    for name in NAMES:
        assert getattr(megatron.schedules, name) is getattr(functions, name)
    assert megatron.schedules.P2PCommunicator is ppctl.P2PCommunicator
    assert megatron.trainer.choose is functions.get_forward_backward_func, "whatever it is called there"
    assert megatron.trainer.other is print
    assert len(done.places) == 7
    text = str(done)
    assert "a_trainer.choose" in text and "ppctl.get_forward_backward_func" in text
    assert "they are not made yet" in text and "an earlier call" not in text
    restored = ppctl.release()
    assert sorted(restored) == sorted(done.places)
    assert all(getattr(megatron.schedules, name) is megatron.theirs[name] for name in NAMES)
    assert megatron.schedules.P2PCommunicator is megatron.communicator
    assert megatron.trainer.choose is megatron.theirs["get_forward_backward_func"]
    assert ppctl.release() == []


def test_a_second_call_undoes_the_first_and_finds_what_was_loaded_since(megatron, monkeypatch):
    ppctl.adopt("zb_h1")
    later = module(monkeypatch, "a_later_one", choose=megatron.schedules.get_forward_backward_func)
    done = ppctl.adopt("zb_h2")
    assert done.again and "undone: this one counts" in str(done)
    assert str(done.request) == "zb_h2" and functions._requested.policy == "zb_h2"
    assert later.choose is functions.get_forward_backward_func
    ppctl.release()
    assert megatron.schedules.get_forward_backward_func is megatron.theirs["get_forward_backward_func"]
    assert functions._requested.policy is None


def test_a_place_that_got_something_else_since_is_left_alone(megatron):
    ppctl.adopt()
    megatron.trainer.choose = max
    assert "a_trainer" not in {place.module for place in ppctl.release()}
    assert megatron.trainer.choose is max


@pytest.mark.parametrize(
    ("pp", "vpp", "sizes", "schedule"),
    [(4, None, "pp 4", "1f1b"), (2, 3, "pp 2 x vpp 3", "interleaved_1f1b"), (1, None, "pp 1", "1f1b (idle")],
)
def test_the_table_tells_megatrons_sizes_and_the_schedule(megatron, monkeypatch, pp, vpp, sizes, schedule):
    groups_of(monkeypatch, pp, vpp)
    done = ppctl.adopt()
    (_, told), (_, which), *_ = done.rows
    assert (told, done.sizes) == (sizes, (pp, vpp))
    assert which.startswith(schedule)


def test_the_three_functions_come_from_megatrons_sizes(megatron, monkeypatch):
    for pp, vpp, name in ((1, None, NAMES[1]), (4, None, NAMES[2]), (4, 2, NAMES[3]), (2, 1, NAMES[3])):
        groups_of(monkeypatch, pp, vpp)
        assert ppctl.get_forward_backward_func() is getattr(functions, name)
    assert ppctl.get_forward_backward_func(1) is functions.forward_backward_no_pipelining


def test_before_megatron_is_loaded_it_is_refused():
    with pytest.raises(ConfigError, match=r"adopt.. comes after the imports of Megatron") as caught:
        ppctl.adopt()
    assert codes(caught) == ["PP-E396"]
    assert caught.value.problems[0].remedy == "import megatron.core.pipeline_parallel"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ({"schedule": "zb_h3"}, "PP-E304", "there is no schedule 'zb_h3'"),
        ({"schedule": "interleaved_1f1b", "memory": 2.0}, "PP-E396", "memory is only for a schedule that is searched"),
        ({"schedule": "auto", "memory": 0}, "PP-E396", "memory must be above 0"),
        ({"schedule": "no/such.csv"}, "PP-E216", "cannot be read"),
        ({"schedule": "zb_h1"}, "PP-E305", "zb_h1 runs one chunk per rank"),
        ({"schedule": "LINES"}, "PP-E216", "2 stages on 2 rows, but pp 4 x vpp 2 = 8"),
    ],
)
def test_what_no_step_could_run_is_refused_and_nothing_is_replaced(
    megatron, monkeypatch, tmp_path, arguments, code, words
):
    groups_of(monkeypatch, 4, 2)
    if arguments["schedule"] == "LINES":
        path = tmp_path / "order.csv"
        path.write_text(ppctl.make_schedule("1f1b", pp=2, num_microbatches=4).to_csv())
        arguments = {"schedule": path}
    with pytest.raises(PpctlError, match=words) as caught:
        ppctl.adopt(**arguments)
    assert codes(caught) == [code]
    assert caught.value.problems[0].remedy
    assert megatron.schedules.get_forward_backward_func is megatron.theirs["get_forward_backward_func"]


def test_the_remedy_for_a_schedule_of_other_chunks_works(megatron, monkeypatch):
    groups_of(monkeypatch, 4, 2)
    with pytest.raises(ScheduleError) as caught:
        ppctl.adopt("zb_h1")
    remedy = f"ppctl.adopt({caught.value.problems[0].remedy})"
    assert str(eval(remedy, {"ppctl": ppctl}).request) == "interleaved_zero_bubble"


def lowered(request, pp, vpp, m, *, trains=True):
    own = "forward_only" if not trains else "interleaved_1f1b" if vpp > 1 else "1f1b"
    return functions.lowered_schedule(request, own, pp, vpp, m, None, batched=False)


def test_a_files_microbatches_must_be_the_calls(megatron, tmp_path):
    path = tmp_path / "order.CSV"
    path.write_text(ppctl.make_schedule("zb_h1", pp=2, num_microbatches=4).to_csv())
    ppctl.adopt(str(path))
    request = functions._requested
    assert lowered(request, 2, 1, 4).split
    assert not lowered(request, 2, 1, 5, trains=False).split, "an evaluation is of any size"
    with pytest.raises(ScheduleError, match="the schedule file runs 4 microbatches, but the call has 5") as caught:
        lowered(request, 2, 1, 5)
    assert codes(caught) == ["PP-E216"]


def test_auto_finds_less_bubble_within_the_memory(megatron):
    bubbles = {}
    for memory in (1.0, 2.0):
        ppctl.adopt("auto", memory=memory)
        schedule = lowered(functions._requested, 4, 1, 8)
        plain = ppctl.Costs.uniform(4)
        bubbles[memory] = bubble_fraction(simulate(schedule, plain))
    one = bubble_fraction(simulate(ppctl.make_schedule("1f1b", pp=4, num_microbatches=8), ppctl.Costs.uniform(4)))
    assert bubbles[2.0] <= bubbles[1.0] < one
    with pytest.raises(ConfigError, match="costs has 3 stages, but there are 4"):
        ppctl.adopt("auto", costs=ppctl.Costs.uniform(3))
        lowered(functions._requested, 4, 1, 8)


@pytest.mark.parametrize("trains", [True, False])
def test_a_v_is_kept_in_evaluations_and_has_its_own_channels(megatron, trains):
    ppctl.adopt("zbv_zero_bubble")
    schedule = lowered(functions._requested, 3, 2, 6, trains=trains)
    assert schedule.placement.kind == "v"
    assert schedule.capacities.keys() <= v_channels(3)
    assert trains == (schedule.capacities.keys() == v_channels(3))
    assert trains == any(action.op is Op.W for row in schedule.actions for action in row)


def test_the_second_chunk_of_a_v_is_built_as_the_stage_of_the_opposite_rank():
    groups = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 1, size=lambda: 4), tp="tp")
    first, second = on_v(groups, 0), on_v(groups, 1)
    assert (first.pp.rank(), second.pp.rank(), second.pp.size(), second.tp) == (1, 2, 4, "tp")
    assert groups.pp.rank() == 1
    with pytest.raises(ConfigError, match="not 2"):
        on_v(groups, 2)
