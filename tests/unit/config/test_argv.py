"""What people type becomes KEY=VALUE, or a problem that says what to type."""

import shlex
import subprocess
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.config.argv import ALIASES, normalise, quote, sweep_values
from ppctl.config.compose import compose
from ppctl.config.flags import TAKEN, flag_problem, translated
from ppctl.config.keys import as_typed, keys, text_keys, value_text
from ppctl.config.name_tables import DEFAULTS, LATER, MEANINGLESS, MEGATRON, OTHERWISE, SAME, tables
from ppctl.errors import ConfigError

DSV3 = "Et*3|(tt|)*29,m|L"
LAYOUT = "parallel.pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("typed", "override"),
    [
        ([f"layout={DSV3}"], f"{LAYOUT}='{DSV3}'"),
        ([f"{LAYOUT}={DSV3}"], f"{LAYOUT}='{DSV3}'"),
        ([f"+layout={DSV3}"], f"{LAYOUT}='{DSV3}'"),
        ([f"++{LAYOUT}={DSV3}"], f"{LAYOUT}='{DSV3}'"),
        ([f"layout='{DSV3}'"], f"{LAYOUT}='{DSV3}'"),
        ([f'layout="{DSV3}"'], f'{LAYOUT}="{DSV3}"'),
        ([f"--pipeline-model-parallel-layout={DSV3}"], f"{LAYOUT}='{DSV3}'"),
        (["--pipeline-model-parallel-layout", DSV3], f"{LAYOUT}='{DSV3}'"),
        (["layout=E,t,L"], f"{LAYOUT}='E,t,L'"),
        (["layout=[[E,t],[t,L]]"], f"{LAYOUT}=[[E,t],[t,L]]"),
        (["layout=null"], f"{LAYOUT}=null"),
        (["layout=auto"], f"{LAYOUT}='auto'"),
        (["layout=@cut.txt"], f"{LAYOUT}='@cut.txt'"),
        (["pp=4"], "parallel.pipeline_model_parallel_size=4"),
        (["--pipeline-model-parallel-size", "4"], "parallel.pipeline_model_parallel_size=4"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], "parallel.virtual_pipeline_model_parallel_size=2"),
        (["--tensor-model-parallel-size=8"], "parallel.tensor_model_parallel_size=8"),
        (["--micro-batch-size", "2"], "train.micro_batch_size=2"),
        (["--load", "/scratch/a b"], "checkpoint.load='/scratch/a b'"),
        (["--make-vocab-size-divisible-by", "64"], "model.make_vocab_size_divisible_by=64"),
        (["--global-batch-size", "64"], "train.global_batch_size=64"),
        (["--seq-length", "4096"], "data.seq_length=4096"),
        (["--num-layers", "-1"], "model.num_layers=-1"),
        (["data.path=/x/{a,b}/(1)*.txt"], "data.path='/x/{a,b}/(1)*.txt'"),
        (["log.name=it's"], "log.name='it\\'s'"),
        (["log.dir=a\\"], "log.dir='a\\\\'"),
        (["launch.env.NCCL_DEBUG=INFO,WARN"], "launch.env.NCCL_DEBUG='INFO,WARN'"),
        (["model.moe_layer_freq=[0]*3+[1]*5"], "model.moe_layer_freq='[0]*3+[1]*5'"),
        (["model.moe_layer_freq=[0,1]"], "model.moe_layer_freq=[0,1]"),
        (["model.moe_layer_freq=2"], "model.moe_layer_freq=2"),
        (["pipeline.pp_schedule=1F1B"], "pipeline.pp_schedule='1F1B'"),
        (["parallel.params_dtype=torch.bfloat16"], "parallel.params_dtype='torch.bfloat16'"),
        (["recipe=quickstart"], "recipe=quickstart"),
        (["+recipe=quickstart"], "recipe=quickstart"),
        (["model=tiny"], "model=tiny"),
        (["anything.else=3"], "anything.else=3"),
        (["steps=1e3"], "train.steps=1e3"),
        (["sp=true"], "parallel.sequence_parallel=true"),
        (["sequence_parallel=true"], "parallel.sequence_parallel=true"),
        (["model.sequence_parallel=true"], "parallel.sequence_parallel=true"),
    ],
)
def test_every_spelling_means_one_override(typed, override):
    found = normalise(typed)
    assert found.problems == []
    assert found.overrides == [override]


