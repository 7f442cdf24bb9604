"""What users rely on and torch is not needed for: the names, commands, keys and files of before still work.

The list is tests/golden/frozen.json: additions are free. As far as can be it is asked for as a user would ask, at the
command line, in files and by public names, so that what is behind it may move: then only import lines here may change.
What needs torch: tests/torch/test_frozen_run.py. `doctor --json` and `rehearse --json`:
tests/dist/cli.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from frozen import IS_WRITTEN, breaks, demands, fields, frozen, hold, hold_calls, members, signature

import ppctl
from ppctl import LayerType, ModelParallelConfig, PipelineConfig, PipelineParallelLayerLayout
from ppctl.cli.main import main
from ppctl.config.argv import normalise
from ppctl.config.compose import compose
from ppctl.config.mapping import to_mapping
from ppctl.config.pipeline_config import calculate_virtual_stages, stage_ids_this_rank
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, PpctlError
from ppctl.launch import outcome

RICH = (
    "+recipe=quickstart", "launch.device=cpu", "data.path=corpus.txt", "model.num_layers=6", "model.mtp_num_layers=1",
    "model.num_moe_experts=4", "model.moe_shared_expert_intermediate_size=8", "ep=2", "gpus_per_node=4",
    "model.share_embeddings_and_output_weights=true", "gbs=8", "mbs=1",
)  # fmt: skip
"""A run whose plan has something in every list: experts on several ranks, MTP, a tied weight, several chunks."""

SLURM = {
    "sbatch": "echo 77",
    "squeue": 'echo "$STATE|Resources|2030-01-01T00:00:00|2030-01-02T00:00:00|node[1-2]"',
}
"""What stands for SLURM's commands: what they print is all that is read of them."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own with a text in it, on no cluster but one of two shell scripts."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_", "PPCTL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("STATE", "PENDING")
    for name, line in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "corpus.txt").write_text("the stage of a rank " * 500)
    return tmp_path


def ask(*words: str, code: int = 0) -> str:
    """What `ppctl words` prints; it must leave with `code`."""
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        left = main(words)
    assert left == code, f"ppctl {' '.join(words)} left with {left}, not {code}: {error.getvalue()}"
    return out.getvalue()


def told(*words: str, code: int = 0) -> Any:
    """What `ppctl words --json` prints."""
    return json.loads(ask(*words, "--json", code=code))


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, None),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a > b was 1 and is 2"),
        ({"a": {"b": 1}}, {"a": {}}, "a > b is gone"),
        ({"a": None}, {}, "a is gone"),
        ({"a": 0}, {"a": False}, "a was 0 and is False"),
        ({"a": ["x", "y"]}, {"a": ["z", "y", "x"]}, None),
        ({"a": ["x", "y"]}, {"a": ["y"]}, "a: x is gone; there is y"),
        ({"a": ["x"]}, {"a": "x"}, "a was ['x'] and is 'x'"),
    ],
)
def test_additions_are_free_and_all_else_is_told(before: Any, now: Any, line: str | None) -> None:
    assert list(breaks(before, now)) == ([] if line is None else [line])


def test_the_fields_of_json() -> None:
    value = {"a": [{"b": 1, "c": None}, {"b": "x"}], "d": {"key": True}, "e": []}
    kinds = {"a": ["list"], "a[]": ["object"], "a[].b": ["number", "text"], "a[].c": [], "e": ["list"]}
    assert fields(value, "d") == {**kinds, "d": ["object"], "d.*": ["true or false"]}


