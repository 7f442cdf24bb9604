"""Who started this process: the variables of torchrun, SLURM and others, as the real ones set them."""

from itertools import product
from pathlib import Path

import pytest

from ppctl.errors import ConfigError
from ppctl.launch.environment import allocator_variables, detect, first_host, node_place, rank_environment

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
BATCH_SHELL = {"SLURM_JOB_ID": "47", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"}
SRUN = BATCH_SHELL | {
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.mark.parametrize(
    ("environ", "by", "rank", "world", "run_id"),
    [
        ({}, "person", 0, 1, None),
        (TORCHRUN, "torchrun", 3, 4, None),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "night-7"}, "torchrun", 3, 4, "night-7"),
        ({k: v for k, v in TORCHRUN.items() if "ELASTIC" not in k}, "env", 3, 4, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "person", 0, 1, None),
        (BATCH_SHELL, "person", 0, 1, None),
        (BATCH_SHELL | {"SLURM_STEP_ID": "4294967291"}, "person", 0, 1, None),
        (SRUN, "slurm", 3, 4, "47.1"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, "person", 0, 1, None),
        (SRUN | TORCHRUN, "torchrun", 3, 4, None),
    ],
    ids=[
        "a person",
        "torchrun",
        "torchrun with an id",
        "another scheduler",
        "leftover variables without an address",
        "the body of a batch script",
        "the batch step by number",
        "srun",
        "a one-task step",
        "torchrun inside a step",
    ],
)
def test_who_started_this_process(environ: dict[str, str], by: str, rank: int, world: int, run_id: str | None) -> None:
    started = detect(environ)
    assert (started.by, started.rank, started.world_size, started.run_id) == (by, rank, world, run_id)
    assert started.is_rank == (by != "person")


def test_a_task_of_srun_gets_a_workers_variables() -> None:
    variables = detect(SRUN).variables
    assert {name: value for name, value in variables.items() if name != "MASTER_PORT"} == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
    }


def test_tasks_that_are_all_on_one_node_meet_on_its_loopback() -> None:
    alone = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    assert detect(alone).variables["MASTER_ADDR"] == "127.0.0.1"


def test_a_node_has_its_place_from_slurm_or_from_its_pod() -> None:
    task = SRUN | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_NODEID": "3"}
    assert node_place(task) == (3, 4, "n1", int(detect(task).variables["MASTER_PORT"]))
    pod = {"PET_NODE_RANK": "2", "PET_NNODES": "3", "PET_MASTER_ADDR": "run-node-0-0.run", "PET_MASTER_PORT": "29500"}
    assert node_place(pod) == (2, 3, "run-node-0-0.run", 29500)
    with pytest.raises(ConfigError, match="PP-E606"):
        node_place({"PET_NODE_RANK": "2"})


def test_ranks_of_a_node_are_counted_where_only_their_number_is_said() -> None:
    said = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert detect(said).variables["LOCAL_RANK"] == "1"


def test_steps_and_requeues_of_a_job_meet_at_ports_of_their_own_outside_the_kernels_range() -> None:
    starts = [
        SRUN | {"SLURM_JOB_ID": str(j), "SLURM_STEP_ID": str(s), "SLURM_RESTART_COUNT": str(r)}
        for j, s, r in product((1, 2, 11, 12, 600), range(4), range(4))
    ]
    ports = [int(detect(start).variables["MASTER_PORT"]) for start in starts]
    assert len(set(ports)) == len(starts)
    assert all(20000 <= port < 30000 for port in ports)


def test_restarts_are_counted_whoever_restarts() -> None:
    assert detect(SRUN | {"SLURM_RESTART_COUNT": "2"}).restarts == 2
    assert detect(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}).restarts == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "three"},
        {"RANK": "5", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"MASTER_PORT": "http"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_RANK": "first"},
        {"TORCHELASTIC_RESTART_COUNT": "often"},
    ],
    ids=lambda wrong: " ".join(f"{name}={value}" for name, value in wrong.items()),
)
def test_a_variable_that_makes_no_sense_is_an_error_that_shows_it(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="PP-E606") as raised:
        detect(TORCHRUN | wrong)
    for name, value in wrong.items():
        assert f"'{name}': '{value}'" in str(raised.value)


def test_a_variable_of_slurms_that_is_missing_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"PP-E606.*SLURM_LOCALID"):
        detect({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"})


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("n[1-2]", "n1"),
        ("n[03-11,17]", "n03"),
        ("n[5,7-9],x1", "n5"),
        ("rack[1-2]n[3-4]", "rack1n3"),
        ("a-b[1-2]-ib,c", "a-b1-ib"),
    ],
)
def test_the_first_host_of_slurms_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_ranks_environment_is_what_is_usual_then_ours_then_launch_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # inductor sets it in a process that has compiled
    monkeypatch.delenv("PYTHONFAULTHANDLER", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # of a cluster's profile, for runs on several hosts
    found = rank_environment(2, 4, {"NCCL_DEBUG": "INFO", "WORLD_SIZE": "9"})
    wanted = {"RANK": "2", "WORLD_SIZE": "4", "NCCL_DEBUG": "INFO"}
    assert "MASTER_PORT" not in found and found["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert rank_environment(0, 1, {"GLOO_SOCKET_IFNAME": "eth3"})["GLOO_SOCKET_IFNAME"] == "eth3"
    assert found | wanted | {"OMP_NUM_THREADS": "5", "PYTHONFAULTHANDLER": "1"} == found
    assert not found["TORCHINDUCTOR_CACHE_DIR"].startswith("/tmp/torchinductor")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert rank_environment(0, 1, {})["OMP_NUM_THREADS"] == "1"
    assert rank_environment(0, 1, {"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_large_blocks_get_huge_pages_of_their_own_where_the_kernel_has_them(tmp_path: Path) -> None:
    choice = tmp_path / "enabled"
    assert allocator_variables(choice) == {}
    choice.write_text("always madvise [never]\n")
    assert allocator_variables(choice) == {}
    for text in ("always [madvise] never\n", "[always] madvise never\n"):
        choice.write_text(text)
        assert allocator_variables(choice) == {"MALLOC_MMAP_THRESHOLD_": "2097152", "THP_MEM_ALLOC_ENABLE": "1"}