@given(st.text(alphabet="Etm L|()*,0123456789'\"\\${}[]", max_size=30))
def test_normalising_is_a_fixed_point(value):
    once = normalise([f"layout={value}", f"log.dir={value}"])
    assert normalise(once.overrides).overrides == once.overrides


@given(st.text(alphabet="Etm L|()*,0123456789'\\{}=;# ", min_size=1, max_size=30))
def test_quoted_text_comes_back_from_hydras_grammar_letter_by_letter(value):
    from ppctl.config.hydra_source import parse

    quoted = quote("log.dir", value)
    if quoted != value and value.strip() == value:
        assert parse(f"log.dir={quoted}").value() == value


def test_own_flags_keep_their_values_and_words_stay_in_order():
    found = normalise(
        ["runs/x", "--json", "steps=3", "--width", "80", "--height=2", "pp=2"],
        {"--json": False, "--width": True, "--height": True},
    )
    assert found.rest == ["runs/x", "--json", "--width", "80", "--height=2"]
    assert found.overrides == ["train.steps=3", "parallel.pipeline_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("flag", "value", "said", "remedy"),
    [
        ("--lots", "1", "did you mean --lost?", "--lost 1"),
        ("--num-layer", "3", "did you mean --num-layers", "--num-layers 3"),
        ("--qoss", "a", "did you mean --qos", "launch.qos=a"),
        ("--zzzz", "1", "there is no flag --zzzz", "ppctl plan --help"),
        ("--layers", "3", "did you mean --num-layers", "ppctl explain model.num_layers"),  # what it means is not known
        ("--learning-rate", "3", "did you mean --shrink-after", "ppctl explain launch.shrink_after"),
        ("--no-async-save", None, "did you mean --async-save", "ppctl explain checkpoint.async"),
        ("--vpp", "2", "the setting is a key", "parallel.virtual_pipeline_model_parallel_size=2"),
        ("--gbs", "64", "the setting is a key", "train.global_batch_size=64"),
        ("--recompute", "full", "the setting is a key", "train.recompute_granularity=full"),
        ("--resume", "runs/a b", "a flag of ppctl node", "ppctl resume 'runs/a b'"),
    ],
)
def test_a_flag_that_does_not_exist_is_answered_with_one_that_the_command_takes(flag, value, said, remedy):
    (problem,) = normalise([flag, *filter(None, [value]), "pp=2"], {"--lost": True, "--json": False}, "plan").problems
    assert (problem.code, said in problem.message, problem.remedy) == ("PP-E107", True, remedy)
    assert "--prompts" not in problem.message


@pytest.mark.parametrize(("command", "remedy"), [("train", "ppctl resume"), ("submit", "ppctl requeue")])
def test_a_job_goes_on_by_its_own_command(command: str, remedy: str) -> None:
    (problem,) = normalise(["--resume"], {}, command).problems
    assert problem.remedy == remedy and problem.message.endswith(f"a run goes on with {remedy}")


