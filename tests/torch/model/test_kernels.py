"""Which kernel each kind of product takes, by config and device; and that the paths around them compute the same."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cuts import tiny
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.config.compose import compose
from ppctl.config.schema import RunConfig
from ppctl.cost.layer_parts import attention_parts
from ppctl.cost.setting import Setting
from ppctl.errors import ConfigError
from ppctl.model.attention import Attention, core_attention
from ppctl.model.block_attention import FLASH_ON_CPU, FLASH_ON_CUDA, UNFUSED
from ppctl.model.kernels import CUDNN, EFFICIENT, FLASH, MATH, ON_CPU, Capability, Kernels, choose_kernels
from ppctl.model.packing import Documents, bounds_of

CPU = torch.device("cpu")
MLA = (
    "model.multi_latent_attention=true model.num_query_groups=null model.qk_head_dim=128 model.qk_pos_emb_head_dim=64 "
    "model.v_head_dim=128"
)
EXPERTS = "model.num_moe_experts=4 model.moe_ffn_hidden_size=64"
PACKED = "data.reset_attention_mask=true data.reset_position_ids=true"


def reference_varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    """torch.nn.attention.varlen.varlen_attn by its documents and its kernel's checks, of flash attention 2."""
    assert cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32 and cu_seq_q.is_contiguous()
    assert query.dim() == key.dim() == value.dim() == 3 and query.shape[0] == key.shape[0] == value.shape[0]
    assert query.shape[2] == key.shape[2] == value.shape[2], "one width"
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape[1] == value.shape[1] and (enable_gqa or query.shape[1] == key.shape[1])
    assert window_size == (-1, 0), "causal"
    bounds = cu_seq_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == query.shape[0]
    assert max_q == max_k == max(end - begin for begin, end in pairwise(bounds))
    parts = []
    for begin, end in pairwise(bounds):
        q, k, v = (heads[begin:end].transpose(0, 1) for heads in (query, key, value))
        k, v = (heads.repeat_interleave(q.shape[0] // k.shape[0], 0) for heads in (k, v))
        scores = q @ k.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        parts.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(parts)


H100 = Capability("cuda", (9, 0), reference_varlen)
A100, V100 = replace(H100, compute=(8, 0)), replace(H100, compute=(7, 0))
OLD_TORCH = replace(H100, attend_documents=None, grouped_products=False)


def chosen(typed, can):
    return choose_kernels(compose(typed.split()).config, can)


@pytest.mark.parametrize(
    ("typed", "can", "attention", "at_once"),
    [
        ("", Capability("cpu"), (), False),
        (PACKED, Capability("cpu"), (), False),
        ("parallel.bf16=true", H100, (CUDNN, FLASH, EFFICIENT, MATH), False),
        ("parallel.bf16=true", A100, (FLASH, CUDNN, EFFICIENT, MATH), False),
        (f"parallel.bf16=true {MLA}", H100, (CUDNN, FLASH, EFFICIENT, MATH), False),
        (f"parallel.bf16=true {PACKED}", H100, (CUDNN, FLASH, EFFICIENT, MATH), True),
        (f"parallel.bf16=true {PACKED} {MLA}", H100, (CUDNN, FLASH, EFFICIENT, MATH), True),
        # No graph of cuDNN's for every length of a document.
        (f"parallel.bf16=true {PACKED}", OLD_TORCH, (FLASH, EFFICIENT, MATH), False),
        (PACKED, H100, (FLASH, EFFICIENT, MATH), False),
        (f"parallel.bf16=true {PACKED} model.kv_channels=36", H100, (FLASH, EFFICIENT, MATH), False),
        (f"parallel.bf16=true {PACKED} model.kv_channels=320", H100, (FLASH, EFFICIENT, MATH), False),
        (f"{PACKED} parallel.enable_autocast=true parallel.autocast_dtype=bfloat16", H100, None, False),
        ("model.attention_backend=flash parallel.bf16=true", H100, (FLASH,), False),
        (f"model.attention_backend=flash parallel.bf16=true {PACKED}", H100, (FLASH,), True),
        ("model.attention_backend=fused parallel.fp16=true", H100, (CUDNN, FLASH), False),
        (f"model.attention_backend=fused parallel.bf16=true {PACKED}", OLD_TORCH, (FLASH, CUDNN), False),
        (f"model.attention_backend=unfused parallel.bf16=true {PACKED}", H100, (MATH,), False),
        ("model.attention_backend=unfused", Capability("cpu"), (MATH,), False),
        ("model.attention_backend=flash", Capability("cpu"), (FLASH,), False),
    ],
)
def test_attention_takes_the_fastest_kernel_that_can(typed, can, attention, at_once):
    kernels = chosen(typed, can)
    assert attention is None or kernels.attention == attention
    assert (kernels.attend_documents is not None) == at_once


@pytest.mark.parametrize(
    ("typed", "can", "blocks"),
    [
        ("", Capability("cpu"), FLASH_ON_CPU),
        (MLA, Capability("cpu"), FLASH_ON_CPU),
        (f"model.attention_backend=fused {MLA}", Capability("cpu"), FLASH_ON_CPU),
        ("model.attention_backend=unfused", Capability("cpu"), UNFUSED),
        ("parallel.bf16=true", H100, FLASH_ON_CUDA),
        (f"model.attention_backend=fused parallel.bf16=true {MLA}", A100, FLASH_ON_CUDA),
        ("model.attention_backend=unfused parallel.bf16=true", H100, UNFUSED),
        ("parallel.bf16=true", V100, UNFUSED),
        ("parallel.bf16=true model.kv_channels=320", H100, UNFUSED),
        ("", H100, UNFUSED),
    ],
)
def test_ranks_that_share_sequences_take_flash_attention_by_blocks(typed, can, blocks):
    kernels = chosen(f"cp=2 {typed}", can)
    assert kernels.blocks is blocks and kernels.names()["blocks"] == blocks.name
    assert chosen(typed.replace("model.attention_backend=fused", ""), can).blocks is None


@pytest.mark.parametrize(
    ("typed", "can", "reason"),
    [
        ("flash", H100, "16 bits, not in float32"),
        ("fused", H100, "16 bits, not in float32"),
        ("flash parallel.bf16=true", V100, "capability 8.0"),
        ("flash parallel.bf16=true model.kv_channels=320", H100, "at most 256 wide, not 320"),
        (f"fused {MLA}", Capability("cpu"), "192 and 128"),
        ("fused parallel.bf16=true cp=2 model.kv_channels=320", H100, "at most 256 wide, not 320"),
    ],
)
def test_a_kernel_that_the_device_lacks_is_refused_by_name(typed, can, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        chosen(f"model.attention_backend={typed}", can)
    (problem,) = error.value.problems
    assert problem.code == "PP-E771" and problem.remedy == "model.attention_backend=auto"


def test_flash_attention_of_latent_heads_is_planned_and_not_trained():
    typed = ["model.attention_backend=flash", *MLA.split()]
    compose(typed)
    with pytest.raises(ConfigError, match="keys and values of different widths, 192 and 128"):
        compose(typed, for_training=True)


@pytest.mark.parametrize(
    ("typed", "can", "grouped"),
    [
        (f"parallel.bf16=true {EXPERTS}", H100, True),
        (f"parallel.bf16=true {EXPERTS}", Capability("cpu"), False),
        (f"parallel.bf16=true {EXPERTS}", A100, False),
        # Experts without rows would get weight gradients of whatever was in memory (pytorch#172439).
        *((f"parallel.bf16=true {EXPERTS}", replace(H100, compute=one), False) for one in ((10, 0), (10, 3), (12, 0))),
        (f"parallel.bf16=true {EXPERTS}", OLD_TORCH, False),
        (EXPERTS, H100, False),
        (f"parallel.fp16=true {EXPERTS}", H100, False),
        ("parallel.bf16=true", H100, False),
        # 72 bytes are not whole times 16.
        ("parallel.bf16=true model.num_moe_experts=4 model.moe_ffn_hidden_size=36", H100, False),
    ],
)
def test_experts_share_one_product_where_the_kernel_can(typed, can, grouped):
    assert chosen(typed, can).groups_experts == grouped


def test_what_transformers_chooses_is_not_told_as_ours() -> None:
    config = RunConfig()
    config.model.transformers = "{}"
    for can in (Capability("cpu"), Capability("cuda", (9, 0))):
        names = choose_kernels(config, can).names()
        assert names["attention"] == names["experts"] == "transformers' choice"
        assert names["optimizer"] == ("fused" if can.device == "cuda" else "plain")


@pytest.mark.parametrize(
    ("typed", "can", "adds"),
    [
        ("parallel.bf16=true", H100, True),
        ("parallel.bf16=true", replace(H100, adds_products=False), False),
        ("parallel.bf16=true", Capability("cpu"), False),
        ("parallel.bf16=true parallel.enable_autocast=true", H100, False),
        ("parallel.bf16=true train.compile=true", H100, False),
        ("parallel.fp16=true", H100, False),
        ("", H100, False),
    ],
)
def test_products_add_gradients_of_bfloat16_weights_where_a_device_can(typed, can, adds):
    assert chosen(typed, can).adds_gradients == adds


@pytest.mark.parametrize(
    ("typed", "can", "fuses"),
    [
        ("parallel.bf16=true", H100, True),
        ("parallel.bf16=true parallel.enable_autocast=true", H100, True),
        ("parallel.bf16=true", replace(H100, fuses_swiglu=lambda *, weighted: weighted), False),
        (f"parallel.bf16=true {EXPERTS}", replace(H100, fuses_swiglu=lambda *, weighted: weighted), True),
        ("parallel.bf16=true", Capability("cpu", fuses_swiglu=None), False),
        ("parallel.fp16=true", replace(H100, fuses_swiglu=None), False),
        ("parallel.bf16=true model.gated_linear_unit=false", replace(H100, fuses_swiglu=None), False),
        ("", replace(H100, fuses_swiglu=None), False),
    ],
)
def test_swiglu_is_one_kernel_in_bfloat16_where_a_device_has_it_and_is_tried_only_there(typed, can, fuses):
    assert chosen(typed, can).fuses_swiglu == fuses


def test_all_kernels_are_named_in_one_line():
    kernels = chosen(f"parallel.bf16=true {PACKED} {EXPERTS} train.compile=true", H100)
    assert kernels.line() == (
        "kernels: attention cudnn > flash > efficient > math, documents varlen, experts grouped, weights plain, "
        "gradients added behind products, swiglu fused, optimizer fused, layers compiled"
    )
    assert ON_CPU.names() == {
        "attention": "torch's choice",
        "documents": "one by one",
        "experts": "one by one",
        "gradients": "added behind products",
        "weights": "plain",
        "swiglu": "step by step",
        "optimizer": "plain",
        "layers": "eager",
    }


LENGTHS = ((3, 1, 5), (9,))
HEADS = {
    "every head its own keys": (4, 4, 8, 8, None),
    "groups": (6, 2, 8, 8, None),
    "latent, a scale of its own": (4, 4, 12, 8, 0.4),
}


@pytest.mark.parametrize("kind", HEADS)
def test_documents_at_once_attend_as_one_by_one(kind):
    heads, groups, width, values, scale = HEADS[kind]
    generator = torch.Generator().manual_seed(0)

    def of(count, width):
        # As projections leave them: a head's row of numbers is not next to that of its next token.
        return torch.randn(2, 9, count, width, generator=generator, dtype=torch.float64).transpose(1, 2)

    given = [of(heads, width), of(groups, width), of(groups, values)]
    gradient = torch.randn(2, 9, heads * values, generator=generator, dtype=torch.float64)
    (bounds,) = bounds_of([LENGTHS], CPU)
    results = {}
    for name, kernels in {"one by one": ON_CPU, "at once": Kernels(attend_documents=reference_varlen)}.items():
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        out = core_attention(*inputs, kernels, Documents(LENGTHS, bounds), scale)
        results[name] = [out, *torch.autograd.grad(out, inputs, gradient)]
    for got, expected in zip(results["at once"], results["one by one"], strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_the_bounds_of_a_step_are_one_copy_and_every_layer_takes_the_same():
    lengths = ((4, 5), (2, 7))
    bounds = bounds_of([LENGTHS, lengths], CPU)
    assert [one.tolist() for one in bounds] == [[0, 3, 4, 9, 18], [0, 4, 9, 11, 18]]
    assert {one.dtype for one in bounds} == {torch.int32}
    assert len({one.untyped_storage().data_ptr() for one in bounds}) == 1
    seen = []

    def note(*args, **kwargs):
        seen.append(args[3].data_ptr())
        return reference_varlen(*args, **kwargs)

    model = tiny()
    for _ in range(2):
        attention = Attention(model, Kernels(attend_documents=note))
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.normal_()
        attention(torch.randn(2, 9, 24), torch.ones(9, 2, 3), Documents(lengths, bounds[1]))
    assert seen == [bounds[1].data_ptr()] * 2


class Orders(TorchFunctionMode):
    """The kernels that torch may take, in order, at each call of its attention."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.seen.append(torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True))
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def heads(*shape, dtype=torch.float32):
    """q, k, v in the order in which projections leave them in memory: heads side by side."""
    tensors = [torch.randn(2, 9, count, 8, dtype=dtype).transpose(1, 2) for count in shape]
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("documents", [None, Documents(LENGTHS)])
def test_torchs_attention_may_take_these_kernels_in_this_order_and_none_other(documents):
    before = torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True)
    with Orders() as orders:
        core_attention(*heads(4, 2, 2), Kernels((CUDNN, FLASH, MATH)), documents)
    assert orders.seen and all(seen[:3] == [CUDNN, FLASH, MATH] and EFFICIENT not in seen for seen in orders.seen)
    assert torch.nn.attention._cur_sdpa_kernel_backends(with_priority=True) == before
    with Orders() as orders:
        core_attention(*heads(4, 2, 2), ON_CPU, documents)
    assert orders.seen[0] == before


@pytest.mark.parametrize(("backend", "fused"), [("auto", True), ("fused", True), ("flash", True), ("unfused", False)])
def test_the_config_decides_between_fused_and_unfused_on_a_cpu_too(backend, fused):
    with Operations() as operations:
        core_attention(*heads(4, 2, 2), chosen(f"model.attention_backend={backend}", Capability("cpu")))
    assert any("flash_attention" in name for name in operations.seen) == fused
    assert any("softmax" in name for name in operations.seen) != fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [2, 4])
def test_what_unfused_attention_keeps_is_what_the_plan_says(groups, dtype):
    """The difference to fused attention: scores and copies in float32."""
    model = tiny(num_query_groups=groups, kv_channels=8)
    kept, planned = {}, {}
    for backend, kernels in {"auto": Kernels((FLASH,)), "unfused": Kernels((MATH,))}.items():
        kept[backend] = kept_by_heads(kernels, groups, dtype)
        setting = Setting(2, 9, dtype.itemsize)
        parts = attention_parts(replace(model, attention_backend=backend), setting)
        planned[backend] = setting.tokens * sum(size for _, size in parts)
    assert kept["unfused"] - kept["auto"] == planned["unfused"] - planned["auto"]


def kept_by_heads(kernels, groups, dtype):
    """Bytes that attention and the projection after it keep, each storage once."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    weight = torch.randn(1, 32, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = F.linear(core_attention(*heads(4, groups, groups, dtype=dtype), kernels), weight)
    assert out.requires_grad
    return sum(storage.nbytes() for storage in storages.values()) - weight.nbytes
