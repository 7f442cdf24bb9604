"""The real megatron-core on CPUs over gloo: what stands in for a GPU, and a tiny GPTModel that trains a few steps.

`on_cpus` must run before anything of Megatron is imported, in a rank's process: it patches torch. Stand-ins:

* `torch.cuda.current_device`, `set_device`, `device_count`, `is_available` (stays False), `synchronize`, `empty_cache`,
  `manual_seed`, the generator's state, `nvtx`: the CPU, or nothing. `Stream`, `Event`, `stream`, `current_stream`,
  `default_stream`: work on a CPU is in order by itself;
* `device="cuda"` of any function of torch, `Tensor.cuda`, `Module.cuda`: the CPU. `Tensor.type()` names a CPU's tensor
  as a GPU's, which Megatron's optimizers ask for;
* `torch.compile`: the function itself, as nothing here is worth compiling;
* `torch.empty`: filled with NaN, so that nobody uses what nobody has written;
* `fused_weight_gradient_mlp_cuda`: APEX's product that adds a weight's gradient to `main_grad`, in plain torch;
* `_get_cuda_rng_state` and `_set_cuda_rng_state` of Megatron's random numbers: the CPU's generator;
* `te_general_gemm` of `moe_utils`: None. 0.16.1 leaves it undefined without Transformer Engine;
* `WrappedTorchNorm`: takes sequence parallelism, for which Megatron wants APEX's norms.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import sys
import types
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

M, SEQ, MBS, VOCABULARY, STEPS = 4, 16, 2, 64, 3
CPU = torch.device("cpu")

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None,
    reason="megatron-core is not installed (it has wheels for Linux alone)",
)


class _OnCpu(TorchFunctionMode):
    """Every `device="cuda"` is the CPU."""

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device", "")):
            kwargs = kwargs | {"device": CPU}
        result = function(*args, **kwargs)
        if function in (torch.empty, torch.empty_like) and result.is_floating_point() and result.device == CPU:
            with torch.no_grad():
                result.fill_(torch.nan)
        return result


class _Stream:
    """A stream, or an event, of a device whose work is done when a call returns."""

    def __init__(self, *_, **__):
        self.cuda_stream = 0

    def __getattr__(self, name):
        return self.record_event if name == "record_event" else lambda *_, **__: None

    def record_event(self, *_):
        return _Stream()

    def query(self):
        return True


def _accumulate(x: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
    main_grad.add_(gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))


def _norm_of(make: Any, kind: type, config: Any, *more: Any, **named: Any) -> Any:
    """A norm of torch's, marked as APEX's is: its gradient is summed over the ranks that share a sequence."""
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = make(kind, plain, *more, **named)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def on_cpus() -> None:
    """Put the stand-ins in their places. Once per process; a second call does nothing."""
    if isinstance(torch.cuda.Stream, type) and issubclass(torch.cuda.Stream, _Stream):
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    _OnCpu().__enter__()
    torch.compile = lambda function=None, **_: function or (lambda given: given)
    cuda: Any = torch.cuda
    nothing = lambda *_, **__: None  # noqa: E731
    cuda.current_device, cuda.device_count = lambda: CPU, lambda: 1
    for name in ("synchronize", "set_device", "empty_cache", "manual_seed", "reset_peak_memory_stats"):
        setattr(cuda, name, nothing)
    cuda.nvtx = types.SimpleNamespace(range_push=nothing, range_pop=nothing, range=lambda *_: contextlib.nullcontext())
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *given, **named: (
        kind(self, *given, **named) if given or named else "torch.cuda." + kind(self).rpartition(".")[2]
    )
    fused: Any = types.ModuleType("fused_weight_gradient_mlp_cuda")
    fused.wgrad_gemm_accum_fp32 = fused.wgrad_gemm_accum_fp16 = _accumulate
    sys.modules[fused.__name__] = fused
    import megatron.core.tensor_parallel.random as draws

    draws._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    draws._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    import megatron.core.transformer.moe.moe_utils as experts

    experts.te_general_gemm = getattr(experts, "te_general_gemm", None)
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__
    WrappedTorchNorm.__new__ = lambda cls, config, *more, **named: _norm_of(make, cls, config, *more, **named)


@dataclass(frozen=True)
class Case:
    """Sizes, and further words: see `build` and `step_of` for each."""

    pp: int = 1
    vpp: int | None = None
    dp: int = 1
    tp: int = 1
    words: str = ""

    def __str__(self) -> str:
        sizes = (("pp", self.pp), ("vpp", self.vpp or 1), ("dp", self.dp), ("tp", self.tp))
        return " ".join([f"{name}{size}" for name, size in sizes if size > 1] + self.words.split())

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def says(self, *words: str) -> bool:
        return any(word in self.words.split() for word in words)


def initialise(case: Case) -> None:
    """Megatron's process groups."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
    )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(123)