def test_aliases_and_flags_name_keys_that_exist():
    assert set(ALIASES.values()) <= set(text_keys())
    assert {key.name for key in TAKEN.values()} <= set(text_keys())
    fixed = tables(MEGATRON).entries[SAME]
    assert {word.partition("=")[0] for value in fixed for word in value.split()} <= set(text_keys())
    assert set(tables(MEGATRON).entries[OTHERWISE]) <= set(text_keys())
    lists = [key.facts.names + " " + key.facts.known_as for key in text_keys().values()]
    listed = [" ".join(tables(MEGATRON).entries[heading].values()) for heading in (LATER, MEANINGLESS, OTHERWISE, SAME)]
    names = " ".join([*lists, *listed]).split()
    assert [name for name in names if names.count(name) > 1] == []


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["--foo"], "PP-E107", "no flag --foo"),
        (["--foo", "3"], "PP-E107", "no flag --foo"),
        (["--mirco-batch-size", "3"], "PP-E107", "--micro-batch-size"),
        (["--micro-batch-size"], "PP-E107", "needs a value"),
        (["--train-iters", "3"], "PP-E107", "train.steps=3"),
        (["--beta1", "0.8"], "PP-E107", "optim.beta1=0.8"),
        (["--deallocate-pipeline-outputs"], "PP-E107", "parallel.deallocate_pipeline_outputs=true"),
        (["--overlap-grad-reduce"], "PP-E108", "does not have (sums of gradients and gathering of weights behind"),
        (["--fp16"], "PP-E107", "parallel.fp16=true"),
        (
            ["--cpu-offloading-num-layers", "3"],
            "PP-E107",
            "parallel.cpu_offloading=true parallel.cpu_offloading_num_layers=3",
        ),
        (["--use-distributed-optimizer"], "PP-E107", "data_parallel_sharding=optimizer_gradients"),
        (["--use-torch-fsdp2"], "PP-E107", "data_parallel_sharding=full"),
        (["--data-parallel-sharding-strategy", "optim_grads_params"], "PP-E107", "data_parallel_sharding=full"),
        (["--recompute-modules"], "PP-E107", "needs a value"),
        (["--no-gradient-accumulation-fusion"], "PP-E107", "parallel.gradient_accumulation_fusion=false"),
        (["--exit-duration-in-mins", "230"], "PP-E107", "train.exit_after=230m"),
        (["--distributed-timeout-minutes", "60"], "PP-E107", "launch.step_limit=60m"),
        (["--save", "/scratch/run"], "PP-E107", "log.dir=/scratch/run"),
        (["--lr-decay-samples", "1000", "--global-batch-size=64"], "PP-E107", "optim.lr_decay_steps=16"),
        (["gbs=64", "--lr-decay-samples", "1000"], "PP-E107", "optim.lr_decay_steps=16"),
        (["--lr-decay-samples", "1000"], "PP-E107", "divide by train.global_batch_size"),
        (
            ["--lr-decay-samples", "9", "gbs=4", "train.batch_rampup=[2,2,8]"],
            "PP-E107",
            "optim.lr_decay_tokens = samples x data.seq_length",
        ),
        (["--lr-decay-samples", "70", "gbs=10"], "PP-E107", "optim.lr_decay_steps=7"),
        (["--lr-wsd-decay-samples", "1000", "gbs=64"], "PP-E107", "15.625 steps, rounded up"),
        (["--tokenizer-model", "meta/tokenizer.json"], "PP-E107", "data.tokenizer=meta"),
        (["--tokenizer-model", "llama/tokenizer.model"], "PP-E107", "directory with a tokenizer.json"),
        (["--no-position-embedding"], "PP-E109", "with rope only, where it changes nothing"),
        (["--lr-warmup-init", "1e-7"], "PP-E108", "a warm-up that begins above 0"),
        (["--lr-warmup-init", "0.0"], "PP-E109", "ppctl always does so"),
        (["--step-batch-size-schedule", "16"], "PP-E108", "a batch that grows by steps of its own"),
        (["--optimizer", "muon"], "PP-E107", "optim.name=muon"),
        (["--optimizer", "adam"], "PP-E107", "optim.name=adamw"),
        (["--optimizer", "sgd"], "PP-E108", "optimizers other than AdamW and Muon"),
        (["--num-workers", "8"], "PP-E109", "in the ranks themselves"),
        (["--dataloader-type", "cyclic"], "PP-E109", "drawn by (seed, step)"),
        (["--ckpt-format", "torch_dist"], "PP-E109", "one format of checkpoints"),
        (["--tensorboard-dir", "tb"], "PP-E107", "log.tensorboard=true log.tensorboard_dir=tb"),
        (["--wandb-project", "p"], "PP-E107", "log.wandb=true log.wandb_project=p"),
        (["--wandb-entity", "team"], "PP-E107", "log.wandb_entity=team"),
        (["--wandb-save-dir", "w"], "PP-E107", "log.wandb_dir=w"),
        (["--profile"], "PP-E108", "leave it out"),
        (["--tp-comm-overlap"], "PP-E108", "userbuffers"),
        (["--no-tp-comm-bulk-wgrad"], "PP-E109", "userbuffers"),
        (["--finetune"], "PP-E107", "ppctl explain model.from"),
        (["--swiglu"], "PP-E107", "model.gated_linear_unit=true"),
        (["--use-flash-attn"], "PP-E109", "model.attention_backend alone"),
        (["--split", "99,1,0"], "PP-E107", "data.validation_split=0.01"),
        (["--data-path", "0.3", "a b", "0.7", "c"], "PP-E107", "'data.path=[0.3,a b,0.7,c]'"),
        (["~train.steps"], "PP-E121", "train.steps=100"),
        (["~pp"], "PP-E121", "parallel.pipeline_model_parallel_size=1"),
        (["~nothing"], "PP-E121", "ppctl explain"),
        (["~recipe"], "PP-E121", "deleted"),
        (["+train.steps"], "PP-E105", "ppctl explain train.steps"),
        (["+recipe"], "PP-E105", "ppctl recipes"),
    ],
)
def test_what_cannot_be_taken_is_one_problem(typed, code, said):
    found = normalise(typed)
    assert [problem.code for problem in found.problems] == [code]
    assert said in str(found.problems[0])
    assert found.rest == []


