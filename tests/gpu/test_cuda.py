"""What needs a CUDA device: training on it, and the recorder's events. `make test-gpu`."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from background_saves import saver_of
from command import TINY, metrics, only_run, ppctl
from one_rank import tiny_config, trainer_of, waits_in_a_pipeline
from ranks import run_ranks
from torch import nn
from torch.nn.attention import SDPBackend

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.shards import Shard
from ppctl.comm.channels import check_connection, wait_for
from ppctl.comm.connections import connections_of
from ppctl.comm.groups import nccl_version
from ppctl.config.gpu_environment import ALLOCATOR, EXPANDABLE
from ppctl.config.mapping import to_mapping
from ppctl.config.schema import OptimConfig, RunConfig
from ppctl.engine.dry_pass import AllocatorFigures, reserve
from ppctl.engine.recorder import make_recorder
from ppctl.host.devices import nccl_shares_gpus
from ppctl.model import activation
from ppctl.model.attention import core_attention
from ppctl.model.block_attention import FLASH_ON_CUDA, UNFUSED, BlockAttention
from ppctl.model.fp8 import E4M3, E5M2, Fp8
from ppctl.model.kernels import Capability, Kernels, choose_kernels
from ppctl.model.linear import (
    for_each_group,
    multiply_groups_scaled,
    multiply_in_float32,
    multiply_scaled,
    product_in_float32,
    product_in_fp8,
)
from ppctl.model.packing import Documents, bounds_of
from ppctl.rank.watchdog import recorders
from ppctl.schedule.action import Action, Channel, Op
from ppctl.sequence_halves import Lengths
from ppctl.tensors.host_numbers import HostNumbers
from ppctl.tensors.row_copies import RowCopies, copied, summed
from ppctl.train.optimizer import AdamW
from ppctl.weight_gradients.wide_sums import WideSum, adds_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

DIST = Path(__file__).parents[1] / "dist"
BETWEEN_RANKS = {
    "engine/test_engine.py": "bit_by_bit and 2 or v_placement or interleaving",
    "megatron/test_p2p.py": "activations_go_down or combined_calls or keep_their_order",
    "megatron/test_schedules_api.py": "defaults or lengths_may_differ",
}
"""By file, the tests of the dist tier that start a few ranks and compute their references where the ranks compute.
Ranks on a GPU are started anew for each test, which takes about ten seconds."""


HEADS = [(8, 8, 128, 128), (8, 2, 64, 64), (4, 4, 192, 128)]
"""Heads, groups, width, values' width."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["the", "of", "stage", "rank", "bubble"], k=5000)))
    return path


def test_one_rank_trains_on_cuda_over_nccl_as_on_the_cpu(text: Path, tmp_path: Path):
    losses = {}
    for device in ("cpu", "cuda"):
        cwd = tmp_path / device
        cwd.mkdir()
        tiny = [override for override in TINY if not override.startswith("launch.device")]
        command = (*tiny, f"data.path={text}", "pp=1", "vpp=2", "steps=5", f"launch.device={device}")
        done = ppctl("train", "+recipe=quickstart", *command, cwd=cwd)
        assert done.returncode == 0, done.stderr
        losses[device] = [record["loss"] for record in metrics(only_run(cwd))]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-4)


def test_the_pipeline_waits_for_its_own_bound_on_the_queue_and_for_nothing_else(text: Path, monkeypatch):
    """Two events for each forward and backward, and two behind the list; no stream and no device is waited for."""
    monkeypatch.setattr("ranks.GPUS", 1)
    mapping = to_mapping(tiny_config(text, "cuda"))
    ((waits, kernels),) = run_ranks(waits_in_a_pipeline, 1, mapping, over="nccl", timeout=120)
    assert kernels > 100, "the trace has seen the pipeline"
    computed = 2 * 2 * 8  # forwards and backwards of two chunks and eight microbatches
    assert waits == ["cudaEventSynchronize"] * (2 * computed + 2)


