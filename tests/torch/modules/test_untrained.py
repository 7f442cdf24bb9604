"""Parameters that a user has frozen stay frozen in the stages, whatever the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign_models import WORDS, model_of
from torch import Tensor, nn

import ppctl
from ppctl.errors import ConfigError


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


@pytest.mark.parametrize("kind", ["Llama", "Granite"])  # the head of Granite is tied
def test_a_transformers_instance_keeps_what_is_frozen(kind: str) -> None:
    model: Any = model_of(kind)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    frozen = {n for n, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    pipeline = ppctl.pipeline(model, ppctl.PipelineConfig(pp_schedule="interleaved_1f1b", layers_per_stage=1))
    own = dict(pipeline.named_parameters())
    assert {name for name, each in own.items() if not each.requires_grad} == frozen
    pipeline.step(batch())
    assert {name for name, each in own.items() if each.grad is None} == frozen
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (hooked, "hooks on model.layers.1"),
        pytest.param(
            lambda model: model.gradient_checkpointing_enable(),
            "recomputes activations",
            marks=pytest.mark.filterwarnings("ignore::FutureWarning"),
        ),
    ],
)
def test_what_stages_would_lose_of_an_instance_is_refused(change: Callable[[Any], None], text: str) -> None:
    model = model_of("Llama")
    model(**{name: each for name, each in batch().items() if name != "labels"}, output_hidden_states=True)
    change(model)
    with pytest.raises(ConfigError, match=f"PP-E132: this LlamaForCausalLM .*{text}"):
        ppctl.pipeline(model)


class Tied(nn.Module):
    """A frozen table that is the head, too, around a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))


def test_a_frozen_shared_parameter_gets_no_gradient_until_all_its_uses_are_trained() -> None:
    config = ppctl.PipelineConfig(
        pp_schedule="interleaved_1f1b", module_fqns_per_model_part=[["embed", "layer"], ["head"]]
    )
    pipeline, tokens = ppctl.pipeline(Tied(), config), torch.arange(12).view(2, 6)
    own = dict(pipeline.named_parameters())
    pipeline.step((tokens, tokens))
    assert {name for name, each in own.items() if each.grad is None} == {"embed.weight", "head.weight"}
    own["head.weight"].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"PP-E130: one of head.weight and embed.weight is trained"):
        pipeline.step((tokens, tokens))
    own["embed.weight"].requires_grad_(True)
    pipeline.step((tokens, tokens))
    assert torch.equal(own["head.weight"].grad, own["embed.weight"].grad)  # type: ignore[arg-type]
