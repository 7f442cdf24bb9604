"""Tiny models of transformers with random weights, by architecture: odd sizes, tied and untied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from ppctl.foreign.describe import describe
from ppctl.geometry.foreign_model import Adapters, ForeignModel
from ppctl.host.files import write_atomically
from ppctl.launch import described as launched
from ppctl.launch import weights

NOTHING: Mapping[str, str] = MappingProxyType({})

LAYERS, HIDDEN, WORDS = 4, 24, 320

SIZES = dict(
    vocab_size=WORDS,
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
GROUPED = dict(**SIZES, num_key_value_heads=2, intermediate_size=40)
HEADS = dict(**GROUPED, head_dim=8)
WINDOW = dict(**HEADS, sliding_window=5)
EXPERTS = dict(**HEADS, num_experts_per_tok=2)
NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
TIED, UNTIED = dict(tie_word_embeddings=True), dict(tie_word_embeddings=False)
LATENT = dict(
    GROUPED, num_key_value_heads=4, kv_lora_rank=14, q_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=8,
    v_head_dim=5, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2,
    topk_group=1, first_k_dense_replace=2,
)  # fmt: skip

BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.3)
"""A loss over the routers of all layers, which the model's own code adds."""

FEW: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "GPT2": SIZES | NO_DROPOUT,
    "Gemma2": WINDOW | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "Granite": GROUPED | TIED | dict(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.3),
    "Falcon": SIZES | TIED | dict(multi_query=True, alibi=False),
    "Mixtral balanced": EXPERTS | dict(num_local_experts=4) | BALANCED,
}
"""What `make test` tries: each has something that the others have not, which a forward made for Llama would lose."""

