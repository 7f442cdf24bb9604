"""Published models as conf/model has them, for tests that hold sizes against totals."""

from pathlib import Path

import yaml

from ppctl.config.schema import ModelConfig

CONF = Path(__file__).parents[2] / "conf" / "model"

NAMES = {
    "Llama-2-7B": "llama2_7b",
    "Llama-2-70B": "llama2_70b",
    "Llama-3-8B": "llama3_8b",
    "Llama-3-70B": "llama3_70b",
    "Mixtral-8x7B": "mixtral_8x7b",
    "Qwen3-8B": "qwen3_8b",
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "DeepSeek-V3": "deepseek_v3",
    "GPT-3 175B": "gpt3_175b",
}
"""A golden model's name -> its file."""

TOTALS = {
    "llama3_405b": 405_853_388_800,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x22b": 140_620_634_112,
    "deepseek_v2_lite": 15_706_484_224,
    "kimi_k2": 1_026_408_232_448,
    "glm4_5": 358_337_791_296,
}
"""Parameters of the other models with every tensor that their files hold, MTP with its copies of the tables included.

Our own count from the published configs, frozen: their publishers give rounded figures (405B, 32.8B, 235B, 141B, 15.7B,
1T), which these round to and which prove little; GLM-4.5's 355B lies between 352.8B without MTP and 358.3B with it.
That ppctl's blocks have as many is tested where they are built (tests/torch/model/test_full_size.py).
"""


def published(file: str) -> ModelConfig:
    """The model of conf/model/`file`.yaml."""
    return ModelConfig(**yaml.safe_load((CONF / f"{file}.yaml").read_text()))


MODELS = {name: published(file) for name, file in NAMES.items()}
