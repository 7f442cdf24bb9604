"""Which kernel each kind of product takes: chosen once, before the first step, by the config and the device."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ppctl.config.precision import autocast_dtype, weight_dtype
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.parameters import Sizes
from ppctl.model.activation import fuses_swiglu
from ppctl.model.block_attention import FLASH_ON_CPU, FLASH_ON_CUDA, MULTIPLE, UNFUSED, BlockAttention
from ppctl.model.fp8 import E4M3, E5M2, Fp8
from ppctl.model.linear import multiply_groups_scaled, multiply_in_float32, multiply_scaled
from ppctl.model.outside_kernels import Kernel, KernelUse, choose_outside, refusal
from ppctl.weight_gradients.wide_sums import adds_products

AttendDocuments = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn`, or a function with its contract."""

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
_NAMES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "efficient", MATH: "math"}

WIDEST_HEAD = 256
"""The widest head that flash attention takes."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a run on one rank."""

    attention: tuple[SDPBackend, ...] = ()
    """Backends of scaled_dot_product_attention, in order of preference. Empty: torch's own order."""
    attend_documents: AttendDocuments | None = None
    """Attention of all documents of a microbatch at once; None takes one document after the other."""
    drops: bool = False
    """Whether training takes attention with dropout (`dropped_attention`); the kernels above then only evaluate."""
    blocks: BlockAttention | None = None
    """Attention of ranks that share sequences, where keys of other ranks come block by block."""
    groups_experts: bool = False
    """Whether one grouped product serves all experts; otherwise there is one product for each."""
    fp8: Fp8 | None = None
    """How the layers' products with weights are computed in 8 bits; None computes them in the weights' dtype."""
    adds_gradients: bool = False
    """Whether products add weights' gradients to their float32 sums themselves; else autograd adds rounded ones."""
    fuses_swiglu: bool = False
    """Whether SwiGLU is one kernel each way, and a router's scores are normalised by kernels of the same kind."""
    fuses_optimizer: bool = False
    """Whether AdamW is one kernel over all parameters, without temporaries."""
    compiles: bool = False
    """Whether layers are compiled."""
    outside: Mapping[str, Kernel] = field(default_factory=dict)
    """Role -> a kernel that is not ppctl's, and serves in place of ppctl's kernel for the role."""
    by_transformers: bool = False
    """Whether the layers are transformers', which chooses the kernels of their attention and experts itself."""

    def names(self) -> dict[str, str]:
        """Kind of product -> the kernel that it takes: what env.json records."""
        attention = " > ".join(_NAMES[one] for one in self.attention) or "torch's choice"
        layers = {
            "attention": f"blocks with dropout (evaluation: {attention})" if self.drops else attention,
            "documents": "one by one" if self.drops or self.attend_documents is None else "varlen",
            **({} if self.blocks is None else {"blocks": self.blocks.name}),
            "experts": "grouped" if self.groups_experts else "one by one",
        }
        layers |= {_ROWS.get(role, role): own.name for role, own in self.outside.items()}
        return {
            **(dict.fromkeys(("attention", "experts"), "transformers' choice") if self.by_transformers else layers),
            "weights": _fp8_name(self.fp8),
            "gradients": "added by products" if self.adds_gradients else "added behind products",
            "swiglu": "fused" if self.fuses_swiglu else "step by step",
            "optimizer": "fused" if self.fuses_optimizer else "plain",
            "layers": "compiled" if self.compiles else "eager",
        }

    def line(self) -> str:
        """`kernels: attention flash > math, documents varlen, ...`, for a person."""
        return "kernels: " + ", ".join(f"{kind} {name}" for kind, name in self.names().items())


_ROWS = {"grouped_product": "experts"}
"""Role of a kernel from outside -> the kind of product, if that has another name."""


def _fp8_name(fp8: Fp8 | None) -> str:
    if fp8 is None:
        return "plain"
    how = "scaled" if fp8.multiply is multiply_scaled else "emulated"
    return f"fp8 {'blockwise' if fp8.blockwise else 'rowwise'} {how}"


