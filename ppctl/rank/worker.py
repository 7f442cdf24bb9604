"""The program of one rank, in the order of its steps.

    python -m ppctl.rank.worker --run DIR      started by ppctl's launcher: config and plan are in the run directory
    python -m ppctl.rank.worker --publish DIR  rank 0 of another launcher's ranks: gives config and plan to the others
    python -m ppctl.rank.worker --join         every other such rank
        --json                                 rank 0 prints one object on stdout, and all else on stderr
    python -m ppctl.rank.worker --refuse CODE  rank 0 has printed what is wrong: all ranks exit with CODE

Config and plan arrive composed: no rank imports Hydra.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from ppctl.checkpoint.writer import WriterAddress, WriterProcess
from ppctl.comm.groups import nccl_version
from ppctl.config.gpu_environment import gpu_environment, refuse_backend
from ppctl.config.quantities import seconds
from ppctl.errors import ConfigError
from ppctl.hang.progress import GRACE, Limits
from ppctl.host.devices import device_index, device_type, group_backends, loopback_variables
from ppctl.host.processes import python
from ppctl.rank.live_state import LiveState, Phases, TimeLeft, process_age, time_left
from ppctl.rank.own_process import Listener, StopRequest, keep_stdout, lose_lines_rather_than_fail, raise_file_limit
from ppctl.rank.rendezvous import (
    START_UP,
    OwnRank,
    SharedRun,
    meet,
    node_directory,
    publish_run,
    read_run,
    receive_run,
    refuse_run,
    sealed,
    store_of_groups,
)
from ppctl.rank.results import (
    fail,
    final_state,
    metrics_writers,
    show_begin,
    show_end,
    write_results,
    write_start_up,
)
from ppctl.rank.watchdog import Alarm, NodeWatch, dump_on_request
from ppctl.reach.start import call_roll, join_world, warm_up
from ppctl.reach.store import SealedStore
from ppctl.runs import checkpoint_folder, fence
from ppctl.runs.heartbeat import HeartbeatFile, Publisher, Write
from ppctl.runs.rundir import RunDir
from ppctl.topology import pairs_with_messages
from ppctl.train.callback import Callback, Callbacks, TrainingEnd
from ppctl.train.loop import train
from ppctl.train.own_callbacks import OwnCallback, load_callbacks
from ppctl.train.recordings import KeptGradients, StepTraces, TorchProfile
from ppctl.train.replay import ReplayCheck
from ppctl.train.replica_check import ReplicaCheck
from ppctl.train.saving import Saves
from ppctl.train.session import Session, build_session
from ppctl.train.snapshot import session_shards

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one rank and end this process: not by sys.exit, since after a failure threads of groups may never end."""
    status = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code. A failure is written into the run directory before anything else."""
    arguments = _parse(argv)
    stop, phases = StopRequest(), Phases()
    lose_lines_rather_than_fail()
    raise_file_limit()
    phases.add("import", process_age())
    own = OwnRank.from_environment()
    watched = arguments.run is not None
    directory = arguments.run or arguments.publish
    answers = keep_stdout() if arguments.json else None
    run, plan = None if directory is None else RunDir(directory), None
    with ExitStack() as at_end:
        try:
            fence.arrive()
            known = None if directory is None else read_run(directory)
            with phases("groups"):
                plain = meet(own, START_UP if known is None else _patience(known))
            entered = _receive(arguments.refuse, own, plain) if known is None else _share(known, arguments, own, plain)
            if isinstance(entered, int):
                return entered
            shared, store = entered
            run, plan = shared.run, shared.plan
            outcome = _RankProcess(shared, own, store, stop, phases, at_end, watched).run()
            state, code, message = final_state(outcome), 0, ""
        except Exception as error:
            code = fail(error, run, own.rank, plan, watched=watched)
            state, message = "failed", str(error)
    if answers is not None and run is not None:
        print(json.dumps(run.answer(state, code, message)), file=answers)
        answers.flush()
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ppctl.rank.worker", description="One rank; started by a launcher.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--run", type=Path, metavar="DIR")
    how.add_argument("--publish", type=Path, metavar="DIR")
    how.add_argument("--join", action="store_true")
    how.add_argument("--refuse", type=int, metavar="CODE")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def _patience(shared: SharedRun) -> timedelta:
    """How long to wait for other ranks: a few seconds longer than the watch waits, so that the watch reports first."""
    return timedelta(seconds=seconds(shared.config.launch.start_limit) + 10)


def _receive(refused: int | None, own: OwnRank, store: Store) -> tuple[SharedRun, SealedStore] | int:
    """The run that rank 0 publishes, or the code to exit with (on rank 0, `refused`); may exec with `launch.env`."""
    if refused is not None:
        refuse_run(store, refused, own.world_size)
        return refused
    entered = receive_run(store)
    if not isinstance(entered, int):
        _exec_with(entered[0].config.launch.env)
    return entered


def _share(
    known: SharedRun, arguments: argparse.Namespace, own: OwnRank, store: Store
) -> tuple[SharedRun, SealedStore]:
    """The run that this rank has read itself; rank 0 of another launcher's ranks also gives it to the others."""
    try:
        proved = sealed(store, known.run)
    except ConfigError as error:
        if arguments.publish is not None:
            refuse_run(store, error.exit_code, own.world_size)
        raise
    if arguments.publish is not None:
        publish_run(proved, known)
    return known, proved


