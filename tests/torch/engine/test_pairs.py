"""Pairs, executed: forward and backward advance in turns at their exchanges, with the bits of one after the other."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from autograd_thread import AutogradThread
from torch import autograd, nn
from torch.autograd.variable import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl import build_plan, compose
from ppctl.comm.turns import Turns, hand_over
from ppctl.engine.engine_error import EngineError
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.pair_runner import leave_blas_handle
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.plan.types import TensorSpec
from ppctl.schedule.action import Op, Pair
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.verify import verify
from ppctl.weight_gradients.deferred import DeferredGradients
from ppctl.weight_gradients.delivery import LEAVE_WHOLE
from ppctl.weight_gradients.intercept import intercepting

EXCHANGES = 3
M = 6


def test_a_handle_is_made_for_a_pairs_thread_in_a_thread_that_is_over(monkeypatch):
    """On CUDA torch gives it to the next thread; here the calls alone are seen."""
    seen = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device))
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _, name=name: seen.append((name, threading.current_thread())))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: seen.append(("handle", threading.current_thread())))
    leave_blas_handle(torch.device("cuda", 0))
    assert [name for name, _ in seen] == ["set_device", "set_stream", "handle"]
    (thread,) = {thread for _, thread in seen}
    assert thread is not threading.current_thread() and not thread.is_alive()


class Exchange(torch.autograd.Function):
    """What a layer sends and receives, forwards and backwards."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        note("F")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note("B")
        return gradient.clone(), None


class Layers(nn.Module):
    def __init__(self, stage, log):
        super().__init__()
        generator = torch.Generator().manual_seed(stage)
        self.weights = nn.ParameterList(torch.randn(5, 5, generator=generator) for _ in range(EXCHANGES))
        self.stage, self.log = stage, log

    def forward(self, x, mb):
        def note(kind):
            self.log.append(f"{self.stage}{kind}{mb}")
            hand_over()

        for weight in self.weights:
            x = Exchange.apply(torch.tanh(x @ weight), note)
        return x


@pytest.fixture(autouse=True, params=["the caller's thread", "a thread of the device's"])
def where_nodes_run(request, monkeypatch):
    """A backward's nodes run in the thread that asks for them, as on a CPU, or in one of their own, as on CUDA."""
    with AutogradThread() as thread:
        if "device" in request.param:
            monkeypatch.setattr(Variable, "_execution_engine", thread)
        yield "autograd" if "device" in request.param else "pair"


def run(schedule, log, fails=(), **options):
    """The losses and gradients of two stages on one rank; `fails` raises at its place in the log."""

    class Log(list):
        def append(self, entry):
            super().append(entry)
            if entry in fails:
                raise ValueError(entry)

    kept = Log()
    layers, losses = [Layers(stage, kept) for stage in range(2)], {}

    def forward(stage, mb, inputs):
        x = inputs[0] if stage else torch.full((4, 5), mb / 7, requires_grad=True)
        out = layers[stage](x, mb).float()
        if not stage:
            return (out,)
        losses[mb] = out.square().mean()
        return (losses[mb],)

    edge = (TensorSpec((4, 5), "float32"),)
    programs = [
        StageProgram(s, lambda mb, inputs, s=s: forward(s, mb, inputs), edge if s else (), () if s else edge)
        for s in range(2)
    ]
    try:
        run_schedule(schedule, programs, **options)
    finally:
        log += kept
    return [losses[mb].detach() for mb in range(M)], [p.grad for each in layers for p in each.parameters()]


def schedule():
    return lower(make_schedule("dualpipev", pp=1, vpp=2, num_microbatches=M))