ON_CPU = Kernels()
"""The kernels that every device can run, and a CPU does."""


@dataclass(frozen=True, slots=True)
class Capability:
    """The abilities of a device and of this build of torch, on which the choice of kernels depends."""

    device: str
    """`cuda` or `cpu`."""
    compute: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (9, 0) is Hopper."""
    attend_documents: AttendDocuments | None = None
    """torch's varlen_attn, if it has the arguments that are needed."""
    grouped_products: bool = True
    """Whether torch has grouped_mm, and its scaled form."""
    scaled_products: bool = True
    """Whether torch has scaled_mm."""
    adds_products: bool = True
    """Whether a product of 16-bit matrices can be added to a float32 matrix in place (`adds_products`)."""
    fuses_swiglu: Callable[..., bool] = lambda *, weighted: True
    """(weighted=whether experts need it) -> whether torch compiles SwiGLU for the device, and for experts a router's
    kernels. The call tries it (`fuses_swiglu`)."""
    cuda: tuple[int, ...] = ()
    """The version of CUDA that torch was built for."""

    @classmethod
    def of(cls, device: torch.device, *, packed: bool) -> Capability:
        """The capability of this process's device. Looks up varlen_attn, which takes a second, only if `packed`."""
        if device.type != "cuda":
            return cls(device.type)
        compute = torch.cuda.get_device_capability(device)
        cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
        grouped, scaled = hasattr(F, "grouped_mm"), hasattr(F, "scaled_mm")  # not in every torch that ppctl supports
        documents = _varlen_attn() if packed else None
        fuses = partial(fuses_swiglu, device)
        return cls(device.type, compute, documents, grouped, scaled, adds_products(device), fuses, cuda)


def _varlen_attn() -> AttendDocuments | None:
    """torch's `varlen_attn`, imported when it is needed, because it imports torch's compiler; None in builds of torch
    without it."""
    try:
        kernel: AttendDocuments = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return kernel if {"scale", "window_size", "enable_gqa"} <= inspect.signature(kernel).parameters.keys() else None


def choose_kernels(config: RunConfig, can: Capability) -> Kernels:
    """The kernels of a run. Raises ConfigError if the device (PP-E771, PP-E772) or a kernel (PP-E773) cannot serve."""
    model, cuda = config.model, can.device == "cuda"
    cast = autocast_dtype(config.parallel)
    if model.transformers is not None:
        if model.kernels:
            raise refusal("transformers' layers choose their kernels themselves")
        return Kernels(fuses_optimizer=cuda, compiles=config.train.compile, by_transformers=True)
    dtype = cast or weight_dtype(config.parallel)
    shares = config.parallel.context_parallel_size > 1
    reason = _unable(model, can, dtype, blockwise=shares)
    if reason:
        message = f"model.attention_backend={model.attention_backend} cannot be obeyed: {reason}"
        raise ConfigError(Problem("PP-E771", message, "model.attention_backend=auto"))
    reason, remedy = _unable_fp8(model, can)
    if reason:
        raise ConfigError(Problem("PP-E772", f"model.fp8={model.fp8} cannot be computed: {reason}", remedy))
    outside = _outside(config, can, dtype)
    packed = config.data.reset_attention_mask
    # Under autocast operands have several dtypes, and it casts them for neither of these two kernels.
    joins = packed and cast is None and _joins_documents(model, can, dtype)
    groups = model.num_moe_experts is not None and cast is None and _groups_experts(model, can, dtype)
    return Kernels(
        attention=_attention(model.attention_backend, can, lengths_vary=packed and not joins),
        attend_documents=can.attend_documents if joins and "attention" not in outside else None,
        drops=model.attention_dropout > 0,
        blocks=_blocks(model, can, dtype) if shares else None,
        groups_experts=groups or "grouped_product" in outside,
        outside=outside,
        fp8=None if model.fp8 is None else _fp8(model, can, groups=groups),
        # A compiled graph has products of its own.
        adds_gradients=cuda and can.adds_products and (dtype, cast, config.train.compile) == ("bfloat16", None, False),
        fuses_swiglu=cuda
        and (dtype, model.gated_linear_unit) == ("bfloat16", True)
        and can.fuses_swiglu(weighted=model.num_moe_experts is not None),
        fuses_optimizer=cuda,
        compiles=config.train.compile,
    )