def test_a_call_breaks_by_a_new_parameter_that_it_must_pass() -> None:
    def old(a: int, b: int = 2) -> None: ...
    def longer(a: int, b: int = 2, c: int = 3) -> None: ...
    def swapped(b: int = 2, a: int = 1) -> None: ...
    def by_name(a: int, *, b: int = 2) -> None: ...
    def needy(a: int, b: int = 2, *, c: int) -> None: ...

    assert list(breaks(signature(old), signature(longer))) == []
    assert list(breaks(signature(old), signature(swapped))) == [
        "a > position was 0 and is 1",
        "b > position was 1 and is 0",
    ]
    assert list(breaks(signature(old), signature(by_name))) == ["b > position is gone"]
    assert list(demands({"f": signature(old)}, {"f": signature(longer)})) == []
    assert list(demands({"f": signature(old)}, {"f": signature(needy)})) == ["f: its new parameter c has no default"]


# Names in Python


def test_public_names() -> None:
    hold("public names", {"ppctl": sorted(ppctl.__all__)})


def test_calls_of_what_needs_no_torch() -> None:
    functions: list[Callable[..., Any]] = [calculate_virtual_stages, stage_ids_this_rank]
    classes = (PipelineParallelLayerLayout, ModelParallelConfig, PipelineConfig)
    now = {function.__name__: signature(function) for function in functions}
    for cls in classes:
        now |= members(cls)
    hold_calls("signatures without torch", now)
    hold("kinds of layers", {kind.name: str(kind.value) for kind in LayerType})


# The command line