def test_the_device_leaves_an_update_out_and_the_host_reads_all_numbers_at_once():
    """AdamW's fused kernel looks at the scalar; pinned memory has the numbers behind the event."""
    own = {"norm.weight": nn.Parameter(torch.ones(1000, device="cuda"))}
    optimizer = AdamW(own, OptimConfig(lr=0.1), {"norm.weight": SimpleNamespace(decayed=False)})
    assert optimizer.skips_on_device
    for left_out in (1.0, 0.0):
        own["norm.weight"].grad = torch.full((1000,), float("nan") if left_out else 0.5, device="cuda")
        scalar = (~torch.linalg.vector_norm(own["norm.weight"].grad).isfinite()).float()
        numbers = HostNumbers([scalar, own["norm.weight"][:2]])
        optimizer.step(scalar)
        assert numbers.read() == [[left_out], [1.0, 1.0]], "read before the update that follows"
        if left_out:
            optimizer.take_back()
            assert own["norm.weight"].eq(1).all() and optimizer.updates == 0
            assert all(not optimizer.state["norm.weight"][key].any() for key in ("exp_avg", "exp_avg_sq"))
    assert own["norm.weight"].lt(1).all() and optimizer.updates == 1


def test_fifty_milliseconds_of_queued_work_are_recorded_as_fifty():
    """Python's clock would see the launch alone."""
    device = torch.device("cuda")
    recorder = make_recorder(0, [Action(Op.F, 0, 0)], device)
    cycles = int(1e7)
    once, start, end = 0.0, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):  # the clock that the cycles are counted on, measured when it has sped up
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
        once = start.elapsed_time(end) / 1e3
    for _ in range(3):  # a step is read one step later
        recorder.begin_step()
        recorder.begin(0)
        torch.cuda._sleep(int(cycles * 0.050 / once))
        recorder.end(0)
        recorder.end_step()
        torch.cuda.synchronize()
    ((_, began, ended),) = recorder.stamps()
    assert ended - began == pytest.approx(0.050, abs=0.002)


@pytest.mark.parametrize(("heads", "groups", "width", "values"), HEADS)
def test_packed_documents_at_once_agree_with_one_by_one(heads: int, groups: int, width: int, values: int):
    device, lengths = torch.device("cuda"), ((300, 1, 211), (512,))
    varlen = Capability.of(device, packed=True).attend_documents
    if varlen is None:
        pytest.skip("this torch has no varlen_attn with groups and a scale")
    (bounds,) = bounds_of([lengths], device)
    given = [
        torch.randn(2, 512, *shape, device=device) for shape in ((heads, width), (groups, width), (groups, values))
    ]
    results = []
    for dtype, kernels in (
        (torch.bfloat16, Kernels(attend_documents=varlen)),
        (torch.bfloat16, Kernels((SDPBackend.MATH,))),
        (torch.float32, Kernels((SDPBackend.MATH,))),
    ):
        inputs = [tensor.bfloat16().to(dtype).transpose(1, 2).requires_grad_() for tensor in given]
        out = core_attention(*inputs, kernels, Documents(lengths, bounds))
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for at_once, one_by_one, exact in zip(*results, strict=True):
        rounded = (one_by_one - exact).abs().max()
        assert (at_once - exact).abs().max() <= 2 * rounded + 1e-3


def block_results(
    kernel: BlockAttention, given: list[torch.Tensor], causal: bool, documents: Lengths | None
) -> list[torch.Tensor]:
    """Out, log-sums and gradients, as if there were other keys as well; documents one by one, if not all at once."""
    if documents is not None and not kernel.joins_documents:
        rows = []
        for row, lengths in enumerate(documents):
            cut = zip(*(each[row : row + 1].split(lengths, 2) for each in given), strict=True)
            alone = [block_results(kernel, list(part), causal, None) for part in cut]
            rows.append([torch.cat(parts, 2) for parts in zip(*alone, strict=True)])
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]
    gradient, *inputs = given
    block = (*inputs, 0.1, causal, documents)
    out, log_sums = kernel.forward(block)
    more = 0.5 * out, log_sums + 0.5
    return [out, log_sums, *kernel.backward(gradient, block, *more)]


