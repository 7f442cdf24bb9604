"""Tiny models, their cuts into stages, and batches, for tests of the model and of training."""

import torch

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import parse_layers
from ppctl.plan import StageSpec


def tiny(**changes):
    """A decoder of 4 layers in which no two sizes are equal, so that no wrong transposition goes unseen."""
    sizes = {"num_layers": 4, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "num_query_groups": 2}
    return ModelConfig(**{**sizes, "vocab_size": 52, "init_method_std": 0.1, **changes})


def cut(layout, pp):
    """StageSpecs (without sizes) of a plain layout such as "E|tt||t|tL" (no groups, no products), placed in a loop."""
    specs, layer = [], 0
    for stage, letters in enumerate(layout.split("|")):
        names = []
        for letter in letters:
            names.append({"E": "embedding", "L": "loss", "t": f"decoder.{layer}"}[letter])
            layer += letter == "t"
        specs.append(StageSpec(stage, stage % pp, stage // pp, parse_layers(names), (), (), 0, 0, 0))
    return specs


def random_batches(model, steps, microbatches, b=2, s=11, seed=0):
    """`batches[step][mb] = (tokens, labels, mask)`; about a fifth of the tokens are masked, unevenly."""
    generator = torch.Generator().manual_seed(seed)

    def ids():
        return torch.randint(model.vocab_size, (b, s), generator=generator)

    def mask():
        return (torch.rand((b, s), generator=generator) > 0.2).float()

    return [[(ids(), ids(), mask()) for _ in range(microbatches)] for _ in range(steps)]
