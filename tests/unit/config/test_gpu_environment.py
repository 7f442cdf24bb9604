"""What ranks on GPUs find in their environment: set where nothing sets it, refused where it would hang or differ."""

from __future__ import annotations

from functools import partial

import pytest

from ppctl.config.gpu_environment import (
    ALLOCATOR,
    EXPANDABLE,
    LOADING,
    REGISTERS,
    WORKSPACES,
    expanding,
    gpu_environment,
    kept_allocator,
    kept_queue,
    refuse_backend,
)
from ppctl.config.schema import LaunchConfig, RunConfig
from ppctl.errors import ConfigError
from ppctl.host.devices import MOST_QUEUES, QUEUES, SEVERAL_RANKS

environment = partial(gpu_environment, routed=False)
OURS = ALLOCATOR[1]


@pytest.mark.parametrize(
    ("environ", "launch_env", "set_to", "place"),
    [
        ({}, {}, MOST_QUEUES, None),
        ({QUEUES: "8"}, {}, None, None),
        ({QUEUES: "1"}, {QUEUES: "8"}, "8", None),
        ({QUEUES: "1"}, {}, None, "environment"),
        ({QUEUES: "8"}, {QUEUES: "1"}, "1", f"launch.env.{QUEUES} = 1"),
    ],
)
def test_every_stream_gets_a_queue_and_a_single_one_is_refused(environ, launch_env, set_to, place) -> None:
    config = RunConfig(launch=LaunchConfig(transport="channels"))
    variables, problems = environment(config, 2, environ, launch_env | {"OTHER": "1"})
    assert variables.pop(OURS) == EXPANDABLE
    assert variables == {"OTHER": "1"} | ({} if set_to is None else {QUEUES: set_to})
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    assert all("posted ahead of need would block" in problem.message for problem in problems)
    assert environment(config, 1, environ, launch_env)[1] == [], "one rank receives nothing"
    assert environment(RunConfig(), 2, environ, launch_env)[1] == [], "plain messages are not received ahead"
    assert (kept_queue(RunConfig(), 2, environ, variables) is not None) == (place is not None)
    assert kept_queue(config, 2, environ, variables) is kept_queue(RunConfig(), 1, environ, variables) is None


@pytest.mark.parametrize(
    ("environ", "launch_env", "set_to", "place"),
    [
        ({}, {}, ":4096:8", None),
        ({}, {WORKSPACES: ":16:8"}, ":16:8", None),
        ({WORKSPACES: ":16:8"}, {}, None, None),
        ({WORKSPACES: ":0:0"}, {WORKSPACES: ":4096:8"}, ":4096:8", None),
        ({WORKSPACES: ":0:0"}, {}, None, "environment"),
        ({}, {WORKSPACES: ":0:0"}, ":0:0", f"launch.env.{WORKSPACES} = :0:0"),
    ],
)
def test_deterministic_mode_sets_cublas_workspaces_or_refuses_others(environ, launch_env, set_to, place) -> None:
    config, environ = RunConfig(), environ | {QUEUES: "32"}
    config.parallel.deterministic_mode = True
    variables, problems = environment(config, 2, environ, launch_env | {"OTHER": "1"})
    assert variables.pop("OTHER") == "1" and variables.pop(OURS) == EXPANDABLE
    assert variables == ({} if set_to is None else {WORKSPACES: set_to})
    assert [problem.place for problem in problems] == ([] if place is None else [place])
    for problem in problems:
        name, value = problem.remedy.removeprefix("launch.env.").split("=")
        assert environment(config, 2, environ, launch_env | {name: value})[1] == []


@pytest.mark.parametrize(("routed", "packed", "pp", "loading"), [
    (False, False, 4, None), (True, False, 4, "EAGER"), (False, True, 4, "EAGER"), (True, True, 1, None),
])  # fmt: skip
def test_kernels_are_loaded_at_the_start_where_sizes_change_from_step_to_step(routed, packed, pp, loading) -> None:
    config = RunConfig()
    config.data.reset_attention_mask = packed
    added = partial(gpu_environment, config, pp, routed=routed)
    assert added({}, {})[0].get(LOADING) == loading
    assert LOADING not in added({LOADING: "LAZY"}, {})[0]
    assert added({}, {LOADING: "LAZY"})[0][LOADING] == "LAZY"


