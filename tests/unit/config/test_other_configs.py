"""Configs of torchtitan, NeMo Automodel, Megatron-Bridge and Megatron-LM mean here what they mean there.

The files of `tests/golden/other_configs` are those systems' own, without comments. Three were written by hand, from
functions: torchtitan's two in JSON, as `Trainer.Config.to_dict` gives them, from `config_registry.py`; and Bridge's
run_config.yaml from the recipe `qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config`, with the keys that it names.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.compose import compose
from ppctl.config.keys import text_keys
from ppctl.config.name_tables import LATER, MEANINGLESS, MODELS, OTHERWISE, SAME, SYSTEMS, overrides_of, tables
from ppctl.config.translate import _of_bridge, settings_of
from ppctl.config.unknown_words import no_such_key
from ppctl.errors import ConfigError

LOOPED = "interleaved_1f1b"
GPUS_256 = ["nodes=32", "gpus_per_node=8"]
FILES = Path(__file__).parents[2] / "golden" / "other_configs"
RECIPE = Path(__file__).parents[3] / "recipes" / "llama3_8b.yaml"

# Automodel: nemo_automodel/components/distributed/pipelining/functional.py, calculate_virtual_stages and
# generate_hf_model_fqn_per_model_part (layers alone count, what is left over goes to the first stages);
# recipes/llm/train_ft.py (pp_batch_size is step_scheduler.local_batch_size) and training/step_scheduler.py
# (grad_acc_steps = global_batch_size / (local_batch_size x dp)).
# torchtitan: distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part (embedding and output count as a layer
# each), build_pipeline_schedule (microbatches = local_batch_size / pipeline_parallel_microbatch_size); trainer.py (a
# step is local_batch_size x dp unless global_batch_size says more; tokens / max_context_length in August 2026).
# Bridge: Megatron-core's TransformerConfig, whose split is `ppctl`'s own (tests/golden/layout.json).
CASES = [
    # file, typed, decoder layers of each stage, schedule, (global, micro, microbatches, calls)
    ("titan_llama3_405b.toml", ["nodes=16", "gpus_per_node=8"], [126], None, (32, 2, 1, 1)),
    # 27 + 2 over 4 stages: 8 7 7 7, without the ends 7 7 7 6
    ("titan_deepseek_v3_16b.toml", ["nodes=1", "gpus_per_node=8"], [7, 7, 7, 6], "dualpipev", (16, 1, 4, 1)),
    ("titan_debug_model.toml", [], [1, 2, 2, 1], "1f1b", (32, 1, 32, 1)),
    ("titan_deepseek_v3_671b.json", ["dp=8"], [61], None, (32, 4, 1, 1)),
    (
        "titan_qwen3_5_debugmodel_moe.json",
        ["model.num_layers=4", "model.num_moe_experts=8", "model.hidden_size=256"],
        [2, 2],
        "1f1b",
        (4, 1, 2, 1),
    ),
    # no layers_per_stage: two stages on a rank; dp = 8 / pp 2
    ("nemo_llama3_1_8b_hellaswag_pp.yaml", ["nodes=1", "gpus_per_node=8", "seq=512"], [8] * 4, LOOPED, (256, 4, 8, 2)),
    # ceil(61 / 2) = 31 stages, down to 28 = 4 x 7; 61 = 28 x 2 + 5
    ("nemo_deepseek_v3_te_deepep.yaml", GPUS_256, [3] * 5 + [2] * 23, LOOPED, (256, 1, 4, 1)),
    ("nemo_llama3_70b_pretrain.yaml", [], [4] * 20, LOOPED, (128, 1, 4, 16)),
    # ceil(94 / 2) = 47 stages, up to 48; 94 = 48 + 46
    ("nemo_qwen3_moe_235b_te_deepep.yaml", GPUS_256, [2] * 46 + [1] * 2, LOOPED, (2048, 1, 8, 4)),
    # 31 stages, down to 24; 61 = 24 x 2 + 13
    ("nemo_deepseekv3_pretrain.yaml", [], [3] * 13 + [2] * 11, LOOPED, (512, 1, 8, 4)),
    (
        "bridge_llama31_405b.yaml",
        # recipes/llama/llama31_405b.py: account_for_embedding_in_pipeline_split and _loss_ are True
        ["model=llama3_405b", *(f"parallel.account_for_{end}_in_pipeline_split=true" for end in ("embedding", "loss"))],
        [1] + [2] * 62 + [1],
        LOOPED,
        (64, 1, 64, 1),
    ),
    ("bridge_llama3_70b.yaml", ["model=llama3_70b"], [4] * 20, LOOPED, (128, 1, 128, 1)),
    ("bridge_llama3_8b.yaml", ["model=llama3_8b"], [32], None, (128, 1, 128, 1)),
    ("bridge_override_example.yaml", ["model=llama3_8b"], [32], None, (8, 1, 8, 1)),
    # (94 + 2) / 16 = 6; 128 GPUs are dp 1: tp 4 x cp 2 x pp 16
    ("bridge_qwen3_235b_run_config.yaml", [], [5] + [6] * 14 + [5], "1f1b", (32, 1, 32, 1)),
    ("megatron_mixtral_8x7b.sh", ["nodes=4"], [8] * 4, "1f1b", (256, 1, 32, 1)),
]  # fmt: skip

LOST = {
    "titan_llama3_405b.toml": ["model.converters=[float8]"],
    "nemo_deepseek_v3_te_deepep.yaml": ["model.backend.fake_balanced_gate=true"],
    "nemo_qwen3_moe_235b_te_deepep.yaml": ["model.backend.fake_balanced_gate=true"],
    "bridge_llama31_405b.yaml": ["mixed_precision.grad_reduce_in_fp32=false"],
    "bridge_llama3_70b.yaml": ["mixed_precision.grad_reduce_in_fp32=false"],
    "bridge_llama3_8b.yaml": ["mixed_precision.grad_reduce_in_fp32=false"],
    "megatron_mixtral_8x7b.sh": [
        "--overlap-param-gather", "--overlap-grad-reduce", "--tokenizer-model '$2'", "--data-path '$3'", "--save '$1'",
        "--load '$1'", "--tensorboard-dir '$1/tensorboard'", "--no-load-optim",
    ],
}  # fmt: skip
"""Settings that are not carried over; of all other files there are none."""


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    code = main(["plan", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


@pytest.mark.parametrize(("file", "typed", "layers", "schedule", "batch"), CASES, ids=[case[0] for case in CASES])
def test_a_config_of_another_system_is_the_plan_that_the_system_would_run(
    file, typed, layers, schedule, batch, capsys, tmp_path
) -> None:
    recipe = str(tmp_path / "mine.yaml")
    code, report, err = plan(capsys, "--from", str(FILES / file), *typed, "--write", recipe)
    assert code == 0, err
    assert [sum(name.startswith("decoder.") for name in stage["layers"]) for stage in report["stages"]] == layers
    assert schedule in (None, report["schedule"]["name"])
    derived = {each["key"]: each["value"] for each in report["derived"]}
    parts = (derived["num_microbatches"], report["schedule"]["gradient_accumulation_steps"])
    samples, micro, *counts = batch
    assert list(parts) == counts
    assert samples == report["parallel"]["dp"] * micro * parts[0] * parts[1]
    lost = [row["typed"] for row in report["translation"] if not row["override"] and row["code"] != "PP-E109"]
    assert lost == LOST.get(file, [])
    assert not [row for row in report["translation"] if "no table" in row["why"]]
    # The recipe is the same plan, and says what it lacks.
    text = Path(recipe).read_text()
    again, written, err = plan(capsys, recipe)
    assert again == 0, err
    same = ("stages", "schedule", "timing", "parallel", "pp_ranks", "layout", "params_total", "world_size")
    assert {key: written[key] for key in same} == {key: report[key] for key in same}
    assert text.startswith(f"# {file}, translated from ")
    assert all(f"# Not carried over: {setting}: " in text for setting in lost)


@pytest.mark.parametrize("file", LOST)
def test_what_is_lost_is_refused_without_write_and_the_remedy_writes_the_rest(
    file, capsys, tmp_path, monkeypatch
) -> None:
    import shlex

    monkeypatch.chdir(tmp_path)
    typed = next(case[1] for case in CASES if case[0] == file)
    code, report, _ = plan(capsys, "--from", str(FILES / file), *typed)
    assert code == 2
    assert report["stages"] == []
    (problem,) = report["problems"]
    assert all(setting in problem["place"] for setting in LOST[file])
    assert main(shlex.split(problem["remedy"])[1:]) == 0
    assert Path("my.yaml").is_file()
    capsys.readouterr()
    assert main(shlex.split(problem["remedy"])[1:]) == 2  # and never overwrites it
    assert "my-2.yaml" in capsys.readouterr().err


def test_the_table_names_every_setting_once(capsys) -> None:
    for file in sorted(FILES.iterdir()):
        system, settings = settings_of(file)
        typed = next((case[1] for case in CASES if case[0] == file.name), [])
        _, report, _ = plan(capsys, "--from", str(file), *typed)
        said = " ".join(row["typed"] for row in report["translation"])
        words = Counter(said.replace("=", " ").split())
        missing = [each.name for each in settings if not words[each.name]]
        assert missing == [], (system, file.name)


@pytest.mark.parametrize("system", ["torchtitan", "automodel", "bridge"])
def test_every_key_of_another_system_is_answered(system: str) -> None:
    """torchtitan's and Bridge's are the fields of their config classes, Automodel's those of two examples or more."""
    table = tables(system)
    text = (FILES.parent / f"{system}_keys.txt").read_text()
    names = text.replace("autopipeline.", "distributed.pipeline.").split()
    listed = (
        name for name in names if any(table.entry(heading, name) for heading in (SAME, LATER, MEANINGLESS, OTHERWISE))
    )
    missing = {*names} - {*listed}
    assert {name for name in missing if system != "bridge" or _of_bridge(name, "7") is None} == set()
    assert len(names) > 150


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_page_translates_to_are_keys_and_values_that_compose(system: str) -> None:
    entries = tables(system).entries
    for entry in (*entries[SAME], *entries.get(MODELS, ())):
        words = [f"{key}={text}" for key, text in overrides_of(entry, "{}") if "{" not in text]
        try:
            compose(words)
        except ConfigError as error:
            assert {problem.code for problem in error.problems} == {"PP-E103"}  # it needs another key as well
        assert {key for key, _ in overrides_of(entry, "1")} <= {*text_keys(), "model"}