PP = "parallel.pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("typed", "override", "replaced"),
    [
        (["pp=2", "pp=4"], f"{PP}=4", ", replacing pp=2"),
        (["pp=2", f"{PP}=4"], f"{PP}=4", ", replacing pp=2"),
        (["pp=2", "--pipeline-model-parallel-size", "4"], f"{PP}=4", ", replacing pp=2"),
        (["--pipeline-model-parallel-size", "4", "pp=2"], f"{PP}=2", ", replacing --pipeline-model-parallel-size 4"),
        (["pp=2", "pp=4", "pp=8"], f"{PP}=8", ", replacing pp=4"),
        (["pp=2", "--pipeline-model-parallel-size", "2"], f"{PP}=2", None),
        (["model.lora.rank=4", "model.lora.rank=8"], "model.lora.rank='8'", ", replacing model.lora.rank=4"),
        (["+recipe=quickstart", "recipe=llama3_8b"], "recipe=llama3_8b", ", replacing +recipe=quickstart"),
    ],
)
def test_the_last_word_about_a_key_counts_and_says_what_it_replaced(typed, override, replaced):
    line = normalise([*typed, "steps=3"])
    assert (line.problems, line.rest, line.overrides) == ([], [], [override, "train.steps=3"])
    assert line.sources == ({} if replaced is None else {override.partition("=")[0]: f"command line{replaced}"})