def _exec_with(environment: Mapping[str, str]) -> None:
    """Start this process again with `launch.env`, as rank 0 was, unless it has these variables: some count only at an
    interpreter's start."""
    if environment.items() - os.environ.items():
        # These signals are blocked until the new process handles them.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        os.execve(sys.executable, [*python("ppctl.rank.worker"), "--join"], os.environ | dict(environment))


@dataclass(frozen=True)
class _RankProcess:
    """One rank of a run, once it has met the others."""

    shared: SharedRun
    own: OwnRank
    store: SealedStore
    stop: StopRequest
    phases: Phases
    at_end: ExitStack
    watched: bool
    """Whether ppctl's own launcher (`launch/watch.py`) watches and reports the job."""
    followers: list[OwnCallback] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        return self.own.rank == 0

    def run(self) -> TrainingEnd:
        """Connect, build, warm up, train, and write the result. A collective over the world."""
        run, config = self.shared.run, self.shared.config
        self.followers.extend(load_callbacks(config.train.callbacks or ()))  # before anything else is made
        writer = self._writer()
        device = _device(self.shared, self.own)
        directory = node_directory(self.own, self.store, self.at_end)
        heartbeat = HeartbeatFile(directory, self.own.rank)
        self.at_end.callback(heartbeat.close)
        listener = Listener()
        dump_on_request(run, self.own.rank, listener)
        limits = Limits.of(config.launch)
        alarm, watch = Alarm(limits, heartbeat.since), None if self.watched else self._watch(limits)
        publisher = self._publisher(directory, limits, run.write_heartbeats if watch is None else watch)
        with self.phases("groups"):
            self._join(directory, device, limits, watch)
        with self.phases("build"):
            session = build_session(config, self.shared.plan, self.own.rank, device, heartbeat)
        if self.leads and not self.watched:
            show_begin(run, listener, heartbeat)
        with self.phases("warm-up"):
            heartbeat.set_state("warming up")
            self._warm_up(session)
        outcome = self._train(session, writer, heartbeat, alarm, publisher)
        heartbeat.set_state("generating")
        write_results(self.shared, session, outcome, self.phases, leads=self.leads)
        if self.leads and not self.watched:
            show_end(outcome)
        # No rank exits before the result is written: the others may fail when it does.
        dist.all_reduce(torch.zeros(1, device="cpu"))
        heartbeat.set_state("done")
        alarm.off()
        if publisher is not None:
            publisher.stop()
        _disconnect(session)
        return outcome

    def _writer(self) -> Callable[[], WriterAddress]:
        """Start the node's writer of checkpoints on its first rank, before that rank uses a GPU; returns a function
        that waits for the writer's address."""
        store, name = self.store, f"checkpoint writer {self.own.rank - self.own.local_rank}"
        key = store.key_for(name)
        if self.own.local_rank == 0 and self.shared.config.checkpoint.in_background:
            try:
                address = WriterProcess(key).address
            except OSError as error:
                why = f"no checkpoint writer could be started, so ranks write by themselves: {error}"
                print(f"warning: {why}", file=sys.stderr)
                address = WriterAddress()
            store.set(name, address.name)
        return lambda: WriterAddress(str(store.get(name)), key)

    def _watch(self, limits: Limits) -> NodeWatch:
        run, plan = self.shared.run, self.shared.plan
        tried = checkpoint_folder.candidates(self.shared.config.checkpoint.resume, run.checkpoints)
        return NodeWatch(run, plan, limits, checkpoint_folder.step_of(tried[0].path if tried else None))

    def _publisher(self, directory: Path, limits: Limits, write: Write) -> Publisher | None:
        """Start, on the node's first rank, the thread that publishes its ranks' states; None on the other ranks."""
        if self.own.local_rank != 0:
            return None
        ranks = range(self.own.rank, self.own.rank + self.own.local_world_size)
        publisher = Publisher(directory, ranks, write, limits.look)
        publisher.start()
        return publisher

    def _join(self, directory: Path, device: torch.device, limits: Limits, watch: NodeWatch | None) -> None:
        """Join the world once all ranks have come and their hosts reach each other."""
        own, store, launch = self.own, self.store, self.shared.config.launch
        edge_limit, patience = float(seconds(launch.edge_limit)), _patience(self.shared).total_seconds()
        digest, pairs = self.shared.digest, partial(pairs_with_messages, self.shared.plan.sizes)
        hosts = call_roll(
            store, own.rank, own.world_size, digest, edge_limit=edge_limit, patience=patience, pairs=pairs
        )
        if watch is not None:
            watch.meet(hosts)
        nccl = nccl_version() if device.type == "cuda" else None
        backends = group_backends(device.type, nccl, os.environ, share=launch.share_gpu)
        refuse_backend(self.shared.config, backends, nccl)
        if len(hosts) == 1:
            for name, value in loopback_variables().items():
                os.environ.setdefault(name, value)
        groups = store_of_groups(store, own, directory, hosts)
        join_world(groups, own.rank, own.world_size, backends, limits.of_groups)

    def _warm_up(self, session: Session) -> None:
        launch, messages, ties = session.config.launch, session.pipeline.communicator, session.replica.ties.group
        over_gloo = session.groups["dp"]._get_backend(session.device).name() == "gloo"
        # Gloo's sum for one rank of a group comes from every other rank of it, and every rank has shards.
        shards = over_gloo and session.config.parallel.data_parallel_sharding != "none"
        exchanges = session.groups.exchanges(session.config.model.cp_comm_type, whole_rings=shards)
        edges = warm_up(self.store, launch, session.device, messages, session.groups, ties, exchanges)
        if edges is not None:
            self.shared.run.write_edges(edges)

    def _train(
        self,
        session: Session,
        writer: Callable[[], WriterAddress],
        heartbeat: HeartbeatFile,
        alarm: Alarm,
        publisher: Publisher | None,
    ) -> TrainingEnd:
        """Load and train. Callbacks that save, record and watch come first, then the user's, then rank 0's writers."""
        run, config = self.shared.run, self.shared.config
        heartbeat.set_state("loading")
        clock = time_left(config.train.exit_after) if self.leads else TimeLeft()
        clock.saved_bytes = sum(shard.tensor.nbytes for shard in session_shards(session))
        began = time.perf_counter()

        def loaded() -> None:
            self.phases.add("load", time.perf_counter() - began)
            if publisher is not None:
                publisher.publish()  # else the start's state is shown beside steps until the next publication
            if self.leads:
                write_start_up(run, self.phases, session.model.kernels, replay.coverage())

        replay = ReplayCheck(session)
        writers: list[Callback] = [*metrics_writers(self.shared, self.at_end)] if self.leads else []
        saves = Saves(session, run.checkpoints, writer=writer, followers=self.followers, note=clock.note_save)
        callbacks = Callbacks(
            saves,
            LiveState(heartbeat, alarm, clock, self.stop, loaded),
            TorchProfile(session, run.path),
            replay,  # inside callbacks that watch stages: it runs stages again, which is no work of the step
            KeptGradients(session, run.gradients),
            ReplicaCheck(session),
            StepTraces(session, lambda measured: run.write_measured_step(measured.step, measured.to_json())),
            *self.followers,
            *writers,
        )
        start = saves.start(partial(checkpoint_folder.candidates, config.checkpoint.resume, run.checkpoints))
        gc.collect()
        gc.freeze()  # a search of all that is loaded would hold up one rank by 0.1 s in any step, and all with it
        return train(session, start, callbacks)


