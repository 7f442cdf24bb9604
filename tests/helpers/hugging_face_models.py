"""Small random models of transformers' own classes, one or more of each family, and what they are compared by."""

import copy
import json

import torch
from cuts import cut

from ppctl.families.directory import open_directory
from ppctl.model.stage import build_stage
from ppctl.model.stage_model import pieces
from ppctl.pretrained.hugging_face import DirectoryReader

SIZES = dict(
    vocab_size=52,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,
)
ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2,
    "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 0.6,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=5, rms_norm_eps=1e-5
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
ROUTED = dict(**EXPERTS, n_routed_experts=8, n_shared_experts=2, routed_scaling_factor=1.5, num_nextn_predict_layers=0)
V2 = dict(**EXPERTS, n_routed_experts=8, n_shared_experts=2, aux_loss_alpha=0.0)

ALONE = dict(router_aux_loss_coef=0.0)  # no auxiliary loss beside the cross entropy
UNGROUPED = dict(n_group=1, topk_group=1)

DENSE = {
    "llama": ("Llama", dict(rms_norm_eps=1e-5)),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama, wide heads": ("Llama", dict(head_dim=10, num_key_value_heads=1)),
    "llama, yarn": ("Llama", dict(rope_parameters={k: v for k, v in YARN.items() if "mscale" not in k})),
    "llama, longer as 3.1": ("Llama", dict(rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "deepseek_v3, dense": ("DeepseekV3", dict(**LATENT, **ROUTED, q_lora_rank=10, first_k_dense_replace=4)),
    "deepseek_v3, dense, direct queries, yarn": (
        "DeepseekV3",
        dict(**LATENT, **ROUTED, q_lora_rank=None, first_k_dense_replace=4, rope_parameters=YARN),
    ),
    "glm4_moe, dense": (
        "Glm4Moe", dict(**ROUTED, head_dim=8, attention_bias=True, use_qk_norm=True, first_k_dense_replace=4)
    ),
}  # fmt: skip
MOE = {
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, **ALONE)),
    "qwen3_moe": ("Qwen3Moe", dict(**EXPERTS, num_experts=6, head_dim=8, norm_topk_prob=True, **ALONE)),
    "qwen3_moe, shares": ("Qwen3Moe", dict(**EXPERTS, num_experts=6, head_dim=8, mlp_only_layers=[1], **ALONE)),
    "deepseek_v3": (
        "DeepseekV3", dict(**LATENT, **ROUTED, q_lora_rank=10, first_k_dense_replace=1, n_group=4, topk_group=2)
    ),
    "deepseek_v3, yarn": (
        "DeepseekV3",
        dict(**LATENT, **ROUTED, q_lora_rank=None, first_k_dense_replace=1, rope_parameters=YARN, **UNGROUPED),
    ),
    "deepseek_v2": ("DeepseekV2", dict(**LATENT, **V2, q_lora_rank=10, first_k_dense_replace=1)),
    "deepseek_v2, direct queries, yarn": (
        "DeepseekV2", dict(**LATENT, **V2, q_lora_rank=None, first_k_dense_replace=2, rope_parameters=YARN)
    ),
    "glm4_moe": (
        "Glm4Moe", dict(**ROUTED, head_dim=8, attention_bias=True, use_qk_norm=True, first_k_dense_replace=1)
    ),
    "glm4_moe, plain": ("Glm4Moe", dict(**ROUTED, head_dim=8, first_k_dense_replace=1)),
}  # fmt: skip