class _Parser(SystemExit):
    """Ends a command at the moment when it reads its arguments."""


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.ArgumentParser]:
    """Each command's own parser, caught when the command reads its arguments."""
    caught: list[argparse.ArgumentParser] = []

    def catch(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        caught.append(self)
        raise _Parser(0)

    commands = re.findall(r"^  ([a-z]+)  +\S", ask("--help"), re.MULTILINE)
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_known_args", catch)
        for command in commands:
            ask(command)
    return dict(zip(commands, caught, strict=True))


def test_commands_and_flags(parsers: dict[str, argparse.ArgumentParser]) -> None:
    hold("commands", dict(_flags(parsers)))


def _flags(parsers: dict[str, argparse.ArgumentParser]) -> Iterator[tuple[str, dict[str, Any]]]:
    for command, parser in parsers.items():
        places = [action for action in parser._actions if not action.option_strings]
        typed = {f"argument {place}": action for place, action in enumerate(places, 1)}
        typed |= {flag: action for action in parser._actions for flag in action.option_strings}
        yield command, {name: _taken(action) for name, action in typed.items()}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from _flags({f"{command} {name}": inner for name, inner in action.choices.items()})


def _taken(action: argparse.Action) -> dict[str, Any]:
    found: dict[str, Any] = {"values": "one" if action.nargs is None else str(action.nargs)}
    found |= {"choices": list(action.choices)} if action.choices else {}
    found |= {} if action.required else {"optional": True}
    return found | ({} if action.default in (None, argparse.SUPPRESS) else {"default": str(action.default)})


def test_short_names_of_keys() -> None:
    names = set(frozen("aliases"))
    if IS_WRITTEN:
        from ppctl.config.keys import names_of_keys

        names |= {name for name in names_of_keys("names") if "-" not in name}
    hold("aliases", {name: normalise([f"{name}=1"], {}, "train").overrides[0].partition("=")[0] for name in names})


def test_megatrons_flags() -> None:
    """Each is taken, or answered with the key that says the same, or with why there is nothing to say."""
    flags = set(frozen("megatron's flags"))
    if IS_WRITTEN:
        from ppctl.config.flags import TAKEN
        from ppctl.config.name_tables import LATER, MEANINGLESS, MEGATRON, SAME, tables

        pages = [tables(MEGATRON).entries[heading] for heading in (SAME, LATER, MEANINGLESS)]
        named = {flag for table in pages for flags in table.values() for flag in flags.split()}
        flags |= {*TAKEN} | {flag for flag in named if "*" not in flag}
    hold("megatron's flags", {flag: _meaning(flag) for flag in sorted(flags)})
    assert _meaning("--no-such-flag-of-anybody") == {"known": False}


VALUES = {"--split": "949,50,1", "--data-parallel-sharding-strategy": "optim_grads_params"}
"""Of flags whose values have other names here."""


def _meaning(flag: str) -> dict[str, Any]:
    found = normalise([flag, VALUES.get(flag, "7")], {}, "train")
    if not found.problems:
        return {"known": True, "taken": True, "as": found.overrides[0]}
    (problem,) = found.problems
    key, equals, _ = problem.remedy.partition("=")
    known = problem.code != "PP-E107" or bool(equals)
    return {"known": known} | ({"as": problem.remedy} if equals and not key.startswith("ppctl") else {})


def test_keys_and_their_defaults() -> None:
    hold("keys", _flat(to_mapping(RunConfig())))


def test_what_a_run_has_that_says_nothing() -> None:
    """`conf/` sets some keys otherwise than the dataclasses, as Megatron's own command line does."""
    hold("composed keys", _flat(to_mapping(compose([]).config)))


def test_every_key_can_be_typed() -> None:
    composed = {key: value for key, value in frozen("composed keys").items() if key != "published"}
    typed = compose([f"{key}={json.dumps(value)}" for key, value in composed.items()])
    assert composed.items() <= _flat(to_mapping(typed.config)).items()


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for section, value in tree.items():
        inner = _flat(value) if isinstance(value, dict) and value else None
        found |= {section: value} if inner is None else {f"{section}.{key}": leaf for key, leaf in inner.items()}
    return found


MORE_WORDS = {
    "data.tokenizer": ["byte"],
    "model.moe_layer_freq": ["1", "2", "[0]*4+[1]*4"],
    "parallel.pipeline_model_parallel_layout": ["auto", "Et*8L"],
    "pipeline.extra_warmup": ["0", "auto"],
    "scale": ["smoke", "axes"],
    "train.recompute_granularity": ["full", "selective"],
    "train.recompute_method": ["uniform", "block"],
    "train.recompute_modules": ["[core_attn]", "[mlp]", "[layernorm]"],
}
BESIDE = {
    "optim.muon_": "optim.name=muon",
    "model.moe": "model.num_moe_experts=4",
    "model.rotary_scaling_type": "model.rotary_scaling_factor=8",
    "train.recompute_me": "train.recompute_granularity=full",
    "train.recompute_mo": "train.recompute_granularity=selective",
}
"""Start of a key -> without what its values mean nothing."""


def test_words_that_keys_take() -> None:
    """Presets, schedules and modes by their names."""
    words = {key: list(values) for key, values in frozen("words").items()}
    if IS_WRITTEN:
        from ppctl.config.keys import keys_with
        from ppctl.config.metadata import OneOf
        from ppctl.schedule.policies import SPELLINGS

        choices = {name: key.limit.names for name, key in keys_with("limit").items() if isinstance(key.limit, OneOf)}
        known = {**choices, **MORE_WORDS, "pipeline.pp_schedule": list(SPELLINGS)}
        words = {key: list(dict.fromkeys([*words.get(key, ()), *values])) for key, values in known.items()}
    hold("words", {key: [word for word in values if _is_accepted(key, word)] for key, values in words.items()})


def _is_accepted(key: str, word: str) -> bool:
    beside = [override for start, override in BESIDE.items() if key.startswith(start)]
    try:
        compose([f"{key}={word}", *beside])
    except ConfigError:
        return False
    return True


def test_recipes() -> None:
    hold("recipes", {"names": [line.split()[0] for line in ask("recipes").splitlines()]})


def test_error_codes_have_their_pages() -> None:
    codes = re.findall(r"^  (PP-E[0-9]{3})  ", ask("explain"), re.MULTILINE)
    hold("error codes", {"codes": codes})
    for code in frozen("error codes")["codes"]:
        head, _, text = ask("explain", code).partition("\n\n")
        assert head.startswith(f"{code} ") and len(text) > 40, f"{code} has no page"


def test_exit_codes() -> None:
    errors = {error.__name__: error.exit_code for error in (PpctlError, *_all_kinds(PpctlError))}
    ends = {name: getattr(outcome, name) for name in ("DONE", "STOPPED", "INTERRUPTED", "TERMINATED")}
    hold("exit codes", {"errors": {name: errors[name] for name in sorted(errors)}, "ends of a run": ends})


def _all_kinds(error: type[PpctlError]) -> Iterator[type[PpctlError]]:
    for kind in error.__subclasses__():
        if kind.__module__ == "ppctl.errors":
            yield kind
            yield from _all_kinds(kind)


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["help"], 0),
        (["recipes"], 0),
        (["plan", "--help"], 0),
        ([], 2),
        (["nosuchcommand"], 2),
        (["layout", "--nosuchflag"], 2),
        (["plan", "--nosuchflag"], 2),
        (["plan", "nosuch.key=1"], 2),
        (["runs", "show", "nosuchrun"], 2),
        (["train", *RICH[:3], "checkpoint.resume=nowhere"], 3),
        (["plan", *RICH, "launch.device_memory=1MiB"], 4),
    ],
)
def test_a_command_leaves_with_the_code_that_scripts_know(typed: list[str], code: int) -> None:
    ask(*typed, code=code)