@pytest.mark.parametrize(
    ("s", "t", "documents"), [(256, 512, None), (256, 256, None), (256, 256, ((100, 156), (1, 255)))]
)
@pytest.mark.parametrize(("heads", "groups", "width", "values"), HEADS)
def test_attention_by_blocks_agrees_with_plain_products(
    heads: int, groups: int, width: int, values: int, s: int, t: int, documents: Lengths | None
):
    shapes = (s, heads, values), (s, heads, width), (t, groups, width), (t, groups, values)
    given = [torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
    flash, plain = (block_results(kernel, given, s == t, documents) for kernel in (FLASH_ON_CUDA, UNFUSED))
    exact = block_results(UNFUSED, [each.float() for each in given], s == t, documents)
    for one, other, right in zip(flash, plain, exact, strict=True):
        assert (one - right).abs().max() <= 2 * (other - right).abs().max() + 1e-2 * right.abs().max()


@pytest.mark.parametrize("blockwise", [False, True])
@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(256, 512, 384), (200, 144, 576)])
def test_scaled_products_agree_with_their_emulation(
    shape: tuple[int, int, int], gradients: torch.dtype, blockwise: bool
):
    if torch.cuda.get_device_capability() < (8, 9) or (blockwise and torch.cuda.get_device_capability()[0] != 9):
        pytest.skip("no such product on this device")
    if blockwise and gradients == E5M2:
        pytest.skip("refused (PP-E772): torch has no such product")
    tokens, inside, outside = shape
    x = torch.randn(1, tokens, inside, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(outside, inside, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(1, tokens, outside, device="cuda", dtype=torch.bfloat16)
    results = []
    for multiply in (multiply_scaled, multiply_in_float32):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, w)]
        out = product_in_fp8(*inputs, Fp8(gradients, blockwise, multiply))
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    for scaled, emulated in zip(*results, strict=True):
        assert (scaled - emulated).abs().max() <= 2**-7 * emulated.abs().max()


@pytest.mark.parametrize("counts", [(64, 0, 96, 0), (0, 160, 0, 0), (0, 0, 0, 160)])
def test_a_grouped_product_with_empty_groups_agrees_with_one_by_one(counts: tuple[int, ...]) -> None:
    """The gradient of a group without rows is zero: on some devices torch leaves what was in its memory."""
    device = torch.device("cuda")
    given = torch.randn(sum(counts), 256, device=device, dtype=torch.bfloat16)
    stack = torch.randn(len(counts), 128, 256, device=device, dtype=torch.bfloat16)
    results = []
    for at_once in (True, False):
        rows, weights = given.clone().requires_grad_(), stack.clone().requires_grad_()
        sizes = torch.tensor(counts, device=device)
        out = for_each_group(
            lambda product, rows, beside, w: beside * product(rows, w),
            *(rows, sizes, weights),
            beside=rows.new_ones(len(rows), 1),
            at_once=at_once,
        )
        results.append([out, *torch.autograd.grad(out, (rows, weights), torch.ones_like(out))])
    for at_once, one_by_one in zip(*results, strict=True):
        assert (at_once - one_by_one).abs().max() <= 2**-7 * one_by_one.abs().max()
    of_empty = [group for group, count in zip(results[0][2], counts, strict=True) if count == 0]
    assert all(bool((group == 0).all()) for group in of_empty)


def test_a_grouped_sum_of_gradients_is_made_in_place_by_products() -> None:
    """In float32 from the product's own sums on; the name lets `kernels-products` run it."""
    device, draw = torch.device("cuda"), torch.Generator().manual_seed(0)
    assert adds_products(device)
    a, b = (torch.randn(512, width, generator=draw).bfloat16().cuda() for width in (384, 640))
    held: list[torch.Tensor] = []
    total = WideSum(lambda: held[0] if held else None, held.append)
    for _ in range(3):
        total.add_product(a.t(), b)
    (found,) = held  # nothing was begun anew
    exact = 3 * (a.double().t() @ b.double())
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() <= 2**-18 * exact.abs().max()


@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_of_grouped_rows_is_one_kernel_with_the_bits_of_its_steps(weighted: bool) -> None:
    """But where one way to compute it joins a product and a sum, which moves a last bit of float32."""
    draw = torch.Generator().manual_seed(0)
    assert activation.fuses_swiglu(torch.device("cuda"), weighted=weighted)
    for rows in (4096, 33, 0):
        gradient, x, up = (3 * torch.randn(rows, 2048, generator=draw).bfloat16().cuda() for _ in range(3))
        weights = torch.rand(rows, 1, generator=draw).bfloat16().cuda() if weighted else None
        for given in ((None, x, up, weights), (gradient, x, up, weights)):
            for one, other in zip(torch.ops.ppctl.swiglu(*given), activation.by_steps(*given), strict=True):
                assert torch.allclose(one, other, rtol=2**-6)
                assert not rows or (one != other).float().mean() <= 1e-3