def config_of(case: Case) -> Any:
    """The TransformerConfig of a case."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if case.says("bf16") else torch.float32
    # Two ranks that interleave in batches mix up activations and gradients over gloo; Megatron's arguments forbid it.
    overlap = case.vpp is not None and not case.says("batched")
    more: dict[str, Any] = {}
    if case.says("moe"):
        more = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_ffn_hidden_size": 32,
        }
    if case.says("mtp"):
        more |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
    if case.says("partial"):
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=max(4, 2 * case.pp * (case.vpp or 1) // 2),
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.says("bf16"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=case.tp,
        sequence_parallel=case.tp > 1 and case.says("sp"),
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        add_bias_linear=case.says("bias"),
        gradient_accumulation_fusion=case.says("fusion"),
        deallocate_pipeline_outputs=not overlap,  # gloo would send what is freed
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        overlap_p2p_comm=overlap,
        batch_p2p_comm=not overlap,
        calculate_per_token_loss=case.says("tokens"),
        variable_seq_lengths=case.says("variable"),
        moe_token_dispatcher_type="alltoall" if case.says("variable") else "allgather",
        **more,
    )


def chunk_of(case: Case, config: Any, vp_stage: int | None, **ends: Any) -> Any:
    """One chunk of a GPTModel on this rank; `ends` are `pre_process`, `post_process`, `pg_collection`."""
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    spec = get_gpt_layer_local_spec()
    if case.says("moe"):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)
    mtp = None
    if case.says("mtp"):
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=vp_stage)
    model = GPTModel(
        config,
        spec,
        VOCABULARY,
        SEQ,
        parallel_output=True,
        share_embeddings_and_output_weights=case.says("tied"),
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        **ends,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def build(case: Case) -> tuple[Any, list[Any], Any]:
    """The config, this rank's chunks and the optimizer.

    `ddp`: Megatron's DistributedDataParallel; `overlap`: it reduces gradients during backwards; `align`: when the
    schedule says so; `dist`: with the distributed optimizer; `gather`: whose parameters are gathered during forwards.
    """
    from megatron.core import parallel_state

    config, chunks = config_of(case), []
    for number in range(case.vpp or 1):
        stage = number if case.vpp else None
        torch.manual_seed(7 + 100 * number + parallel_state.get_pipeline_model_parallel_rank())
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        chunks.append(chunk_of(case, config, stage, pre_process=first, post_process=last))
    return config, *wrapped(case, config, chunks)


def wrapped(case: Case, config: Any, chunks: list[Any]) -> tuple[list[Any], Any]:
    """The chunks under the case's data parallelism, and their optimizer."""
    if not case.says("ddp", "dist"):
        kind = torch.optim.SGD if case.says("sgd") else torch.optim.Adam
        return chunks, kind([p for chunk in chunks for p in chunk.parameters()], lr=0.01)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    if case.says("bf16"):
        from megatron.core.transformer.module import Float16Module

        chunks = [Float16Module(config, chunk) for chunk in chunks]
    overlap, gather = case.says("overlap", "align"), case.says("gather")
    distributed = case.says("dist")
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        overlap_param_gather=gather,
        use_distributed_optimizer=distributed,
        bucket_size=2000,
        grad_reduce_in_fp32=True,
    )
    chunks = [DistributedDataParallel(config, ddp, chunk, disable_bucketing=False) for chunk in chunks]

    def one_or_all(name: str) -> Any:
        functions = [getattr(chunk, name) for chunk in chunks]
        return functions if len(functions) > 1 else functions[0]

    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = one_or_all("no_sync")
    if case.says("align"):
        config.grad_sync_func = one_or_all("start_grad_sync")
    if gather and case.says("align"):
        config.param_sync_func = one_or_all("start_param_sync")
    asked = OptimizerConfig(
        optimizer="sgd" if case.says("sgd") else "adam",
        lr=0.01,
        weight_decay=0.0,
        bf16=case.says("bf16"),
        params_dtype=config.params_dtype,
        use_distributed_optimizer=distributed,
        overlap_param_gather=gather,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(asked, chunks)
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def batches(step: int) -> list[tuple[torch.Tensor, ...]]:
    """This replica's microbatches of one step: tokens, labels, mask."""
    from megatron.core import parallel_state

    draws = torch.Generator().manual_seed(11 + 1000 * step + parallel_state.get_data_parallel_rank())
    made = []
    for _ in range(M):
        tokens = torch.randint(VOCABULARY, (MBS, SEQ + 1), generator=draws)
        mask = (torch.rand(MBS, SEQ, generator=draws) > 0.3).float()
        made.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), mask))
    return made