@pytest.mark.parametrize(
    ("key", "value", "values"),
    [
        ("train.steps", "1,2,3", ["1", "2", "3"]),
        ("train.steps", "choice(1,2)", ["1", "2"]),
        ("train.steps", "range(1,4)", ["1", "2", "3"]),
        ("train.steps", "range(10, 0, -5)", ["10", "5"]),
        ("train.steps", "range(0.5, 2)", ["0.5", "2"]),
        ("train.steps", "sort(3,1,reverse=true)", ["3", "1"]),
        ("train.steps", "10", None),
        ("recipe", "a,b", ["a", "b"]),
        ("log.name", "a,b", ["a", "b"]),
        ("log.name", "'a,b'", None),
        ("data.path", "a,b", None),
        (LAYOUT, "E,t,L", None),
        ("launch.env.X", "a,b", None),
        ("parallel.hierarchical_context_parallel_sizes", "[2,4]", None),
    ],
)
def test_a_comma_list_on_a_scalar_key_is_a_sweep(key, value, values):
    assert sweep_values(key, value) == values


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["+recipe=quickstart", "steps=1,2"], [["+recipe=quickstart", "steps=1"], ["+recipe=quickstart", "steps=2"]]),
        (["-m", "steps=3,4", "log.name=a b"], [["steps=3", "log.name=a b"], ["steps=4", "log.name=a b"]]),
        (["--multirun", "pp=2"], [["pp=2"]]),
        (["--micro-batch-size", "1,2"], [["--micro-batch-size=1"], ["--micro-batch-size=2"]]),
        (["steps=1,2", "lr=3,4"], [["steps=1", "lr=3"], ["steps=1", "lr=4"], ["steps=2", "lr=3"], ["steps=2", "lr=4"]]),
    ],
)
def test_the_loop_that_stands_in_for_a_sweep_runs_as_pasted(typed, runs):
    (problem,) = normalise(typed, command="plan").problems
    assert problem.code == "PP-E106"
    script = 'ppctl() { printf \'%s\\n\' "$#" "$@"; }; ' + problem.remedy
    lines = iter(subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines())
    seen = [[next(lines) for _ in range(int(count))] for count in lines]
    assert seen == [["plan", *run] for run in runs]


def test_shell_characters_survive_the_loop():
    (problem,) = normalise([f"layout={DSV3}", "steps=1,2"]).problems
    assert shlex.quote(f"layout={DSV3}") in problem.remedy


def test_python_only_fields_are_not_text_keys():
    assert "parallel.timers" in keys()
    assert "parallel.timers" not in text_keys()


def test_a_pasted_megatron_command_line_comes_back_in_ppctls_words():
    pasted = "--num-layers 8 --lr 3e-4 --bf16 --log-throughput --no-such-thing --data-path a nodes=2"
    found = normalise(shlex.split(pasted), command="plan")
    together, unknown = found.problems
    assert together.remedy == "ppctl plan --num-layers 8 optim.lr=3e-4 parallel.bf16=true data.path=a nodes=2"
    assert "left out: a line has all figures" in together.place
    assert "--no-such-thing" in unknown.message
    again = normalise(together.remedy.split()[2:])
    assert not again.problems
    assert "optim.lr=3e-4" in again.overrides


@pytest.mark.parametrize("path", ["it's", "a b", "\\'", "x\\", 'say "x"', "'", "a,b"])
def test_a_path_is_typed_again_as_it_was(path):
    from ppctl.config.argv import retyped

    overrides = normalise([f"log.dir={path}"]).overrides
    assert retyped(overrides) == shlex.join([f"log.dir={path}"])


@cache
def flags_of_megatron() -> list[str]:
    """Every flag of pretrain_gpt's argument parser."""
    listed = Path(__file__).parents[2] / "golden" / "megatron_flags.txt"
    return [line for line in listed.read_text().splitlines() if line.startswith("--")]


def test_every_flag_of_megatron_is_a_key_or_is_answered_with_a_reason() -> None:
    assert len(flags_of_megatron()) == 865
    unknown = [flag for flag in flags_of_megatron() if flag not in TAKEN and translated(flag, "1") is None]
    assert unknown == []


def test_the_tables_of_flags_name_only_what_megatron_has_or_had() -> None:
    """An entry that matches no flag is a misspelling; these are torchrun's."""
    of_torchrun = {"--node-rank", "--rdzv-backend", "--rdzv-endpoint", "--master-addr", "--master-port"}
    known = {*flags_of_megatron(), *of_torchrun}
    pages = [tables(MEGATRON).entries[heading] for heading in (LATER, MEANINGLESS, OTHERWISE)]
    entries = [name for table in pages for flags in table.values() for name in flags.split()]
    strange = [name for name in entries if not any(fnmatch(flag, name) for flag in known)]
    assert strange == []