# What --json prints


def test_json_of_plan() -> None:
    whole = told("plan", *RICH, "launch.device_memory=1MiB", "pipeline.p2p_capacity=9", "cost.device=h100", code=4)
    hold("plan --json", fields(whole, "schedule.capacities", "timing.critical"))
    hold("plan --json without a plan", fields(told("plan", "+recipe=nosuch", code=2)))


def test_json_of_layout() -> None:
    hold("layout --json", fields(told("layout", "Et|t,|tm|L", "--pp", "2", "--num-layers", "5", code=2)))
    hold("layout --suggest --json", fields(told("layout", "--suggest", "model.num_layers=4", "--pp", "2")))


def test_json_of_simulate() -> None:
    times = ("--tf", "1", "--tb", "1", "--tw", "1", "--tcomm", "0.1")
    hold("simulate --json", fields(told("simulate", "--schedule", "zb_h1", "--pp", "2", "--microbatches", "4", *times)))


def test_json_of_data() -> None:
    hold("data tokenize --json", fields(told("data", "tokenize", "corpus.txt", "made")))
    hold("data show --json", fields(told("data", "show", "made", "--tokenizer", "byte")))


def test_json_of_what_is_refused() -> None:
    hold("train --json refused", fields(told("train", "+recipe=nosuch", code=2)))
    hold("resume --json refused", fields(told("resume", "nosuch", code=2)))


def test_json_of_submit() -> None:
    hold("submit --json", fields(told("submit", *RICH)))


@pytest.fixture
def submitted(here: Path) -> Path:
    """The directory of a submitted run of four ranks, and what its ranks have written, as they wrote it in 2026."""
    run = Path(told("submit", *RICH)["run"])
    for name, record in WRITTEN_BY_RANKS.items():
        (run / name).write_text(json.dumps(record) + "\n")
    return run


_BEAT = {"pid": 9, "state": "training", "step": 1, "index": 1, "working": False, "since": 1e9, "stopped": False}

WRITTEN_BY_RANKS: dict[str, Any] = {
    "status.json": {"state": "running", "time": 1e9, "step": 0, "message": "m", "start_up": {"compose": 0.1}},
    "metrics.jsonl": {"step": 1, "loss": 5.5, "grad_norm": 1.0, "slowest_stage": 1, "slowest_rank": 0},
    "checkpoints/latest": "step-1",
    "edges.json": {
        "limit_s": 120.0,
        "hosts": ["node1"] * 4,
        "contacts": [{"name": "0->1 F", "ranks": [0, 1], "first_s": 0.1, "best_s": 0.001}],
    },
    "heartbeats/node1.json": {"host": "node1", "time": 1e9, "ranks": [{"rank": rank} | _BEAT for rank in range(4)]},
    "errors/rank-0001.json": {"rank": 1, "time": 1e9, "type": "ValueError", "message": "struck", "place": "here"},
}
"""File -> what is in it."""