# What is no size is left out, so that it is what the config class makes of its absence.
SMALL = dict(vocab_size=52, hidden_size=24, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4)
SMALL_GROUPED = dict(**SMALL, num_key_value_heads=2)
SMALL_LATENT = dict(**SMALL, **LATENT | dict(rms_norm_eps=1e-6), q_lora_rank=10)
SHORT = dict(**SMALL_GROUPED, max_position_embeddings=64, rope_theta=500.0)
FEW = dict(**EXPERTS, n_routed_experts=16, n_shared_experts=1, first_k_dense_replace=1)
SINGLE = dict(num_experts_per_tok=1, norm_topk_prob=False, moe_intermediate_size=16)
LEFT_OUT = {
    "llama": ("Llama", SMALL),
    "qwen2": ("Qwen2", SMALL_GROUPED),
    "qwen3": ("Qwen3", SMALL_GROUPED),
    "mixtral": ("Mixtral", dict(**SMALL_GROUPED, head_dim=6)),
    "qwen3_moe": ("Qwen3Moe", dict(**SMALL_GROUPED, moe_intermediate_size=16)),
    "glm4_moe": ("Glm4Moe", dict(**SMALL_GROUPED, head_dim=8, moe_intermediate_size=16)),
    "deepseek_v3": ("DeepseekV3", dict(**SMALL_LATENT, moe_intermediate_size=16)),
    "deepseek_v2": ("DeepseekV2", dict(**SMALL_LATENT, moe_intermediate_size=16, num_experts_per_tok=2)),
    "mixtral, no epsilon, no base": ("Mixtral", dict(**SMALL_GROUPED, head_dim=6, num_local_experts=4)),
    "glm4_moe, no epsilon": ("Glm4Moe", dict(**SMALL_GROUPED, **FEW, head_dim=8)),
    "deepseek_v3, no factor, no groups": ("DeepseekV3", dict(**SMALL_LATENT, **FEW)),
    "yarn, no original length": ("Llama", dict(**SHORT, rope_scaling=dict(type="yarn", factor=4.0))),
    "yarn, no factor": (
        "Llama", dict(**SHORT, rope_scaling=dict(type="yarn", factor=None, original_max_position_embeddings=16))
    ),
    "yarn, original length outside": (
        "Llama", dict(**SHORT, rope_scaling=dict(type="yarn", factor=4.0), original_max_position_embeddings=16)
    ),
    "as 3.1, no original length": (
        "Llama",
        dict(**SHORT, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    ),
    "deepseek_v3, one expert a token": ("DeepseekV3", dict(**SMALL_LATENT, **SINGLE)),
    "glm4_moe, one expert a token": ("Glm4Moe", dict(**SMALL_GROUPED, **SINGLE, head_dim=8)),
}  # fmt: skip
"""Class -> all that its config.json holds."""


def hugging_face_model(name, **changes):
    """A model with random weights of a name in `DENSE` or `MOE`."""
    kind, options = {**DENSE, **MOE}[name]
    return random_model(kind, **{**SIZES, "rope_parameters": dict(ROPE), **options, **changes})


def random_model(kind, **values):
    """A model with random weights; norms, biases and routers' biases are moved off the values that would hide them."""
    import transformers  # here, because it takes a second, and the ranks that import a test need no model

    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(5)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            if tensor.dim() == 1:
                tensor.add_(torch.linspace(-0.3, 0.3, tensor.numel()).to(tensor.dtype))
    return model.eval()


def saved_model(name, directory):
    """A model of `LEFT_OUT`, as transformers reads it from `directory`, whose config.json holds what the table says."""
    kind, values = LEFT_OUT[name]
    model = random_model(kind, **copy.deepcopy(values))  # rope_scaling is filled in where it stands
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": model.config.model_type, **values}))
    return type(model).from_pretrained(directory).eval()


def our_logits(directory, tokens, layout="EttttL"):
    """What ppctl's stages of a four-layer model compute from a directory."""
    reader, x = DirectoryReader(open_directory(directory)), tokens
    for spec in cut(layout, 1):
        stage = build_stage(spec, reader.directory.model, seed=1, dtype=torch.float32, device="cpu")
        take(stage, reader)
        (x,) = stage(x)
    return x


@torch.no_grad()
def take(stage, reader):
    """Fill a stage's weights and buffers."""
    for name, tensor in {**stage.canonical_parameters(), **stage.canonical_buffers()}.items():
        for piece, part in pieces(name, tensor, stage.parameter_rows()[name], stage.experts):
            part.copy_(reader.tensor(piece))


def relative(a, b):
    """Largest difference over the largest value; what is zero throughout must be matched by zeros."""
    return ((a - b).abs().max() / b.abs().max().clamp(min=torch.finfo(b.dtype).tiny)).item()