def _device(shared: SharedRun, own: OwnRank) -> torch.device:
    """Set the variables that this rank's device needs; returns the device, now CUDA's current one. Raises ConfigError
    for an environment in which it would hang."""
    # The launcher's environment is not always the rank's: a job's setup and a node's own profile come later.
    plan = shared.plan
    missing, problems = gpu_environment(shared.config, plan.sizes.pp, os.environ, {}, routed=plan.routed)
    if shared.config.launch.device != "cpu":
        os.environ |= missing  # before CUDA is used: even counting devices may read the variable
        os.environ.setdefault("USE_PYTORCH_KERNEL_CACHE", "0")  # torch writes it in place, and runs what it finds
    launch, gpus = shared.config.launch, torch.cuda.device_count()
    if device_type(launch.device, gpus, own.local_world_size, share=launch.share_gpu) == "cpu":
        return torch.device("cpu")
    if problems:
        raise ConfigError(problems)
    device = torch.device("cuda", device_index(own.local_rank, gpus, share=launch.share_gpu))
    torch.cuda.set_device(device)
    return device


def _disconnect(session: Session) -> None:
    """End the connections, or after GRACE the process. The result is written: an error here does not change it."""
    patience = Timer(GRACE, os._exit, (0,))
    patience.daemon = True
    patience.start()
    try:
        session.pipeline.close()
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
    patience.cancel()


if __name__ == "__main__":
    run()
