"""The script of the first run on a GPU: its commands, what it does when one fails, and the page that it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from ppctl.launch.planning import planned

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/gpu/first_run.sh"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        timeout=100,
    )


def test_wheels_hold_all_that_ppctl_needs_but_torch() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (packages,) = re.findall(r"^packages=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE)
    assert {re.match(r"[\w-]+", each)[0] for each in needed} - set(packages.split()) == {"torch"}  # type: ignore[index]


PARTS = ["machine", "two", "queues", "kernels", "ranks", "memory", "dense", "moe", "newer", "rest"]
MOST = 540
"""Seconds of a part: who lends a machine often lends it for 10 minutes a command."""


class Step(NamedTuple):
    part: str
    limit: int
    command: str


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    """The steps on a GPU, by name."""
    done = run("parts", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    return {name: Step(part, int(limit), command) for part, name, limit, _, command in rows}


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    return import_module("measure")


@pytest.fixture
def step_profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests/gpu"))
    return import_module("step_profile")


def test_every_part_fits_a_command_of_ten_minutes_and_comes_in_the_order_of_its_answers(steps: dict[str, Step]) -> None:
    assert list(dict.fromkeys(step.part for step in steps.values())) == PARTS
    for part in PARTS:
        assert sum(step.limit for step in steps.values() if step.part == part) <= MOST, part


def test_every_case_and_measurement_of_the_script_exists(steps: dict[str, Step], measure: ModuleType) -> None:
    asked = [step.command.partition("measure.py ")[2].split()[:2] for step in steps.values()]
    for step, name in (words for words in asked if words):
        assert step in measure.STEPS
        known = {"same": measure.CASES, "nccl": measure.CASES, "restart": {""}}.get(step, measure.MODELS)
        assert name in known or name.startswith("--") or step in measure.PROBES
    ran = {name for step, name in (words for words in asked if words) if step == "same"}
    assert ran == measure.CASES.keys()


def test_every_case_and_its_reference_can_be_planned(measure: ModuleType) -> None:
    for name, words in measure.CASES.items():
        assert measure.limits_of(words) == ()
        several = ("launch.device=cuda", "launch.share_gpu=true")
        for more in ((*several, *measure.limits_of([*words, *several])), measure.ALONE):
            _, plan, problems = planned([*measure.SMALL, *words, *more], for_training=True)
            assert problems == [] and plan is not None, name
            assert (plan.sizes.world > 1) is (more is not measure.ALONE), name
    _, paired, _ = planned([*measure.SMALL, *measure.CASES["ep2-dualpipev"], "launch.device=cuda"])
    assert paired is not None and paired.schedule.pairs


@pytest.mark.parametrize("free", [40, 79, 139])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_sizes_follow_from_the_free_memory(measure: ModuleType, monkeypatch, model: str, free: int) -> None:
    monkeypatch.setattr(measure.torch.cuda, "mem_get_info", lambda: (free * 2**30, 2 * free * 2**30))
    monkeypatch.setattr(measure.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    words, plan = measure.words_of(model, "cuda")
    peak = max(rank.peak_bytes for rank in plan.pp_ranks)
    assert 0.4 * free * 2**30 < peak < (free - 2) * 2**30
    assert not plan.tight and "cost.device=h100" in words
    for more in (["train.compile=true"], ["train.compile=true", *measure.EIGHT_BITS[model]]):
        assert set(more) <= set(measure.words_of(model, "cuda", *more)[0])


def test_a_device_that_holds_no_layer_is_skipped_with_a_reason(measure: ModuleType, monkeypatch) -> None:
    monkeypatch.setattr(measure.torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    monkeypatch.setattr(measure.torch.cuda, "get_device_name", lambda: "GTX")
    with pytest.raises(measure.Skipped, match="hold no layer"):
        measure.words_of("dense", "cuda")


def test_a_rehearsal_runs_the_same_steps_on_the_cpu(steps: dict[str, Step]) -> None:
    done = run("--dry-run", "--cpu", "--python", sys.executable)
    assert [line.split()[1] for line in done.stdout.splitlines()] == list(steps)
    assert "--device cuda" not in done.stdout
    limits = {line.split()[1]: int(line.split()[2]) for line in done.stdout.splitlines()}
    assert limits == {name: 4 * step.limit for name, step in steps.items()}, "others use a CPU at the same time"


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    run("--dry-run", "--out", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--what"], "unknown: --what"),
        (["--out"], "--out wants a value"),
        (["wheels"], "where to"),
        (["part"], "say which part: machine two"),
        (["part", "all"], "there is no part all; there are machine two"),
    ],
)
def test_an_option_that_it_does_not_have_is_refused(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_wheels_without_pips_own_are_refused(tmp_path: Path) -> None:
    done = run(
        "part", "machine", "--wheels", str(tmp_path), "--out", str(tmp_path / "logs"), "--python", sys.executable
    )
    assert done.returncode == 2
    assert "no wheel of pip" in done.stderr


PYTHON = """#!/bin/sh
case "$*" in
  *results_page*) exec {real} "$@" ;;
  *facts*) echo '{{"step": "facts", "name": "", "device": "H9", "torch": "9.9"}}' ;;
  *doctor*) printf 'a note\\n{{\\n "wrong": [], "device": "cpu", "edges": [], "transports": []\\n}}\\n' ;;
  *"nccl pp2 "*) echo '{{"step": "nccl", "name": "pp2", "skipped": "NCCL takes one rank"}}'; exit 77 ;;
  *"rate dense"*) echo "out of memory"; exit 1 ;;
  *"rate moe"*) echo '{{"step": "rate", "name": "moe", "mfu": 0.2, "planned_mfu": 0.4'; exit 1 ;;
  *) kill -9 $$ ;;
