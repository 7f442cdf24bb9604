"""pytest's plugin under which Megatron's own unit tests run on CPUs over gloo, with ppctl in its places if asked.

It takes the place of Megatron's conftest, which fetches data for other tests. What stands in for something else:

* everything of `real_megatron.on_cpus`, with as many devices as ranks;
* gloo for `nccl`; groups' `pg_options` and `device_id` are dropped; whoever waits for another rank waits a minute;
* `destroy_model_parallel` also ends the groups, whose threads would add up over the tests of a world;
* while test files are read, `torch.cuda.is_available()` is true: Megatron skips tests of mere tables without a GPU;
* `triton`, `triton.language` and `six`, where they are not installed: modules that are never called here;
* Megatron's local layers for Transformer Engine's (`get_gpt_layer_with_transformer_engine_spec`, and
  `use_transformer_engine=True` of the specs of decoder blocks and MTP blocks);
* `tmp_path_dist_ckpt`, a fixture of Megatron's conftest: a folder that all ranks of a world share.

Import it in a process of its own, `enter` a rank in a fork of it, then run pytest there.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo  # before the patches: it makes a table of torch's functions, in which none may stand twice
import torch.distributed as dist
from real_megatron import on_cpus

WAIT = timedelta(seconds=60)
_init, _group = dist.init_process_group, dist.new_group
_calls: list[str] = []
"""ppctl's functions that have been called in the place of Megatron's in this test."""


def _over_gloo(backend: Any) -> Any:
    return "gloo" if backend == "nccl" else backend


def _initialise(backend: Any = None, *arguments: Any, **named: Any) -> None:
    named.pop("device_id", None)
    _init(_over_gloo(backend), *arguments, **named | {"timeout": WAIT})


def _new_group(*arguments: Any, **named: Any) -> Any:
    named.pop("pg_options", None)
    if "backend" in named:
        named["backend"] = _over_gloo(named["backend"])
    return _group(*arguments, **named | {"timeout": WAIT})


_named = dist.distributed_c10d._process_group_name


def _named_by_ranks(ranks: Any, use_hashed_name: bool) -> Any:
    """torch's name of a group, with its ranks.

    A test makes groups whose ranks differ between pipelines by the same call. torch counts them alike, and gloo, which
    meets at once and not at the first message as nccl does, would mix them up.
    """
    return f"{_named(ranks, use_hashed_name)}:{'-'.join(map(str, ranks))}"


def _local_layers(**wanted: Any) -> Any:
    """The spec of a layer without Transformer Engine, with whichever of the wanted properties it knows."""
    import inspect

    from megatron.core.models.gpt import gpt_layer_specs

    known = inspect.signature(gpt_layer_specs.get_gpt_layer_local_spec).parameters
    return gpt_layer_specs.get_gpt_layer_local_spec(**{name: wanted[name] for name in wanted if name in known})


def _without_engine(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named | {"use_transformer_engine": False})

    return called


def _ending_groups(destroy: Callable[[], None]) -> Callable[[], None]:
    def called() -> None:
        destroy()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    return called


class _Anything(types.ModuleType):
    """A package that is imported and never called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = importlib.machinery.ModuleSpec(name, None), []

    def __getattr__(self, name: str) -> Any:
        return mock.MagicMock()


def _stand_in() -> None:
    """Everything that this file's docstring lists, for a process and its forks."""
    on_cpus()
    dist.init_process_group, dist.new_group = _initialise, _new_group
    dist.distributed_c10d.new_group = _new_group  # what `new_subgroups_by_enumeration` calls
    dist.distributed_c10d._process_group_name = _named_by_ranks
    from megatron.core.models.gpt import gpt_layer_specs as specs

    specs.get_gpt_layer_with_transformer_engine_spec = lambda *_, **wanted: _local_layers(**wanted)
    for name in ("get_gpt_decoder_block_spec", "get_gpt_mtp_block_spec"):
        setattr(specs, name, _without_engine(getattr(specs, name)))
    import megatron.core.pipeline_parallel  # noqa: F401
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel = _ending_groups(parallel_state.destroy_model_parallel)
    for package, names in {"triton": ("triton", "triton.language"), "six": ("six",)}.items():
        if importlib.util.find_spec(package) is None:
            sys.modules |= {name: _Anything(name) for name in names}


_stand_in()


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        _calls.append(name)
        return function(*arguments, **named)

    return called


def enter(rank: int, ranks: int, port: int, out: Path, *, adopt: bool) -> None:
    """Make this process a rank: its environment, and ppctl in Megatron's places. Outcomes go to `out`/rank."""
    more = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in more.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"PEERS_OUT": str(out), "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.device_count = lambda: ranks
    if adopt:
        import ppctl
        from ppctl.megatron import forward_backward as functions

        for name in [name for name in vars(functions) if name.startswith(("forward_backward_", "get_forward_"))]:
            setattr(functions, name, _counted(getattr(functions, name), name))
        communicator: Any = functions.P2PCommunicator
        communicator.__init__ = _counted(communicator.__init__, "P2PCommunicator")
        told = str(ppctl.adopt())
        if rank == 0:
            (out / "adopted").write_text(told + "\n")


def _record(name: str, outcome: str, reason: str) -> None:
    line = json.dumps([name, outcome, reason, sorted(set(_calls))])
    with (Path(os.environ["PEERS_OUT"]) / os.environ["RANK"]).open("a") as file:
        file.write(line + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Read the test files as on a machine with a GPU."""
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        return (yield)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Append a file that cannot be read, and why."""
    if report.failed:
        _record(report.nodeid, "not collected", str(report.longrepr).strip().splitlines()[-1].removeprefix("E   "))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Append a test that was found."""
    _record(item.nodeid, "collected", "")


def pytest_runtest_setup() -> None:
    """Forget the calls of the test before."""
    _calls.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a test's outcome: its call's, or that of a set-up or an end that did not pass."""
    if report.when == "call" or report.outcome != "passed":
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr or ""))
        if isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        _record(report.nodeid, report.outcome, " ".join(reason.split()))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tmp_path_dist_ckpt() -> Path:
    """A folder that all ranks of this world share."""
    folder = Path(os.environ["PEERS_OUT"]) / "checkpoints"
    folder.mkdir(exist_ok=True)
    return folder
