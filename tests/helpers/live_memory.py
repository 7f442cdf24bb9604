"""What lives, counted from outside the engine: activations in flight, bytes, and bytes kept for a backward."""

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from dense_runs import session_of, trainer_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppctl.comm.buffers import MessageSpec
from ppctl.train.replay import ReplayCheck
from ppctl.train.step import Trainer


class Packed:
    """A tensor that autograd saved; when it dies, nobody needs it any more."""

    def __init__(self, tensor):
        self.tensor = tensor


class Census:
    """Which (stage, microbatch) have saved tensors alive, and the most there ever were at once."""

    def __init__(self):
        self.alive = {}
        self.peak = 0

    def watch(self, program):
        def forward(mb, inputs):
            key = (program.stage, mb)

            def pack(tensor):
                packed = Packed(tensor)
                self.alive[key] = self.alive.get(key, 0) + 1
                self.peak = max(self.peak, len(self.alive))
                weakref.finalize(packed, self.forget, key)
                return packed

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
                return program.forward(mb, inputs)

        return replace(program, forward=forward)

    def forget(self, key):
        self.alive[key] -= 1
        if not self.alive[key]:
            del self.alive[key]


def _tensors(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class LiveBytes(TorchDispatchMode):
    """The most bytes that ever were alive in storages made inside.

    A thread of gloo lets go of a collective's tensors a moment after the wait for it has ended: that is waited for.
    """

    def __init__(self):
        super().__init__()
        self.storages = {}
        self.lent = {}
        """Storages that collectives were given: how many tensors had each before."""
        self.peak = 0
        self.bound = 0
        """What may be alive: only where this is above the peak, the dead are counted out."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        if func.namespace == "c10d":
            self._lend(_tensors((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:  # else a view, or written in place
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.bound += storage.nbytes()
        if self.bound > self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def _lend(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.lent.setdefault(storage._cdata, (StorageWeakRef(storage), torch._C._storage_Use_Count(storage._cdata)))

    def _wait_for_gloo(self):
        """Not for what is still under way, nor for what the program itself has more tensors of than before."""
        until = time.monotonic() + 0.05
        for key, (weak, holders) in self.lent.items():
            while not weak.expired() and torch._C._storage_Use_Count(key) > holders and time.monotonic() < until:
                time.sleep(0.0002)
        self.lent.clear()

    def now(self):
        self._wait_for_gloo()
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        self.bound = sum(size for _, size in self.storages.values())
        return self.bound


def kept_by(run):
    """(Bytes of the storages that are kept for the backward of `run()`, its output)."""
    storages = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run()
    return sum(storages.values()), out


def count_in_flight(mapping):
    """(most activations alive at once, what the plan says) on this rank."""
    session = session_of(mapping)
    trainer, census = trainer_of(session), Census()
    trainer.programs = [[census.watch(program) for program in call] for call in trainer.programs]
    trainer.step(0)
    assert not census.alive
    return census.peak, session.plan.pp_ranks[session.own.pp_rank].in_flight


def live_and_planned(mapping):
    """(Bytes of live storages at the peak of the second step, RankCost) of this rank."""
    with LiveBytes() as live:
        session = session_of(mapping)
        replay = ReplayCheck(session)
        trainer = Trainer(session, session.data.batches(), callback=replay)
        trainer.step(0)
        replay.pre_step(2)
        live.peak = 0
        trainer.step(1)
    return live.peak, session.plan.pp_ranks[session.own.pp_rank]


@contextmanager
def made_messages() -> Iterator[list[MessageSpec]]:
    """A context with a list, to which every new message's buffers add their spec."""
    made, make = list[MessageSpec](), MessageSpec.make
    MessageSpec.make = lambda spec, *more: made.append(spec) or make(spec, *more)
    try:
        yield made
    finally:
        MessageSpec.make = make