def test_no_key_is_offered_that_this_release_refuses() -> None:
    """What is offered for a flag is a key whose value composes, whatever else the value needs."""
    offered = {
        flag: known.override for flag in flags_of_megatron() if (known := translated(flag, "")) and known.override
    }
    for flag, override in offered.items():
        for word in shlex.split(override):
            key, _, value = word.partition("=")
            state = text_keys()[key].facts.support.state
            assert state not in ("later", "needs") or as_typed(key, text_keys()[key].default) == word, (flag, value)
    assert flag_problem("--profile").code == "PP-E108"


@pytest.mark.parametrize(
    ("line", "factor"),
    [
        ("--use-rope-scaling", "8"),
        ("--use-rope-scaling --rope-scaling-factor 32", "32"),
        ("--rope-scaling-factor 32 --use-rope-scaling", "32"),
    ],
)
def test_the_remedy_for_an_extended_context_extends_it(line: str, factor: str) -> None:
    (problem,) = normalise(line.split(), {}, "plan").problems
    config = compose(shlex.split(problem.remedy.removeprefix("ppctl plan "))).config
    assert (config.model.rotary_scaling_type, config.model.rotary_scaling_factor) == ("llama3", float(factor))


@pytest.mark.parametrize("word", ["rotary_scaling_type=llama3", "beta_slow=2", "original_max_position_embeddings=8192"])
def test_a_part_of_an_extended_context_needs_its_factor(word: str) -> None:
    with pytest.raises(ConfigError, match="has an effect only with model"):
        compose([f"model.{word}"])


A_MEGATRON_LINE = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu --seq-length 4096 --bf16 --lr 1e-4 "
    "--micro-batch-size 1 --global-batch-size 128 --train-iters 100 --normalization RMSNorm --adam-beta2 0.95 "
    "--disable-bias-linear --data-path corpus --num-workers 2"
)


def test_a_translation_ends_with_the_defaults_that_differ_and_how_to_paste_megatrons() -> None:
    (problem,) = normalise(A_MEGATRON_LINE.split()).problems
    head, _, table = problem.place.partition("\n\nnot given, and Megatron's default differs from ours:\n")
    assert "--num-workers 2" in head
    rows = {row.split()[0]: row.split()[1:] for row in table.splitlines()[1:-1]}
    assert rows["model.hidden_dropout"] == ["0.0", "0.1"]
    assert rows["optim.weight_decay"] == ["0.1", "0.01"]
    assert rows["model.ffn_hidden_size"] == ["704", "10880"]
    assert rows["data.validation_split"] == ["0.0", "0.03"]
    assert not {"optim.beta2", "model.normalization", "model.add_bias_linear", "model.kv_lora_rank"} & set(rows)
    paste = table.splitlines()[-1].strip()
    line = [*shlex.split(problem.remedy)[2:], *shlex.split(paste)]
    again = normalise(line)
    assert again.problems == []
    assert {"model.hidden_dropout=0.1", "model.position_embedding_type='learned_absolute'"} <= set(again.overrides)
    assert sum(override.startswith("model.ffn_hidden_size=") for override in again.overrides) == 1


@pytest.mark.parametrize("given", ["model.from=x", "+recipe=llama3_8b"])
def test_defaults_are_not_compared_where_a_model_or_a_recipe_sets_them(given: str) -> None:
    (problem,) = normalise([given, "--bf16", "--train-iters", "3"]).problems
    assert "not given" not in problem.place


def test_megatrons_defaults_are_of_keys_that_have_others() -> None:
    for entry, theirs in tables(MEGATRON).entries[DEFAULTS].items():
        key, _, where = entry.partition(" ")
        assert value_text(text_keys()[key].default) != theirs
        assert where in ("", *text_keys())