esac
"""


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, ...]:
    """Options with a Python whose steps end in different ways."""
    python = tmp_path / "python"
    python.write_text(PYTHON.format(real=sys.executable))
    python.chmod(0o755)
    return ("--python", str(python), "--out", str(tmp_path / "logs"), "--page", str(tmp_path / "page.md"))


def test_it_goes_on_after_failures_and_its_page_has_nothing_that_was_not_measured(
    tmp_path: Path, paths: tuple[str, ...], steps: dict[str, Step]
) -> None:
    done = run(*paths)
    assert done.returncode == 1, "a step failed"
    logs = tmp_path / "logs"
    assert re.search(rf"exit code 1 after \d+ s, failed: {re.escape(str(logs))}/mfu-dense.log\n", done.stdout)
    assert re.search(rf"exit code 137 after \d+ s, past its limit: {re.escape(str(logs))}/queues-8.log\n", done.stdout)
    assert f"to send back: {tmp_path}/page.md, and the logs: tar czf gpu-" in done.stdout
    rows = [line.split("\t") for line in (tmp_path / "logs/steps.tsv").read_text().splitlines()]
    assert {name: part for name, _, _, _, part in rows} == {name: step.part for name, step in steps.items()}
    ends = {name: code for name, _, _, code, _ in rows}
    assert (ends["facts"], ends["nccl-pp2"], ends["mfu-dense"], ends["queues-8"]) == ("0", "77", "1", "137")
    text = (tmp_path / "page.md").read_text()
    assert "First run on H9" in text
    assert "NCCL takes one rank" in text
    assert "out of memory" in text
    assert "| both transports | not tried" in text
    assert text.count("nothing was measured") == 7, "NCCL alone, launches, queues, retries, ranks, a restart, rates"
    assert f"this page and the logs in `{logs}`" in text
    assert "| which transport is faster, and the bandwidth of every edge | doctor | one device: open |" in text
    assert "None" not in text


def test_parts_and_steps_that_run_alone_add_to_the_record_of_the_others(tmp_path: Path, paths: tuple[str, ...]) -> None:
    for arguments in (["part", "machine"], ["part", "queues", "memory"], ["--only", "facts,queues-8"]):
        run(*arguments, *paths)
    lines = [line.split("\t") for line in (tmp_path / "logs/steps.tsv").read_text().splitlines()]
    assert len(lines) == len({name for name, *_ in lines}) == 3 + 6 + 2
    assert {part for *_, part in lines} == {"machine", "queues", "memory"}
    assert [name for name, *_ in lines][-2:] == ["facts", "queues-8"], "what ran last"
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {name} |" in text for name, *_ in lines)


def page_of(rows: list[dict] | dict[str, str], code: str = "0") -> str:
    """The page of steps with these results, or of these logs by step."""
    spec = spec_from_file_location("results_page", ROOT / "tests/gpu/results_page.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if isinstance(rows, dict):
        logs = rows
    else:
        logs = {f"{row['step']}-{row['name']}": f"noise\n{json.dumps(row)}\n" for row in rows}
    make: Callable[..., list[str]] = module.page
    return "\n".join(make([[name, "60", "5", code, "a part"] for name in logs], logs))


RATE = {
    **{"step": "rate", "name": "dense", "layers": 14, "mfu": 0.421, "planned_mfu": 0.47, "tokens_per_s": 12345.6},
    **{"pipeline_s": 0.2, "bare_loop_s": 0.19, "measured_bytes": 3 * 2**20, "planned_bytes": 2**21, "losses": [1.0]},
    "gradients": "by products",
}


def test_measured_numbers_are_on_the_page() -> None:
    action = {"action": "0F0", "measured_bytes": None, "planned_bytes": 2**20}
    kernel = {"seconds": 0.5, "spin_was_over": False}
    text = page_of(
        [
            RATE,
            {"step": "memory", "name": "moe", "actions": [action], "peak_bytes": 2**21, "planned_bytes": 2**20}
            | {"outside_bytes": 3 * 2**20},
            {"step": "same", "name": "pp2", "losses": [2.5], "apart": 1e-6, "words": "pp=2"},
            {"step": "queues", "name": "8", "queues": "8", "spins": 3.98},
            {"step": "restart", "name": "", "starts": ["", "rank 1: killed"], "seconds": 7.25, "apart": 2e-8},
            {
                **{"step": "launches", "name": "eager", "loading": "EAGER", "first_kernel_s": 9.5},
                **{"taken_bytes": 2**29, "kernels": {"erfinv": kernel}},
            },
            {"step": "retry", "name": "x", "allocator": "a", "retries": 1, "seconds": 1.9, "waited_for_the_spin": True},
            {
                **{"step": "nccl-alone", "name": "", "p2p_channels": ["2 coll channels, 4 p2p channels"], "grids": []},
                "answers": {"bare: get_error": {"answer": "SUCCESS", "seconds": 0.001}},
            },
        ]
    )
    assert (
        "| dense, rate | 14 | 42.1% | 47.0% | 12,346 | 200.0 ms | 190.0 ms | 0.950 | 3.0 | 2.0 | by products |" in text
    )
    assert "| rank 1: killed | 7.2 s | 2.0e-08 |" in text
    assert "| 0F0 | not measured | 1.0 |" in text and "| peak | 2.0 | 1.0 |" in text
    assert "| pp2: pp=2 | gloo | 2.50000 | 1.0e-06 |" in text
    assert "| 8 | 3.98 |" in text
    assert "| EAGER | the first of all | 9.5 s, 512.0 MiB taken |" in text
    assert "| a | 1 | 1900.0 ms | yes |" in text
    assert "| bare: get_error | SUCCESS | 1.0 ms |" in text
    assert "2 coll channels, 4 p2p channels" in text


def test_tests_that_were_all_skipped_answer_nothing() -> None:
    text = page_of(
        {"nccl-tests": "SKIPPED [1] tests/gpu/test_cuda.py:1: one device\n1 skipped, 53 deselected in 5.77s\n"}
    )
    assert "over NCCL | nccl-tests | 1 skipped, 53 deselected in 5.77s |" in text


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor>", "elementwise and reductions"),
        ("triton_poi_fused__to_copy_add_mm_scaled_dot_product_flash_attention_3", "elementwise and reductions"),
        ("triton_tem_fused_mm_7", "products"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "messages"),
        ("void spin_kernel(long)", "others"),
    ],
)
def test_a_kernel_has_one_class(step_profile: ModuleType, name: str, kind: str) -> None:
    assert step_profile.class_of(name) == kind


def test_two_streams_at_a_time_are_busy_once(step_profile: ModuleType) -> None:
    kernels = [step_profile.Kernel("k", begin, end) for begin, end in ((3.0, 4.0), (0.0, 2.0), (0.5, 1.0), (1.5, 2.5))]
    assert step_profile.busy(kernels) == 3.5


def test_a_profile_on_the_cpu_counts_all_of_an_operations_runs_and_is_on_the_page(step_profile: ModuleType) -> None:
    a = torch.ones(64, 64)
    found = step_profile.profiled(lambda: [a @ a for _ in range(3)], "cpu")
    products = next(row for row in found["longest"] if row["name"] == "aten::mm")
    assert products["calls"] == 3 and 0 < products["seconds"] <= found["classes"]["products"]
    assert 0 <= found["idle_s"] < found["wall_s"]
    text = page_of([{"step": "profile", "name": "moe", "how": "compiled", "layers": 1} | found])
    assert "## Where the seconds of a step go, moe compiled" in text
    assert "| `aten::mm` (products) | 3 |" in text and "| no kernel runs | " in text


def test_of_tests_the_page_has_counts_and_the_names_of_some_that_failed() -> None:
    failed = [f"FAILED tests/gpu/test_cuda.py::test_{n}[1|2] - RuntimeError: CUDA" for n in range(5)]
    text = page_of({"kernels": "\n".join(["F.", "E   noise", *failed, "=== 5 failed, 1 passed in 3.21s ==="])})
    named = "; ".join(f"test_{n}[1/2] - RuntimeError: CUDA" for n in range(3))
    assert f"| 5 failed, 1 passed in 3.21s; {named}; and 2 more |" in text


def test_what_failed_is_said_in_the_table_of_steps() -> None:
    row = {
        "step": "same",
        "name": "pp2",
        "losses": [2.5],
        "apart": 1.0,
        "words": "pp=2",
        "failed": "losses differ by 1",
    }
    assert "| failed (1) | losses differ by 1 |" in page_of([row], code="1")


def test_shellcheck_accepts_it() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: tests/slurm/cluster.sh install")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