def test_json_of_runs_and_of_status(submitted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (submitted / "checkpoints" / "step-1").mkdir()
    (submitted / "checkpoints" / "latest").write_text("step-1\n")
    monkeypatch.setenv("STATE", "RUNNING")
    hold("runs --json", fields(told("runs")))
    hold("runs show --json", fields(told("runs", "show", submitted.name)))
    hold("status --json", fields(told("status", submitted.name), "start_up"))


# Files


def test_files_of_a_submitted_run(submitted: Path) -> None:
    for name in WRITTEN_BY_RANKS:
        (submitted / name).unlink()
    files = sorted(str(path.relative_to(submitted)) for path in submitted.rglob("*"))
    hold("files of a submitted run", {"names": files})
    hold("job.json", fields(json.loads((submitted / "job.json").read_text())))


RUN = {
    "1f1b": ("pp=2", "vpp=1", "pipeline.pp_schedule=1f1b", "gbs=3"),
    "1f1b, messages in batches": (
        *("pp=2", "vpp=1", "pipeline.pp_schedule=1f1b", "gbs=3"),
        *("parallel.batch_p2p_comm=true", "parallel.overlap_p2p_comm=false"),
    ),
    "interleaved": ("pp=2", "vpp=2", "pipeline.pp_schedule=interleaved1f1b", "gbs=2"),
}
DUMPED = {
    "interleaved, dumped": RUN["interleaved"],
    "zb_h1, dumped": ("pp=2", "vpp=1", "pipeline.pp_schedule=zb_h1", "gbs=3"),
    "zbv_zero_bubble, dumped": ("pp=2", "vpp=2", "pipeline.pp_schedule=zbv_zero_bubble", "gbs=4"),
}


def test_the_text_of_a_schedule(here: Path) -> None:
    """Every letter, both of what a run executes (schedule.csv) and of what `--dump-schedule` writes."""
    texts = {}
    for name, cut in RUN.items():
        run = Path(told("submit", *RICH[:3], "mbs=1", *cut)["run"])
        texts[name] = (run / "schedule.csv").read_text()
    for name, cut in DUMPED.items():
        ask("plan", *RICH[:3], "mbs=1", *cut, "--dump-schedule", "slots.csv")
        texts[name] = (here / "slots.csv").read_text()
    rows = {name: text.splitlines(keepends=True) for name, text in texts.items()}
    hold(
        "schedule.csv",
        {name: {f"pp_rank {r}": row for r, row in enumerate(of)} for name, of in rows.items()},
        exact=True,
    )


def test_a_run_directory_of_before_is_read(here: Path) -> None:
    """It was written on 2026-11-22, and is never written anew: `make golden` leaves it alone."""
    run = here / "runs" / "quickstart" / "20261122-084400-0000"
    shutil.copytree(Path(__file__).parents[1] / "golden" / "run", run)
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step-1\n")
    (one,) = told("runs")
    assert (one["state"], one["step"], one["checkpoint"]) == ("finished", 1, str(run / "checkpoints" / "step-1"))
    assert told("status")["loss"] == one["loss"] > 0
    assert ask("logs").startswith("step 1/1  loss 5.7")
    refused = told("resume", code=2)["problems"]
    assert [problem["code"] for problem in refused] == ["PP-E618"], "its plan is read, and nothing but its end is told"


def test_a_timeline_for_perfetto(here: Path) -> None:
    ask("plan", *RICH, "--timeline", "step.json")
    hold("--timeline .json", fields(json.loads((here / "step.json").read_text())))