OTHERS: dict[str, dict[str, Any]] = {
    "Qwen2": GROUPED | TIED,
    "Qwen3": HEADS,
    "Mixtral": EXPERTS | dict(num_local_experts=4),
    "Qwen3Moe": EXPERTS | dict(num_experts=4, moe_intermediate_size=16),
    "DeepseekV3": LATENT,
    "Glm": HEADS | UNTIED,
    "Gemma3Text": WINDOW | dict(layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "GraniteMoe": GROUPED | TIED | dict(num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.2),
    "Cohere": GROUPED | TIED,
    "Cohere2": WINDOW | TIED | dict(layer_types=["sliding_attention"] * 3 + ["full_attention"]),
    "Phi3": GROUPED,
    "Olmo2": GROUPED,
    "Olmoe": GROUPED | dict(num_experts=4, num_experts_per_tok=2),
    "GPTNeoX": SIZES | dict(intermediate_size=40),
    "StableLm": GROUPED,
    "Starcoder2": GROUPED | dict(embedding_dropout=0.0, residual_dropout=0.0),
    "Mpt": dict(d_model=HIDDEN, n_heads=4, n_layers=LAYERS, expansion_ratio=2, max_seq_len=64, vocab_size=WORDS),
    "Bloom": dict(hidden_size=HIDDEN, n_head=4, n_layer=LAYERS, vocab_size=WORDS, pad_token_id=None),
    "GptOss": WINDOW | dict(num_local_experts=4, num_experts_per_tok=2),
    "SmolLM3": GROUPED | dict(no_rope_layers=[1, 1, 1, 0]),
    "OPT": SIZES | dict(word_embed_proj_dim=HIDDEN, ffn_dim=40, dropout=0.0),
    # Experts in every other layer: not every hop carries more than the one before it.
    "Qwen2Moe balanced": GROUPED
    | BALANCED
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=12,
        decoder_sparse_step=2,
    ),
}
MIXED = GROUPED | dict(mamba_n_heads=6, mamba_d_state=8, mamba_d_head=8)
LINEAR = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip
OTHERS |= {
    # Layers of several kinds: linear and lightning attention, state spaces, convolutions, recurrences, local windows.
    "Qwen3Next balanced": EXPERTS
    | LINEAR
    | BALANCED
    | dict(num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=12),
    "MiniMax balanced": EXPERTS
    | BALANCED
    | dict(num_local_experts=4, block_size=8, layer_types=["linear_attention", "full_attention"] * 2),
    "Mamba2": dict(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=LAYERS, state_size=8, head_dim=8, num_heads=8, n_groups=2
    ),
    "Bamba": MIXED | dict(mamba_n_groups=1, attn_layer_indices=[1]),
    "GraniteMoeHybrid balanced": MIXED
    | BALANCED
    | dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        layer_types=["mamba", "attention", "mamba", "attention"],
    ),
    "Jamba balanced": GROUPED
    | BALANCED
    | dict(
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        use_mamba_kernels=False,
    ),
    "Lfm2": GROUPED | dict(layer_types=["conv", "full_attention"] * 2),
    "RecurrentGemma": GROUPED | dict(num_key_value_heads=1, lru_width=HIDDEN, attention_window_size=5),
    "GPTNeo": dict(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=4,
        max_position_embeddings=64,
        intermediate_size=40,
        attention_types=[[["global", "local"], 2]],
        window_size=5,
        attention_dropout=0.0,
        embed_dropout=0.0,
        resid_dropout=0.0,
    ),
    # Routers that hold biases, widen what they read, or divide rows by themselves; and other activations and norms.
    "Ernie4_5_Moe balanced": EXPERTS | BALANCED | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "Phimoe balanced": GROUPED
    | BALANCED
    | dict(num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "HunYuanMoEV1": EXPERTS | dict(num_experts=4, moe_topk=2),
    "DeepseekV2": {key: value for key, value in LATENT.items() if key != "n_group"} | dict(topk_method="greedy"),
    "GPTJ": dict(vocab_size=WORDS, n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=64, rotary_dim=4) | NO_DROPOUT,
    "Phi": GROUPED | dict(num_attention_heads=3, num_key_value_heads=3, resid_pdrop=0.0, embd_pdrop=0.0),
    "Nemotron": HEADS,
    "Apertus": HEADS,
    "BitNet": GROUPED,
}
OTHERS |= {
    # Chunked attention beside full, and experts in every other layer; attention and a state space in one layer; layers
    # that return lists; two attentions in each, so that num_hidden_layers counts others; biases with two names.
    "Llama4Text": HEADS
    | dict(
        intermediate_size_mlp=40,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=5,
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
    ),
    "FalconH1": GROUPED | dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8),
    "OpenAIGPT": dict(vocab_size=WORDS, n_positions=64, n_embd=HIDDEN, n_layer=LAYERS, n_head=4) | NO_DROPOUT,
    "LongcatFlash": {key: LATENT[key] for key in LATENT if not key.startswith(("num_hidden", "n_group", "topk_g"))}
    | dict(
        num_layers=LAYERS,
        moe_topk=2,
        zero_expert_num=2,
        ffn_hidden_size=40,
        expert_ffn_hidden_size=16,
        head_dim=8,
        first_k_dense_replace=0,
    ),
    "Helium": HEADS | dict(head_dim=6),
    "Bert": SIZES
    | dict(intermediate_size=40, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}
OTHERS |= {f"{kind} balanced": OTHERS[kind] | BALANCED for kind in ("Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss")}


def config_of(kind: str) -> Any:
    """The config of an architecture; of `KIND, retied` tied where that is not, and the other way round."""
    import transformers  # here, because ranks that import a test need no model

    name, *retied = kind.split(", ")
    config = getattr(transformers, f"{name.split()[0]}Config")(**(FEW | OTHERS)[name])
    if retied:
        config.tie_word_embeddings = not config.tie_word_embeddings
    return config


def model_of(kind: str) -> nn.Module:
    """The whole model, in float32, whose weights depend on nothing but the architecture."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


KEPT = "DESCRIPTIONS_OF_TESTS"
"""The variable with the directory for descriptions that all workers of a test session share; `conftest.py` makes it.
As XDG_CACHE_HOME it serves commands, too."""


def described(
    directory: Path, overrides: Mapping[str, str] = NOTHING, adapters: Adapters | None = None
) -> ForeignModel:
    """A directory as the launcher describes it, but in this process, where torch is imported; once in a session."""
    digest = launched._digest(launched.read_config_file(directory), overrides, adapters)
    kept = Path(os.environ[KEPT], "ppctl", "models", f"{digest}.json")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, describe(directory, overrides, adapters).to_text())
    return ForeignModel.from_text(kept.read_text())


@contextmanager
def described_here() -> Iterator[None]:
    """Models are described in this process, once in a session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "describe", lambda *asked: described(*asked).to_text())
        yield
