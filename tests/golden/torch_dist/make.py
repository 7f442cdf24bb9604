"""Writes the checkpoints beside this file with Megatron-core, and shows that Megatron-core loads what ppctl exports.

    python make.py write             # DIR/KIND, and what each weight is in expected.safetensors
    python make.py check KIND DIR    # DIR: `ppctl ckpt export --torch-dist`; exit 1 where a value differs

Needs megatron-core 0.16.1, psutil and torch; ppctl's tests read what it has written. Two calls of CUDA are stubbed, and
the memory of a process, which Megatron-core logs.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

HERE = Path(__file__).parent
SIZES = dict(num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12)
EXPERTS = dict(
    num_moe_experts=2,
    moe_router_topk=1,
    moe_router_pre_softmax=True,
    moe_ffn_hidden_size=6,
    add_qkv_bias=True,
    qk_layernorm=True,
)
KINDS = {
    "stacked": ({}, {}),
    "alone": ({}, {"singleton_local_shards": True}),
    "experts": (EXPERTS, {}),
    "mixed": ({**EXPERTS, "moe_layer_freq": [0, 1]}, {}),
}
VOCABULARY = 16


def build(kind: str):
    """A GPT model of the kind, drawn from one seed, in Megatron's own layers."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    more, _ = KINDS[kind]
    config = TransformerConfig(
        **{**SIZES, **more},
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    if kind == "mixed":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=more.get("num_moe_experts"), moe_grouped_gemm=False, qk_layernorm="qk_layernorm" in more,
            normalization="RMSNorm",
        )  # fmt: skip
    model = GPTModel(config, spec, VOCABULARY, max_sequence_length=16, position_embedding_type="rope",
                     share_embeddings_and_output_weights=False)  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases would be ones and zeros
            parameter.copy_(torch.randn(parameter.shape))
    return model


def ours(model) -> dict:
    """The weights by ppctl's names, taken apart by hand."""
    import torch

    found = {}
    for name, value in model.named_parameters():
        value = value.detach().clone()
        name = name.replace("decoder.layers.", "layers.").replace("local_experts.", "")
        for theirs, mine in (
            ("embedding.word_embeddings", "tok_embeddings"), ("decoder.final_layernorm", "norm"),
            ("output_layer", "output"), ("input_layernorm", "attention_norm"), ("pre_mlp_layernorm", "ffn_norm"),
            ("self_attention.linear_proj", "attention.wo"), ("self_attention.q_layernorm", "attention.q_norm"),
            ("self_attention.k_layernorm", "attention.k_norm"), ("mlp.router", "moe.router"),
            ("mlp.experts", "moe.experts"), ("mlp.linear", "feed_forward.linear"), ("linear_fc2", "w2"),
        ):  # fmt: skip
            name = name.replace(theirs, mine)
        if "linear_qkv" in name:
            parts = {"wq": [], "wk": [], "wv": []}
            for group in value.chunk(SIZES["num_query_groups"]):
                a, b, key, val = group.chunk(4)  # two heads, their key, their value: head by head
                parts["wq"] += [a, b]
                parts["wk"].append(key)
                parts["wv"].append(val)
            found |= {
                name.replace("self_attention.linear_qkv", f"attention.{w}"): torch.cat(p) for w, p in parts.items()
            }
        elif "linear_fc1" in name:
            found[name.replace("linear_fc1", "w1")], found[name.replace("linear_fc1", "w3")] = value.chunk(2)
        else:
            found[name] = value
    return {name: value.contiguous() for name, value in found.items()}


def start() -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._process_memory = lambda: 0
    parallel_state.initialize_model_parallel(1, 1)


def write() -> None:
    from megatron.core import dist_checkpointing
    from safetensors.torch import save_file

    for kind, (_, metadata) in KINDS.items():
        model, path = build(kind), HERE / kind
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        state = model.sharded_state_dict(prefix="", metadata=metadata)
        dist_checkpointing.save({**state, "iteration": 7}, str(path), content_metadata=metadata)
        save_file(ours(model), path / "expected.safetensors")


def check(kind: str, path: str) -> int:
    import torch
    from megatron.core import dist_checkpointing

    model, expected = build(kind), build(kind).state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, metadata = KINDS[kind]
    loaded = dist_checkpointing.load(model.sharded_state_dict(prefix="", metadata=metadata), path)
    loaded.pop("iteration", None)
    model.load_state_dict({name: value for name, value in loaded.items() if name in expected})
    same = {name: torch.equal(value, expected[name]) for name, value in model.named_parameters()}
    print(f"{kind}: {sum(same.values())} of {len(same)} parameters are equal to the bit")
    return 0 if all(same.values()) and same else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start()
    sys.exit(write() if sys.argv[1] == "write" else check(*sys.argv[2:]))
