"""Parameters that a model shares, given different values: compared where they are loaded, and refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from dense_runs import config_of
from foreign_models import model_of
from one_save import save_checkpoint
from own_modules import PARTS, batches, made
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

import ppctl
from ppctl.errors import PpctlError
from ppctl.plan.build import build_plan
from ppctl.train.session import Session, build_session
from ppctl.train.snapshot import load_checkpoint, start_from

CONFIG = ppctl.PipelineConfig(pp_microbatch_size=2, module_fqns_per_model_part=PARTS[2])
BATCH = batches(1, 4)[0]


def said(act: Callable[[], object]) -> str:
    try:
        act()
    except PpctlError as error:
        (problem,) = error.problems
        return f"{problem.code} {problem.place}"
    return "done"


def whole_states() -> list[str]:
    pipeline = ppctl.pipeline(made("tied"), CONFIG)
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    found = [said(lambda: pipeline.load_state_dict(made("plain").state_dict()))]
    assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
    return [*found, *(said(lambda: pipeline.load_state_dict(made("tied").state_dict())) for _ in range(2))]


def test_the_state_of_an_untied_model_is_refused_by_a_tied_one_with_nothing_loaded() -> None:
    assert run_ranks(whole_states, 2) == [["PP-E537 head.weight and embed.weight", "done", "done"]] * 2


def own_parts(again: bool) -> list[str]:
    """Each rank gives its stages' values alone, by load_state_dict or as torch's checkpoints do, in place."""
    pipeline = ppctl.pipeline(made("tied"), CONFIG)
    found = [said(lambda: pipeline.step(BATCH))] if again else []
    for kind in ("plain", "tied"):
        whole: dict[str, Tensor] = made(kind).state_dict()
        state = {name: whole[name] for name in pipeline.state_dict()}
        if again:
            pipeline.load_state_dict(state)
        else:
            for name, value in pipeline.state_dict().items():
                value.copy_(state[name])
        found += [said(lambda: pipeline.eval(BATCH)), said(lambda: pipeline.step(BATCH))]
    pipeline.close()
    return found


@pytest.mark.parametrize("again", [False, True])
def test_values_of_single_stages_are_compared_before_the_next_step_on_all_ranks(again: bool) -> None:
    refused = ["PP-E504 head.weight and embed.weight"] * 2
    assert run_ranks(own_parts, 2, again) == [["done"] * again + refused + ["done"] * 2] * 2


def one_rank_loads() -> list[str]:
    pipeline = ppctl.pipeline(made("tied"), CONFIG)
    found = [said(lambda: pipeline.step(BATCH))]
    if pipeline.info.has_last_stage:
        pipeline.load_state_dict({name: value + 1 for name, value in pipeline.state_dict().items()})
    return [*found, said(lambda: pipeline.step(BATCH))]


def test_a_rank_that_loads_alone_is_found() -> None:
    assert run_ranks(one_rank_loads, 2) == [["done", "PP-E504 head.weight and embed.weight"]] * 2


def test_a_tied_state_fits_an_untied_model_with_nothing_lost() -> None:
    parts = [[name for part in PARTS[2] for name in part]]
    pipeline = ppctl.pipeline(made("plain"), ppctl.PipelineConfig(module_fqns_per_model_part=parts))
    state = made("tied").state_dict()
    pipeline.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())
    del state["head.weight"]
    assert said(lambda: pipeline.load_state_dict(state)) == "PP-E537 head.weight is missing"


@pytest.mark.parametrize("equal", [False, True])
def test_a_directory_whose_stored_head_is_not_the_table_that_the_model_shares_is_refused(
    tmp_path: Path, equal: bool
) -> None:
    model_of("Gemma2").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head if equal else head + 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    told = said(lambda: ppctl.pipeline(tmp_path, ppctl.PipelineConfig()))
    assert told == ("done" if equal else "PP-E524 lm_head.weight and model.embed_tokens.weight")


def session_of(text: str, tied: bool) -> Session:
    config = config_of(Path(text), pp=1, vpp=1, m=2, tied=tied)
    return build_session(config, build_plan(config, {}), 0, torch.device("cpu"))


def from_checkpoints(text: str, tied: bool) -> list[str]:
    """A checkpoint of one kind of run, taken by both kinds: its weights alone, and all of it."""
    path = save_checkpoint(session_of(text, tied), Path(text).parent, 2, 8)
    found = []
    for load in (start_from, load_checkpoint):
        found += [said(partial(load, session_of(text, to), path)) for to in (False, True)]
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_weights_of_a_run_are_refused_by_name_where_a_table_would_be_lost_or_missing(
    tmp_path: Path, tied: bool
) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("some text " * 300)
    (found,) = run_ranks(from_checkpoints, 1, str(text), tied)
    lost, missing = "PP-E524 model.output.weight and model.tok_embeddings.weight", "PP-E524 model.output.weight"
    first = [missing, "done"] if tied else ["done", lost]
    assert found[:2] == first and found[2 + tied] == "done" and found[3 - tied].startswith("PP-E502")
    assert "output.weight" in found[3 - tied]