@pytest.mark.parametrize("key", ["parallel.variable_seq_lengths", "model.transformers"])
def test_kernels_are_loaded_at_the_start_where_a_batch_may_take_others(key: str) -> None:
    config = RunConfig()
    assert LOADING not in environment(config, 2, {}, {})[0]
    group, name = key.split(".")
    setattr(getattr(config, group), name, "{}")
    assert environment(config, 2, {}, {})[0][LOADING] == "EAGER"


@pytest.mark.parametrize(("group", "name", "value"), [("train", "replay", 100), ("log", "gradients", "5:6")])
def test_kernels_are_loaded_at_the_start_where_some_steps_launch_others(group: str, name: str, value: object) -> None:
    """They compare or sum what was computed while receives may be posted; the dry pass does not."""
    config = RunConfig()
    setattr(getattr(config, group), name, value)
    assert environment(config, 2, {}, {})[0][LOADING] == "EAGER"
    assert LOADING not in environment(config, 1, {}, {})[0], "one rank receives nothing"


@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize("pp", [1, 4])
def test_the_allocators_settings_are_ours_unless_they_are_the_users(pp: int, name: str) -> None:
    assert environment(RunConfig(), pp, {}, {})[0][OURS] == EXPANDABLE
    assert kept_allocator({}, {}) is None
    for value, told in (("max_split_size_mb:512", True), (f"backend:native, {EXPANDABLE}", False), ("", True)):
        user = {name: value}
        for environ, launch_env in ((user, {}), ({}, user), ({OURS: "unheard"}, user), (user, {OURS: "unheard"})):
            if name == OURS and "unheard" in launch_env.values():
                continue  # it is heard
            variables, problems = environment(RunConfig(), pp, environ, launch_env)
            assert (variables, problems) == ({QUEUES: MOST_QUEUES} | launch_env, [])
            note = kept_allocator(environ, variables)
            assert (note is not None) == told
            assert note is None or f"{name}={value} is kept" in note
            assert expanding(environ | launch_env) == (f"launch.env.{name}={EXPANDABLE}" if told else None)
        assert kept_allocator({}, environment(RunConfig(), pp, {}, {})[0]) is None, "ours is not told"


@pytest.mark.parametrize(("value", "registers"), [("1", True), ("TRUE", True), ("y", True), ("0", False), ("", False)])
def test_where_nccl_registers_the_allocators_blocks_they_do_not_grow(value: str, registers: bool) -> None:
    for environ, launch_env in (({REGISTERS: value}, {}), ({REGISTERS: "0"}, {REGISTERS: value})):
        assert (OURS not in environment(RunConfig(), 2, environ, launch_env)[0]) == registers
        assert (expanding(environ | launch_env) is None) == registers, "what would help is not what is left out"


BACKEND = "parallel.pipeline_model_parallel_comm_backend"


@pytest.mark.parametrize("several", ["1", "0", None])
@pytest.mark.parametrize("asked", ["nccl", "ucc", "gloo", None])
@pytest.mark.parametrize("share", [True, False])
def test_nccl_is_refused_between_ranks_that_share_a_gpu_unless_it_takes_them(share, asked, several) -> None:
    config = RunConfig()
    config.launch.share_gpu, config.parallel.pipeline_model_parallel_comm_backend = share, asked
    launch_env = {} if several is None else {SEVERAL_RANKS: several}
    refused = share and asked in ("nccl", "ucc")
    for problems in (environment(config, 2, {}, launch_env)[1], environment(config, 2, launch_env, {})[1]):
        assert [(each.code, each.remedy) for each in problems] == [("PP-E642", f"{BACKEND}=null")] * (
            refused and several != "1"
        )


def test_a_rank_refuses_an_nccl_that_is_too_old_for_it() -> None:
    config = RunConfig()
    config.launch.share_gpu, config.parallel.pipeline_model_parallel_comm_backend = True, "nccl"
    refuse_backend(config, "cpu:gloo,cuda:nccl", (2, 30, 7))
    with pytest.raises(ConfigError, match=r"NCCL 2\.28\.9 is older than 2\.30\.7"):
        refuse_backend(config, "gloo", (2, 28, 9))
    config.launch.share_gpu = False
    refuse_backend(config, "gloo", None)