def test_a_routers_scores_are_normalised_by_kernels_with_the_bits_of_the_steps() -> None:
    draw, results = torch.Generator().manual_seed(0), []
    scores, gradient = (torch.rand(4096, 256, generator=draw).cuda() for _ in range(2))
    assert activation.fuses_swiglu(torch.device("cuda"), weighted=True)
    for fused in (True, False):
        x = scores.clone().requires_grad_()
        out = activation.normalised(x, 2.5, fused=fused)
        results.append((out, *torch.autograd.grad(out, x, gradient)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("counts", [(100, 0, 33, 1, 0), (0, 0, 0, 0, 160), (0, 0, 0, 0, 0), (400, 512, 96, 16, 32)])
def test_scaled_products_of_all_groups_at_once_agree_with_their_emulation(counts: tuple[int, ...]) -> None:
    """Row-wise e4m3. Numbers and scales are the same on both sides: what differs is the order of sums in float32."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("refused (PP-E772): torch's scaled grouped product is for Hopper")
    draw, sizes = torch.Generator().manual_seed(0), torch.tensor(counts, device="cuda")
    given = [torch.randn(*shape, generator=draw).bfloat16().cuda() for shape in ((sum(counts), 256), (5, 144, 256))]
    g = torch.randn(sum(counts), 144, generator=draw).bfloat16().cuda()
    results = []
    for multiply_groups in (multiply_groups_scaled, None):
        inputs = [each.clone().requires_grad_() for each in given]
        out = for_each_group(
            lambda product, rows, beside, weights: product(rows, weights) * beside,
            *(inputs[0], sizes, inputs[1]),
            beside=g.new_ones(len(g), 1),
            at_once=multiply_groups is not None,
            fp8=Fp8(E4M3, False, multiply_in_float32, multiply_groups),
        )
        results.append([out, *torch.autograd.grad(out, inputs, g)])
    for scaled, emulated in zip(*results, strict=True):
        assert scaled.shape == emulated.shape
        if emulated.numel():
            assert (scaled - emulated).abs().max() <= 2**-7 * emulated.abs().max()


@pytest.mark.parametrize(("heads", "groups", "width", "values"), HEADS)
def test_a_chosen_kernel_takes_the_heads_and_agrees_with_plain_products(
    heads: int, groups: int, width: int, values: int
) -> None:
    config = RunConfig()
    config.parallel.bf16 = True
    chosen = choose_kernels(config, Capability.of(torch.device("cuda"), packed=False))
    shapes = ((heads, width), (groups, width), (groups, values))
    given = [torch.randn(2, 512, *shape, device="cuda") for shape in shapes]
    results = []
    for dtype, kernels in (
        (torch.bfloat16, chosen),
        (torch.bfloat16, Kernels((SDPBackend.MATH,))),
        (torch.float32, Kernels((SDPBackend.MATH,))),
    ):
        inputs = [tensor.bfloat16().to(dtype).transpose(1, 2).requires_grad_() for tensor in given]
        out = core_attention(*inputs, kernels)
        results.append([out, *torch.autograd.grad(out, inputs, torch.ones_like(out))])
    for fast, plain, exact in zip(*results, strict=True):
        assert (fast - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-3


def test_fused_adamw_agrees_with_the_one_of_the_cpu() -> None:
    rows = {name: SimpleNamespace(decayed=name == "matrix") for name in ("matrix", "norm")}
    masters = {"matrix": torch.randn(64, 96), "norm": torch.randn(96)}
    gradients = [{name: torch.randn_like(value) for name, value in masters.items()} for _ in range(3)]
    moved = {}
    for device in ("cpu", "cuda"):
        parameters = {name: nn.Parameter(value.clone().to(device)) for name, value in masters.items()}
        optimizer = AdamW(parameters, OptimConfig(), rows)
        assert optimizer.fused is (device == "cuda")
        for each in gradients:
            for name, parameter in parameters.items():
                parameter.grad = each[name].to(device)
            optimizer.step()
        moved[device] = [value.detach().cpu() for value in parameters.values()]
    for one, other in zip(moved["cuda"], moved["cpu"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def losses_on(mapping: dict[str, Any]) -> list[float]:
    trainer = trainer_of(mapping, torch.device("cuda", torch.cuda.current_device()))
    return [trainer.step(step).record["loss"] for step in range(3)]


def test_compiled_layers_that_are_recomputed_lose_as_eager_ones(text: Path, monkeypatch) -> None:
    monkeypatch.setattr("ranks.GPUS", 1)
    losses = []
    for compiled in (False, True):
        config = tiny_config(text, "cuda")
        config.parallel.bf16, config.train.compile = True, compiled
        config.train.recompute_granularity = "full"
        config.train.recompute_method, config.train.recompute_num_layers = "uniform", 1
        losses += run_ranks(losses_on, 1, to_mapping(config), over="nccl", timeout=170)
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def dist_tier(capfd: pytest.CaptureFixture[str], **how: str) -> None:
    """Run a part of the dist tier, unchanged, with its ranks on GPUs. Its own output says how far it came."""
    command = [sys.executable, "-m", "pytest", "-v", "-m", "not whole", "-p", "no:cacheprovider"]
    chosen = " or ".join(f"({Path(file).stem} and ({names}))" for file, names in BETWEEN_RANKS.items())
    with capfd.disabled():
        files = [str(DIST / file) for file in BETWEEN_RANKS]
        done = subprocess.run([*command, "-k", chosen, *files], env=os.environ | how, check=False)
    assert done.returncode == 0


def close_to_the_cpus(function: Any, *inputs: torch.Tensor, share: float) -> None:
    """Results and gradients of a function on both devices, which differ by a share of the largest at most."""
    found = []
    for device in ("cuda", "cpu"):
        own = [each.detach().to(device).requires_grad_(each.is_floating_point()) for each in inputs]
        out = function(*own)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        made = torch.autograd.grad(out, [each for each in own if each.requires_grad], gradient)
        found.append([each.double().cpu() for each in (out, *made)])
    for on_gpu, on_cpu in zip(*found, strict=True):
        assert (on_gpu - on_cpu).abs().max() <= share * on_cpu.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_copied_and_summed_over_bags_as_on_the_cpu(dtype: torch.dtype):
    times, tokens, width, experts = 8, 128, 256, 32
    draw = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(experts, generator=draw)[:times].sort().values for _ in range(tokens)])

    def there_and_back(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        copies, _ = RowCopies.of(numbers, experts // 8, times)
        return summed(copied(rows, copies), copies)

    rows = torch.randn(tokens, width, generator=draw).to(dtype)
    close_to_the_cpus(there_and_back, rows, chosen, share=2.0**-7 if dtype == torch.bfloat16 else 2.0**-20)


def test_the_routers_product_of_16_bit_numbers_is_that_of_float32():
    x, weight = torch.randn(64, 512).bfloat16(), torch.randn(32, 512).bfloat16()

    def both(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores, same = product_in_float32(x, weight)
        return torch.cat((scores.square(), same.float()), 1)

    close_to_the_cpus(both, x, weight, share=2.0**-7)


def test_several_ranks_share_a_device_through_pinned_host_memory(capfd: pytest.CaptureFixture[str]) -> None:
    dist_tier(capfd, PPCTL_TEST_RANKS="shared")


def test_settings_of_the_allocator_that_come_after_the_import_of_torch_are_read() -> None:
    """A rank that torchrun or srun has started sets what is missing itself (`rank/worker.py`)."""
    late = f"import os, torch; os.environ['{ALLOCATOR[1]}'] = '{EXPANDABLE}'; torch.empty(2**25, device='cuda')"
    said = f"{late}; print([segment['is_expandable'] for segment in torch.cuda.memory_snapshot()])"
    plain = {name: value for name, value in os.environ.items() if name not in ALLOCATOR}
    done = subprocess.run([sys.executable, "-c", said], env=plain, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True]"


@pytest.mark.parametrize("rounding", [1, 3])
def test_what_is_reserved_is_allocated_without_the_driver(rounding: int) -> None:
    """Large and small blocks, freed and allocated again in another order."""
    device, mib, draw = torch.device("cuda", torch.cuda.current_device()), 2**20, random.Random(0)
    held = torch.empty(3 * mib, dtype=torch.uint8, device=device)
    small = [torch.empty(1000, dtype=torch.uint8, device=device) for _ in range(1000)]
    del small
    assert reserve(device, torch.cuda.memory_allocated(device) + 512 * mib, in_flight=4) == 0
    before = AllocatorFigures.of(device)
    assert before.unused >= 512 * mib
    for _ in range(20):
        sizes = [draw.randrange(2, 40) * mib // rounding for _ in range(20)]
        blocks = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        blocks += [torch.empty(1000, dtype=torch.uint8, device=device) for _ in range(3000)]
        draw.shuffle(blocks)
        del blocks[5:]
    after = AllocatorFigures.of(device)
    assert (after.driver_allocations, after.retries) == (before.driver_allocations, before.retries)
    del held


def sent_to_itself(size: int) -> tuple[list[bool], str, int]:
    """Over a connection of ppctl's own: (what arrived right, the backend's error, how often NCCL's record names it)."""
    assert dist.group.WORLD is not None
    made, device = connections_of(dist.group.WORLD), torch.device("cuda", torch.cuda.current_device())
    backend: Any = made.of_all("nccl", "to itself")
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    right = []
    for number in range(3):
        sent = torch.full((size,), float(number), device=device)
        arrived = torch.empty_like(sent)
        # A receive alone would be waited for by the send behind it, for ever: NCCL gets both at once.
        group._start_coalescing(device)
        backend.recv([arrived], 0, 0)
        backend.send([sent], 0, 0)
        wait_for([group._end_coalescing(device)], Channel(0, 0, "F"))
        right.append(bool((arrived == number).all()))
    found = backend.get_error().name
    check_connection(backend, Channel(0, 0, "F"))
    record = pickle.loads(recorders()["nccl"](True, False))
    made.close()  # `shutdown`
    return right, found, sum("to itself" in str(entry["process_group"]) for entry in record["entries"])


@pytest.mark.parametrize("size", [1, 1 << 22])
def test_a_connection_of_nccl_carries_messages_and_is_ended(monkeypatch, size: int) -> None:
    monkeypatch.setattr("ranks.GPUS", 1)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    ((right, found, recorded),) = run_ranks(sent_to_itself, 1, size, over="nccl", timeout=120)
    assert right == [True] * 3
    assert found == "SUCCESS"
    assert recorded > 0


def ranks_over_nccl() -> int:
    """How many ranks NCCL takes here: one for each device, or many where it may put several on one."""
    return 8 if nccl_shares_gpus(nccl_version(), os.environ) else torch.cuda.device_count()


def test_the_dist_tier_runs_over_nccl(capfd: pytest.CaptureFixture[str]) -> None:
    count = ranks_over_nccl()
    if count < 2:
        pytest.skip("one device, and no NCCL from 2.30.7 on with NCCL_MULTI_RANK_GPU_ENABLE=1")
    dist_tier(capfd, PPCTL_TEST_RANKS="nccl", PPCTL_TEST_GPUS=str(count))


@pytest.mark.parametrize("writer", [True, False], ids=["writer", "own thread"])
def test_what_a_gpu_computes_behind_a_save_does_not_reach_it(tmp_path: Path, writer: bool) -> None:
    """The host does not wait for the copy; kernels that change what is saved do."""
    shards = [Shard(f"w{n}", (1 << 22,), (0,), torch.empty(1 << 22, device="cuda")) for n in range(8)]
    saver = saver_of(tmp_path, shards, writer=writer)
    for step in (1, 2, 3):
        for shard in shards:
            shard.tensor.fill_(step)
        saver.begin(step, shards, {})
        for shard in shards:
            shard.tensor.fill_(-1)
        saver.finish()
        path = saver.news()[0].path
        reader = CheckpointReader(path, read_manifest(path))
        assert all(reader.tensor(shard.name).eq(step).all() for shard in shards)
    saver.close()
