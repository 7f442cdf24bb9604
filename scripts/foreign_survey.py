"""Which architectures of transformers run in a pipeline: `python scripts/foreign_survey.py [MODEL_TYPE ...]`.

For every type of its table of causal language models a directory is written whose config has the sizes that the library
itself names, with four layers. A child makes the proof of it with every field set that a remedy names; with `--measure`
it is described as `ppctl plan model.from=DIR` does it, which takes some five times as long. The answers are kept in
`--answers DIR`, and `--page` writes docs/architectures.md of them. Types that are named are asked anew; without names
all are that have no answer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ppctl.errors import PpctlError
from ppctl.foreign.describe import describe, names_of, proved, refuse_dropout, traits_of
from ppctl.foreign.library import make_model, read_own_config

LAYERS = 4
SECONDS = 120.0
"""That an answer may take."""
PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
ANSWERS = Path(tempfile.gettempdir()) / "foreign-survey"
HEAD_WIDTH = {"head_dim": 128}
FIELDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma3n_text": {"num_kv_shared_layers": 5, "num_hidden_layers": 10},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "hunyuan_v1_dense": HEAD_WIDTH,
    "hunyuan_v1_moe": HEAD_WIDTH | {"num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "ministral": HEAD_WIDTH,
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {
        "head_dim": 128,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}
"""What configs have to say whose own defaults make no model."""


def config_of(kind: str) -> Any:
    """A config with the library's own sizes and few layers, as far as it lets itself be made so."""
    fields = FIELDS.get(kind, {})
    config = CONFIG_MAPPING[kind](**fields)
    layers = getattr(config, "num_hidden_layers", None)
    several = isinstance(layers, int) and layers > LAYERS and "num_hidden_layers" not in fields
    if not several or getattr(config, "is_encoder_decoder", False):  # those have numbers of their own for both
        return config
    try:
        return CONFIG_MAPPING[kind](**fields, num_hidden_layers=LAYERS)
    except Exception:  # a config checks its fields against each other in ways of its own: all layers, then
        return config


def ask(kind: str, answer: Path, measure: bool) -> None:
    """Prove one type, following remedies that set a field, and write the answer."""
    began, overrides = time.monotonic(), dict[str, str]()
    with tempfile.TemporaryDirectory() as directory:
        try:
            config_of(kind).save_pretrained(directory)
            found = proving(Path(directory), overrides, measure)
        except Exception:  # what is no answer is a defect, and is shown as one
            found = {"state": "error", "reason": traceback.format_exc(limit=-1).strip()}
    text = json.dumps(found | {"overrides": overrides, "seconds": round(time.monotonic() - began, 1)})
    answer.write_text(text.replace(directory, "DIR"))


def proving(directory: Path, overrides: dict[str, str], measure: bool) -> dict[str, Any]:
    """The answer; fields that remedies set are added to `overrides`."""
    while True:
        try:
            if measure:
                return {"state": "runs", "kinds": [kind.name for kind in describe(directory, overrides).kinds]}
            config = read_own_config(directory, overrides)
            refuse_dropout(config, directory)
            anatomy = proved(config, directory).anatomy  # first: it says what the library cannot build
            different = dict.fromkeys(traits_of(make_model(config, "meta"), anatomy))
            return {"state": "runs", "kinds": names_of([*different])}
        except PpctlError as error:
            problem = error.problems[0]
            words = [word.removeprefix("model.hf_overrides.") for word in problem.remedy.split()]
            more = dict(word.split("=", 1) for word in words if "=" in word) if "hf_overrides" in problem.remedy else {}
            if more.keys() <= overrides.keys():
                told = {"code": problem.code, "reason": problem.message, "remedy": problem.remedy}
                return {"state": "refused", **told}
            overrides |= more


def survey(kinds: Sequence[str], answers: Path, measure: bool) -> None:
    """Ask for each type in a child of its own, one after another."""
    for kind in kinds:
        answer = answers / f"{kind}.json"
        answer.unlink(missing_ok=True)
        process = multiprocessing.get_context("fork").Process(target=ask, args=(kind, answer, measure))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            answer.write_text(json.dumps({"state": "error", "reason": f"no answer within {SECONDS:.0f} s"}))
        elif not answer.exists():
            answer.write_text(json.dumps({"state": "error", "reason": f"ended with {process.exitcode}"}))
        found = json.loads(answer.read_text())
        print(kind, found["state"], found.get("code", ""), found.get("reason", ""), flush=True)


HEAD = """\
# Which architectures of transformers run in a pipeline

Of the {all} types in the table of causal language models of transformers {version}, {runs} run with
[their own code](hugging-face.md#any-other-causal-language-model-of-transformers): a small copy of each, whole and cut,
has the same hidden states, loss and gradients to the bit. The rest is refused in the plan, with its reason. A
directory's own config decides: `ppctl plan model.from=DIR model.implementation=transformers` tries yours, this table
the sizes that the library itself names, with four layers. Another version of transformers has other code;
`python scripts/foreign_survey.py --page` writes this page anew.

## These run

Kinds of layers are told apart by structure; a field to set is typed as `model.hf_overrides.FIELD=VALUE`.

| model_type | fields to set | kinds of layers |
|---|---|---|
"""


def page(answers: Path) -> str:
    """docs/architectures.md of all answers."""
    found = {kind: json.loads((answers / f"{kind}.json").read_text()) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    runs = {kind: each for kind, each in found.items() if each["state"] == "runs"}
    head = HEAD.format(all=len(found), version=transformers.__version__, runs=len(runs))
    rows = [f"| {kind} | {fields_text(each)} | {kinds_text(each)} |" for kind, each in runs.items()]
    refused = ["", "## These are refused", "", "| model_type | code | reason |", "|---|---|---|"]
    others = [(kind, each) for kind, each in found.items() if kind not in runs]
    refused += [f"| {kind} | {each.get('code', 'error')} | {reason(each)} |" for kind, each in others]
    return head + "\n".join([*rows, *refused]) + "\n"


def fields_text(answer: dict[str, Any]) -> str:
    """The fields that were set."""
    return " ".join(f"{name}={value}" for name, value in answer["overrides"].items())


def kinds_text(answer: dict[str, Any]) -> str:
    """The names of the kinds of layers, if there are several."""
    named = [kind.replace("|", "\\|") for kind in answer["kinds"]]
    return "one" if len(named) == 1 else f"{len(named)}: {'; '.join(name or 'the rest' for name in named)}"


def reason(answer: dict[str, Any]) -> str:
    """Without the directory's name, on one line."""
    text = " ".join(answer["reason"].split())
    return text.partition("cannot be cut into stages: ")[2].replace("|", "\\|") or text.replace("|", "\\|")


def main() -> None:
    """Ask, and write the page where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="MODEL_TYPE")
    parser.add_argument("--answers", type=Path, default=ANSWERS)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    args.answers.mkdir(parents=True, exist_ok=True)
    missing = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not (args.answers / f"{kind}.json").exists()]
    survey(args.kinds or missing, args.answers, args.measure)
    if args.page:
        PAGE.write_text(page(args.answers), encoding="utf-8")


if __name__ == "__main__":
    main()