def _outside(config: RunConfig, can: Capability, dtype: str) -> dict[str, Kernel]:
    """The kernels of `model.kernels` that serve. Raises ConfigError (PP-E773) if one kernel would never be called."""
    model, parallel, sizes = config.model, config.parallel, Sizes.of(config.model)
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size or 1
    use = KernelUse(
        device=can.device,
        compute=can.compute,
        dtype=getattr(torch, dtype),
        length=config.data.seq_length,
        hidden=sizes.hidden,
        heads=sizes.heads // tp,
        groups=max(1, (sizes.heads if sizes.latent else sizes.groups) // tp),  # ranks may have the same group
        width=sizes.query_head,
        values_width=sizes.value_head,
        experts=sizes.experts // parallel.expert_model_parallel_size,
        expert_width=sizes.expert // etp,
        bias=sizes.norm_bias,
        epsilon=model.norm_epsilon,
    )
    outside = choose_outside(model.kernels or (), use, compiles=config.train.compile)
    cast = autocast_dtype(config.parallel) is not None
    alone = parallel.expert_model_parallel_size == etp == 1
    for role, key, against in (
        *((role, "parallel.enable_autocast", cast) for role in ("attention", "grouped_product", "norm")),
        ("attention", "parallel.context_parallel_size", parallel.context_parallel_size > 1),
        ("attention", "model.attention_dropout", model.attention_dropout > 0),
        ("attention", "model.attention_backend", model.attention_backend != "auto"),
        ("grouped_product", "model.num_moe_experts", model.num_moe_experts is None),
        ("grouped_product", "model.fp8", model.fp8 is not None),
        ("dispatch", "parallel.expert_model_parallel_size", alone),
    ):
        if role in outside and against:
            rest = [each.name for other, each in outside.items() if other != role]
            raise refusal(f"{outside[role].name} for {role} is never called with {key}={config[key]}", rest)
    return outside


def _attention(backend: str, can: Capability, *, lengths_vary: bool) -> tuple[SDPBackend, ...]:
    """The order in which attention's kernels are tried. On a CPU, which has two, torch's own order stays by default.

    cuDNN's is the fastest from Hopper on, but makes a graph for every new length, on the host (decision 34).
    """
    if backend == "unfused":
        return (MATH,)
    if can.device != "cuda":
        return () if backend == "auto" else (FLASH,)
    if backend == "flash":
        return (FLASH,)
    fused = (CUDNN, FLASH) if can.compute >= (9, 0) and not lengths_vary else (FLASH, CUDNN)
    if backend == "fused":
        return fused
    return (FLASH, EFFICIENT, MATH) if lengths_vary else (*fused, EFFICIENT, MATH)


def _unable(model: ModelConfig, can: Capability, dtype: str, *, blockwise: bool) -> str:
    """Why this device has no kernel of the kind that `model.attention_backend` names; empty if it has one.

    `blockwise` attention takes no fused kernel but flash attention, whose operands are filled up to one width.
    """
    sizes, backend = Sizes.of(model), model.attention_backend
    if backend not in ("fused", "flash"):
        return ""
    if can.device != "cuda":
        if blockwise or sizes.query_head == sizes.value_head:
            return ""
        return f"the CPU's fused attention needs one width of a head, not {sizes.query_head} and {sizes.value_head}"
    if dtype not in ("bfloat16", "float16"):
        return f"on a GPU this attention computes in 16 bits, not in {dtype} (parallel.bf16=true)"
    if can.compute < (8, 0):
        return f"it needs compute capability 8.0, but this GPU has {can.compute[0]}.{can.compute[1]}"
    widest = max(sizes.query_head, sizes.value_head) if blockwise else sizes.query_head
    if (blockwise or backend == "flash") and widest > WIDEST_HEAD:
        return f"flash attention's heads are at most {WIDEST_HEAD} wide, not {widest}"
    return ""


def _blocks(model: ModelConfig, can: Capability, dtype: str) -> BlockAttention:
    """The kernel for blocks of keys: flash attention if the device has it for these heads, else the unfused one."""
    if model.attention_backend == "unfused":
        return UNFUSED
    if can.device != "cuda":
        return FLASH_ON_CPU
    fits = max(Sizes.of(model).query_head, Sizes.of(model).value_head) <= WIDEST_HEAD
    return FLASH_ON_CUDA if fits and dtype in ("bfloat16", "float16") and can.compute >= (8, 0) else UNFUSED


def _joins_documents(model: ModelConfig, can: Capability, dtype: str) -> bool:
    """Whether varlen_attn takes this model's heads: it is flash attention; narrower values are padded for it."""
    width, values = Sizes.of(model).query_head, Sizes.of(model).value_head
    fits = width % MULTIPLE == 0 and values <= width <= WIDEST_HEAD
    fused = model.attention_backend != "unfused"
    return fused and fits and dtype in ("bfloat16", "float16") and can.compute >= (8, 0) and bool(can.attend_documents)


def _groups_experts(model: ModelConfig, can: Capability, dtype: str) -> bool:
    """Whether grouped_mm is one kernel for this model's experts, and right: rows of whole 16 bytes, on Hopper.

    On Blackwell the weight gradients of experts without rows are whatever was in memory (pytorch#172439). On other GPUs
    torch fetches the groups' ends to the host, multiplies group by group, and waits for the device in every product
    (pytorch#186620); ppctl's own products, one for each expert, wait once a layer.
    """
    fits = model.hidden_size % MULTIPLE == model.expert_width % MULTIPLE == 0
    return fits and dtype == "bfloat16" and can.device == "cuda" and can.compute[0] == 9 and can.grouped_products


def _fp8(model: ModelConfig, can: Capability, *, groups: bool) -> Fp8:
    gradients = E5M2 if model.fp8 == "hybrid" else E4M3
    multiply = multiply_scaled if can.device == "cuda" else multiply_in_float32
    return Fp8(gradients, model.fp8_recipe == "blockwise", multiply, multiply_groups_scaled if groups else None)


def _unable_fp8(model: ModelConfig, can: Capability) -> tuple[str, str]:
    """(why this GPU cannot compute `model.fp8`, an override with which it can); both empty if it can, or for a CPU."""
    without = "model.fp8=null"
    if model.fp8 is None or can.device != "cuda":
        return "", ""
    if not can.scaled_products:
        return "this torch has no scaled_mm", without
    if model.num_moe_experts is not None and not (can.grouped_products and can.compute[0] == 9):
        return "experts need torch's scaled grouped product, which is for Hopper (compute capability 9.0)", without
    if model.num_moe_experts is not None and (model.fp8, model.fp8_recipe) != ("e4m3", "rowwise"):
        remedy = "model.fp8=e4m3 model.fp8_recipe=rowwise"
        return "torch multiplies the rows of all experts only in e4m3 with a scale for each row", remedy
    if can.compute < (8, 9):
        return f"it needs compute capability 8.9, but this GPU has {can.compute[0]}.{can.compute[1]}", without
    if model.fp8_recipe == "blockwise" and (can.compute[0] != 9 or can.cuda < (12, 9)):
        return "blockwise scales need Hopper (compute capability 9.0) and a torch for CUDA 12.9 or newer", without
    if model.fp8_recipe == "blockwise" and model.fp8 == "hybrid":
        return "torch multiplies blockwise values in e4m3 alone, not gradients in e5m2", "model.fp8=e4m3"
    return "", ""