def step_of(case: Case) -> Any:
    """A `forward_step_func`; with `tokens` or `triple` its loss function returns the number of tokens, too."""
    positions = torch.arange(SEQ)[None].expand(MBS, -1)
    attention = torch.triu(torch.ones(SEQ, SEQ, dtype=torch.bool), 1)[None, None]

    def loss_of(mask: torch.Tensor) -> Any:
        def loss(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            total = (output.float() * mask).sum()
            if case.says("tokens", "triple"):
                return total, mask.sum().int(), {"loss": total.detach().clone()}
            mean = total / mask.sum()
            return mean, {"loss": mean.detach().clone()}

        return loss

    def step(iterator: Any, model: Any) -> Any:
        tokens, labels, mask = next(iterator)
        return model(tokens, positions, attention, labels=labels, loss_mask=mask), loss_of(mask)

    return step


def arguments_of(case: Case, chunks: list[Any], step: int, **more: Any) -> dict[str, Any]:
    """The arguments of a forward-backward function, as Megatron's `train_step` passes them: [model] and an iterator."""
    iterators = [iter(batches(step)) for _ in chunks]
    return {
        "forward_step_func": step_of(case),
        "data_iterator": iterators if case.vpp else iterators[0],
        "model": chunks,
        "num_microbatches": M,
        "seq_length": SEQ,
        "micro_batch_size": MBS,
        "decoder_seq_length": SEQ,
        "forward_only": False,
        "adjust_tensor_shapes_fn": None,
    } | more


def gradients_of(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Every gradient of this rank, `main_grad` where there is one."""
    found = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                found[f"gradient {number} {name}"] = gradient.detach().clone()
    return found


Trained = tuple[dict[str, torch.Tensor], dict[str, float]]


def train(case: Case, choose: Any, **more: Any) -> dict[str, Any]:
    """Train `STEPS` steps by the function that `choose()` returns. Losses, gradients and weights by step and name."""
    _, chunks, optimizer = build(case)
    return run_steps(case, chunks, optimizer, choose, **more)


def run_steps(case: Case, chunks: list[Any], optimizer: Any, choose: Any, **more: Any) -> dict[str, Any]:
    """The steps of `train` on chunks that are there."""
    seen: dict[str, Any] = {}
    for step in range(STEPS):
        for chunk in chunks:
            getattr(chunk, "zero_grad_buffer", lambda: None)()
        optimizer.zero_grad()
        store = choose()(**arguments_of(case, chunks, step), **more)
        found: dict[str, Any] = {"losses": [data["loss"].item() for data in store]} | gradients_of(chunks)
        optimizer.step()
        for number, chunk in enumerate(chunks):
            if case.says("gather"):
                chunk.start_param_sync(force_sync=True)
            found |= {f"weight {number} {name}": p.detach().clone() for name, p in chunk.named_parameters()}
        seen |= {f"step {step} {name}": value for name, value in found.items()}
    return seen


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names under which two trainings differ in a bit; `nothing compared` where there is nothing."""
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        if not same:
            wrong.append(name)
    return wrong if ours else ["nothing compared"]


def forget_scales() -> None:
    """Megatron's class variables of auxiliary losses, as in a new process."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossAutoScaler.main_loss_backward_scale = torch.tensor(1.0)


def compared(case: Case) -> dict[str, Any]:
    """On a rank: the names that differ between ours and Megatron's functions, and how many were compared.

    Ours come first, in a process in which Megatron's have never run.
    """
    on_cpus()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # a config of Megatron's with tp looks at it
    initialise(case)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    import ppctl

    ours = train(case, ppctl.get_forward_backward_func)
    forget_scales()
    theirs = train(case, get_forward_backward_func)
    gradients = [value for name, value in theirs.items() if " gradient " in name]
    return {
        "differ": differences(ours, theirs),
        "compared": len(theirs),
        "nonzero": sum(bool(gradient.any()) for gradient in gradients),
        "gradients": len(gradients),
        "losses": [value for name, value in theirs.items() if name.endswith("losses")],
        "world": dist.get_world_size(),
    }