def test_the_formats_are_those_that_are_read() -> None:
    found = {file.name.partition("_")[0]: settings_of(file)[0] for file in FILES.iterdir()}
    assert found == {"titan": "torchtitan", "nemo": "automodel", "bridge": "bridge", "megatron": "megatron"}
    assert {*found.values()} == {*SYSTEMS}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("llama.py", "config = 1", "a program, which ppctl does not run"),
        ("x.yaml", "name: x\n", "is not recognised"),
        ("x.txt", "hello", "is not recognised"),
        ("x.yaml", "parallel:\n  pipeline_model_parallel_size: 2\ndata: {}\n", "a recipe of ppctl's own"),
        ("mine.yaml", RECIPE.read_text(), "a recipe of ppctl's own"),
        ("x.toml", "[training]\nsteps = \n", "cannot be read"),
        ("x.json", '{"training": ', "cannot be read"),
        ("x.json", '{"training":' + "[" * 100_000, "cannot be read"),
        ("x.toml", "[training]\na = " + "[" * 50_000, "cannot be read"),
        ("x.yaml", "train: !!python/object/apply:os.system ['touch here']\n", "cannot be read"),
        ("x.toml", "[training]\nlocal_batch_size = 'many'\n[model]\nname='llama3'\nflavor='8B'\n", "a whole number"),
        ("x.sh", "torchrun pretrain_gpt.py --num-layers 'two", "cannot be read"),
        ("x.toml", "[training]\nsteps = 3\n[model]\nname='mine'\nflavor='3B'\n", "no table has the sizes of mine/3B"),
        ("x.yaml", "train:\n  train_iters: 3\nddp: {}\n", "in Python: type model=NAME"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_and_nothing_of_it_runs(
    name, text, said, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    code, report, err = plan(capsys, "--from", name)
    assert (code, said in report["problems"][0]["message"]) == (2, True), err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_yaml_bomb_is_not_unfolded(tmp_path) -> None:
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    (tmp_path / "x.yaml").write_text(f"{bomb}train: *a8\nddp: 1\n")
    with pytest.raises(ConfigError, match="more than"):
        settings_of(tmp_path / "x.yaml")


def test_what_is_typed_is_stronger_and_a_layout_of_other_sizes_is_set_aside(capsys) -> None:
    file = str(FILES / "titan_debug_model.toml")
    code, report, err = plan(capsys, "--from", file, "pp=2", "train.steps=3", "dp=2")
    assert (code, report["parallel"]["pp"], len(report["stages"])) == (0, 2, 2), err
    assert report["parallel"]["dp"] == 2
    assert [stage["layers"].count("embedding") for stage in report["stages"]] == [1, 0]
    _, kept, _ = plan(capsys, "--from", file, "model.num_layers=14")
    assert [len(stage["layers"]) for stage in kept["stages"]] == [
        4,
        4,
        4,
        4,
    ]  # embedding and loss are layers there, too


SCRIPT = """\
TP=2
export PP=${PP:-4}
if [ $1 = big ]; then MBS=2; else MBS=1; fi
ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size ${PP}  # the pipeline
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --micro-batch-size $MBS
    "--split '99,1,0'" --global-batch-size 16 --bf16
)
ARGS+=( --lr-wsd-decay-samples 100 --lr-decay-style WSD )
torchrun --nproc_per_node 8 pretrain_gpt.py ${ARGS[@]} \\
    --seq-length 128 | tee log.txt
"""


def test_a_shell_script_is_read_for_its_flags_with_variables_that_it_sets_itself(tmp_path, capsys) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    _, report, _ = plan(capsys, "--from", str(tmp_path / "train.sh"))
    rows = {row["typed"].split()[0]: row for row in report["translation"]}
    overrides = {flag: row["override"] for flag, row in rows.items()}
    assert overrides["--tensor-model-parallel-size"] == "parallel.tensor_model_parallel_size=2"
    assert overrides["--pipeline-model-parallel-size"] == "parallel.pipeline_model_parallel_size=4"
    assert overrides["--nproc_per_node"] == "launch.gpus_per_node=8"
    assert overrides["--split"] == "data.validation_split=0.01"
    assert (overrides["--lr-wsd-decay-samples"], rows["--lr-wsd-decay-samples"]["why"]) == (
        "optim.lr_wsd_decay_steps=7",
        "6.25 steps, rounded up: a schedule counts whole steps",
    )
    assert rows["--micro-batch-size"]["why"] == (
        "only the shell that runs the script knows this value: type train.micro_batch_size=..."
    )
    assert overrides["model.ffn_hidden_size"] == "model.ffn_hidden_size=256"  # Megatron's default


def test_a_narrow_table_cuts_no_value_off(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--from", str(FILES / "titan_llama3_405b.toml"), "nodes=16", "gpus_per_node=8"]) in (0, 2)
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert not [line for line in lines if "..." in line]
    names = "".join(line[:32].strip() for line in lines)
    assert "parallelism.tensor_parallel_degree=8" in names.replace(" ", "")


def test_what_only_the_shell_knows_is_told_with_what_follows_from_it(tmp_path, capsys) -> None:
    script = (
        "torchrun --nproc_per_node 8 --nnodes ${NNODES:-1} pretrain_gpt.py --num-layers 8 --hidden-size 64 "
        "--num-attention-heads 4 --pipeline-model-parallel-size 4 --num-experts 8 --expert-model-parallel-size 8 "
        "--seq-length 128 --global-batch-size 8 --mock-data --tokenizer-model ${TOKENIZER}\n"
    )
    (tmp_path / "train.sh").write_text(script)
    _, report, _ = plan(capsys, "--from", str(tmp_path / "train.sh"))
    why = next(row["why"] for row in report["translation"] if row["typed"].startswith("--tokenizer-model"))
    assert why.endswith(
        "type data.tokenizer=DIR, or model.vocab_size=N to plan; until then it is that of bytes (320, rounded up)"
    )
    assert report["problems"][-1]["code"] == "PP-E205"
    assert report["problems"][-1]["remedy"].splitlines()[0] == "nodes=4", "its shell may say more"
    code, report, _ = plan(capsys, "--from", str(tmp_path / "train.sh"), "model.vocab_size=1000", "nodes=4")
    assert (code, report["problems"]) == (0, [])
    recipe = ("--write", str(tmp_path / "my.yaml"), "model.vocab_size=1000", "nodes=4")
    plan(capsys, "--from", str(tmp_path / "train.sh"), *recipe)
    assert "# Not carried over: --tokenizer-model" in (text := (tmp_path / "my.yaml").read_text())
    assert "to train, type data.tokenizer=DIR" in " ".join(text.replace("\n#", "").split())


def test_megatrons_test_recipes_in_yaml_are_flags_too(tmp_path, capsys) -> None:
    (tmp_path / "model_config.yaml").write_text(
        "MODEL_ARGS:\n  --num-layers: 12\n  --bf16: true\n  --sft: false\n  --pipeline-model-parallel-size: 4\n"
    )
    code, report, _ = plan(capsys, "--from", str(tmp_path / "model_config.yaml"))
    assert (code, len(report["stages"]), report["schedule"]["microbatches"]) == (0, 4, 1)  # no global batch: one of mbs
    assert not any("--sft" in row["typed"] for row in report["translation"])


@pytest.mark.parametrize(
    ("typed", "remedy", "said"),
    [
        ("training.seq_len=8192", "data.seq_length=8192", ""),
        ("training.local_batch_size=8", "ppctl explain train.global_batch_size", "of all replicas (this times dp)"),
        ("parallelism.pipeline_parallel_schedule=Interleaved1F1B", "pipeline.pp_schedule=Interleaved1F1B", ""),
        ("parallelism.pipeline_parallel_microbatch_size=2", "train.micro_batch_size=2", ""),
        ("distributed.pp_size=4", "parallel.pipeline_model_parallel_size=4", ""),
        ("distributed.strategy=fsdp2", "parallel.data_parallel_sharding=full", ""),
        ("distributed.pipeline.pp_microbatch_size=2", "train.micro_batch_size=2", ""),
        ("activation_checkpoint.mode=full", "train.recompute_granularity=full", ""),
        ("activation_checkpoint.mode=selective", "train.recompute_granularity=selective", "of single operators there"),
        ("activation_checkpoint.selective_ac_option=2", "", "which operators are recomputed changes no number"),
        ("compile.enable=true", "train.compile=true", ""),
        ("optimizer.name=AdamW", "optim.name=adamw", ""),
        ("metrics.log_freq=10", "log.interval=10", ""),
        ("lr_scheduler.min_lr_factor=0.1", "ppctl explain optim.min_lr", "this times optim.lr"),
        ("parallelism.fsdp_reshard_after_forward=never", "", "parallel.data_parallel_sharding alone decides"),
        ("model.flavor=8B", "ppctl explain model.from", "model=NAME"),
    ],
)  # fmt: skip
def test_a_single_setting_with_its_section_is_answered_from_the_tables(typed, remedy, said) -> None:
    key, _, text = typed.partition("=")
    problem = no_such_key(key, text)
    assert (problem.code, problem.remedy) == ("PP-E101", remedy)
    assert said in problem.message
    assert remedy or problem.message.endswith("leave it out")


WRONG = [
    "parallelism.pipeline_parallel_degree=2.5", "parallelism.pipeline_parallel_degree=9999999999",
    "parallelism.pipeline_parallel_layers_per_stage='x'", "parallelism.pipeline_parallel_layers_per_stage=0",
    "parallelism.pipeline_parallel_first_stage_less_layers=90071992547400",
    "parallelism.module_fqns_per_model_part=5",
    "training.local_batch_size=0", "training.local_batch_size=-1", "training.seq_len='\\u001b[2J'", "model.flavor=[1]",
    "lr_scheduler.min_lr_factor='abc'", "lr_scheduler.decay_ratio=[1]", "compile.components=3",
    "training.num_tokens_per_microbatch_per_dp_rank=7", "training.max_norm=nan", "optimizer.lr='${oc.env:X}'",
    "parallelism.data_parallel_shard_degree=0", "parallelism.expert_parallel_degree=3", "job.dump_folder='\\n\\u007f'",
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_in_a_file_are_problems_or_refused_by_name(wrong: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    name, _, value = wrong.partition("=")
    section, _, key = name.rpartition(".")
    tree = {"model": {"name": "'llama3'", "flavor": "'debugmodel'"}, "parallelism": {"pipeline_parallel_degree": "2"}}
    tree.setdefault(section, {})[key] = value
    text = [f"[{part}]\n" + "".join(f"{each} = {said}\n" for each, said in keys.items()) for part, keys in tree.items()]
    Path("x.toml").write_text("".join(text))
    code, report, err = plan(capsys, "--from", "x.toml", "--write", "my.yaml")
    assert code in (0, 2) and "Traceback" not in err
    assert "\x1b" not in err and "\x7f" not in err
    if Path("my.yaml").exists():  # and what is written can be read, whatever is wrong with its values
        again, _, _ = plan(capsys, "my.yaml")
        assert again == code
    else:
        assert code == 2 and report["problems"]


def test_other_commands_point_to_plan(capsys) -> None:
    assert main(["train", "--from", "x.toml"]) == 2
    assert "try: ppctl plan --from x.toml --write my.yaml" in capsys.readouterr().err


def test_replicas_that_nobody_names_are_as_few_as_the_experts_need(tmp_path, capsys) -> None:
    sizes = "distributed:\n  tp_size: 2\n  sequence_parallel: true\n  cp_size: 2\n  pp_size: 1\n  ep_size: 8\n"
    model = "model:\n  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B\noptimizer:\n  _target_: torch.optim.AdamW\n"
    (tmp_path / "x.yaml").write_text(f"{sizes}{model}step_scheduler:\n  global_batch_size: 32\n  local_batch_size: 4\n")
    code, report, err = plan(capsys, "--from", str(tmp_path / "x.yaml"))
    assert (code, "type seq=N" in report["problems"][0]["place"]) == (2, True)
    code, report, err = plan(capsys, "--from", str(tmp_path / "x.yaml"), "seq=512")
    # nemo_automodel/components/distributed/mesh_utils.py: ep x ep_shard = dp x cp
    assert (code, report["parallel"]["dp"], report["parallel"]["ep"]) == (0, 4, 8), err
    _, typed, _ = plan(capsys, "--from", str(tmp_path / "x.yaml"), "seq=512", "nodes=4", "gpus_per_node=8")
    assert (typed["parallel"]["dp"], typed["world_size"]) == (8, 32)
