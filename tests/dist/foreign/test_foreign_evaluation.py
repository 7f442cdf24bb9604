"""Models of transformers evaluated and sampled in stages: the whole model's loss to the bit, and its greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense_runs import CPU, SEQ
from dense_runs import config_of as run_of
from foreign_models import described, model_of
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.data.load import load_data
from ppctl.model.loss import token_losses
from ppctl.plan.build import build_plan
from ppctl.train import generate
from ppctl.train.loop import Evaluator
from ppctl.train.session import build_session
from ppctl.train.snapshot import start_from

# Models are described, which takes ten seconds of a quiet machine.
pytestmark = pytest.mark.timeout(400)

PROMPT, COUNT = [17, 101, 32, 116, 104, 101], 8
SECONDS = 300.0
"""That ranks may take, as each imports transformers."""


def run_config(text: Path, kind: str, **cut: Any) -> RunConfig:
    directory = text.parent / kind
    if not directory.exists():
        model_of(kind).save_pretrained(directory)
    found = described(directory)
    config = run_of(text, m=2, **cut)
    config.model = ModelConfig(**found.sizes, transformers=found.to_text(), from_=str(directory))
    config.data.validation_split, config.train.eval_interval, config.train.eval_steps = 0.2, 1, 50
    return config


def evaluated_and_sampled(mapping: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Runs in a rank: what an evaluation says before any step, and the likeliest tokens behind a prompt."""
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), CPU)
    start_from(session, Path(str(config.model.from_)))
    found = Evaluator(session)()
    generate.drawn = lambda logits, *_, **__: int(logits.argmax())  # type: ignore[assignment]  # in a process of its own
    return found, generate.Generator(session).continue_prompt(PROMPT, COUNT)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluated") / "corpus.txt"
    path.write_text("every stage runs the model's own code " * 40)
    return path


@pytest.mark.parametrize("kind", ["Gemma2", pytest.param("Mixtral", marks=pytest.mark.whole)])
def test_stages_evaluate_and_sample_as_the_whole_model(text: Path, kind: str) -> None:
    config = run_config(text, kind, pp=1, vpp=None)
    ((whole, tokens),) = run_ranks(evaluated_and_sampled, 1, to_mapping(config), timeout=SECONDS)
    cut = to_mapping(run_config(text, kind, pp=2, vpp=2))
    assert run_ranks(evaluated_and_sampled, 2, cut, timeout=SECONDS) == [(whole, tokens)] * 2

    model = model_of(kind).eval()
    held_out = load_data(config.data).held_out
    windows = torch.from_numpy(held_out.samples(torch.arange(held_out.num_samples(SEQ)).numpy(), SEQ))
    with torch.no_grad():
        losses = token_losses(model(windows[:, :-1], use_cache=False).logits, windows[:, 1:])
        greedy: Any = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    assert whole["eval_loss"] == pytest.approx(losses.double().mean().item(), rel=1e-6)
    assert tokens == greedy[0, len(PROMPT) :].tolist()
    assert len(set(tokens)) > 1