def test_the_two_advance_in_turns_with_the_bits_of_one_after_the_other():
    paired, alone = schedule(), replace(schedule(), pairs=frozenset())
    assert len(paired.pairs) > M
    beside: list[str] = []
    behind: list[str] = []
    for a, b in zip(run(paired, beside), run(alone, behind), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert sorted(beside) == sorted(behind)
    for ahead, back in paired.pairs:
        own = (f"{ahead.stage}F{ahead.mb}", f"{back.stage}B{back.mb}")
        assert [entry for entry in beside if entry in own] == [*own] * EXCHANGES
        assert [entry for entry in behind if entry in own] == [own[0]] * EXCHANGES + [own[1]] * EXCHANGES


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def test_modes_and_autocast_around_a_step_hold_for_both_halves():
    """Torch keeps them for each thread, and a pair's backward has one of its own."""
    seen, results = [], []
    for each in (schedule(), replace(schedule(), pairs=frozenset())):
        with Operations() as operations, Functions() as functions, torch.autocast("cpu", torch.bfloat16):
            results.append(run(each, []))
        seen.append((sorted(operations.seen), sorted(functions.seen)))
    assert seen[0] == seen[1]
    assert all(torch.equal(x, y) for a, b in zip(*results, strict=True) for x, y in zip(a, b, strict=True))


def test_spans_of_a_pair_do_not_overlap():
    paired = schedule()
    recorder = Recorder(0, paired.actions[0])
    run(paired, [], recorder=recorder)
    spans = sorted(recorder.spans(), key=lambda span: span.start)
    assert all(before.end <= after.start for before, after in pairwise(spans))
    assert len(spans) == len(paired.actions[0])


def test_the_heartbeat_names_the_half_whose_message_is_waited_for_then_the_forward():
    class Said(list):
        def enter(self, index):
            self.append(("waits in", index))

        def work(self, index):
            self.append(("computes", index))

    paired, said = schedule(), Said()
    run(paired, [], heartbeat=said)
    row = paired.actions[0]
    for index in (row.index(pair.forward) for pair in paired.pairs):
        before = said.index(("computes", index))
        waits = [("waits in", index), ("waits in", index + 1), ("waits in", index)]
        assert said[before - 3 : before + 2] == [*waits, ("computes", index), ("waits in", index + 1)]


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_the_half_that_fails_is_named(half):
    paired = schedule()
    pair = sorted(paired.pairs)[-1]
    action = getattr(pair, half)
    kind = "F" if half == "forward" else "B"
    with pytest.raises(EngineError) as caught:
        run(paired, [], fails=(f"{action.stage}{kind}{action.mb}",))
    assert caught.value.action == action
    run(paired, [])  # the thread of the failed pair holds nothing up


def test_nodes_of_a_pairs_backward_run_in_the_thread_that_is_meant(where_nodes_run, monkeypatch):
    names = set()

    def backward(ctx, gradient):
        if Turns.current is not None:
            names.add(threading.current_thread().name.partition("_")[0])
        ctx.note("B")
        return gradient.clone(), None

    monkeypatch.setattr(Exchange, "backward", staticmethod(backward))
    run(schedule(), [])
    assert names == {where_nodes_run}


def whole_backwards_without_pairs(name, chunks, remedy):
    """Whether a run of this schedule has whole backwards alone once the remedy is added to its command line."""
    overrides = [f"pipeline.pp_schedule={name}", f"vpp={chunks}", *remedy.split()]
    composed = compose(["+recipe=quickstart", "pp=2", "gbs=8", *overrides])
    schedule = build_plan(composed.config, composed.provenance).schedule
    return not schedule.pairs and not {action.op for row in schedule.actions for action in row} & {Op.I, Op.W}


@pytest.mark.parametrize(("name", "chunks"), [("zb_h1", 1), ("v_half", 2)])
def test_what_deferred_gradients_refuse_runs_with_the_schedule_that_the_remedy_names(name, chunks):
    assert not whole_backwards_without_pairs(name, chunks, "")
    assert whole_backwards_without_pairs(name, chunks, LEAVE_WHOLE.splitlines()[0])


@pytest.mark.parametrize("how", ["grad", "backward", "Tensor.backward", "watched backward"])
def test_a_forward_beside_a_backward_that_calls_autograd_is_refused_by_name(how, monkeypatch):
    """On CUDA it would wait for the device's thread of autograd, in which the backward waits for the forward."""

    def forward(layers, x, mb):
        y = x.detach().requires_grad_()
        out = (y * y).sum()
        hand_over()
        with (
            intercepting(DeferredGradients()) if "watched" in how else nullcontext()
        ):  # as in a stage with split backwards
            torch.autograd.grad(out, y) if how == "grad" else out.backward() if "." in how else autograd.backward(out)
        return plain(layers, x, mb)

    plain = Layers.forward
    monkeypatch.setattr(Layers, "forward", forward)
    run(replace(schedule(), pairs=frozenset()), [])
    engine = Variable._execution_engine
    with pytest.raises(EngineError, match="this forward calls autograd") as caught:
        run(schedule(), [])
    (problem,) = caught.value.problems
    assert problem.code == "PP-E784"
    assert whole_backwards_without_pairs("dualpipev", 2, problem.remedy)
    assert caught.value.action in {pair.forward for pair in schedule().pairs}
    assert Variable._execution_engine is engine


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7])
def test_lowered_pairs_stand_side_by_side(pp):
    for m in (2 * pp, 2 * pp + 3, 5 * pp):
        lowered = lower(make_schedule("dualpipev", pp=pp, vpp=2, num_microbatches=m))
        assert verify(lowered) == []
        beside = {Pair(*two) for row in lowered.actions for two in pairwise(row)}
        assert lowered.pairs <= beside
