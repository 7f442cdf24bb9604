"""Composition: strength, provenance, closedness, and every problem at once."""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppctl.config.argv import ALIASES, LAYOUT
from ppctl.config.compose import compose, override
from ppctl.config.keys import text_keys
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.resources import RECIPES_PATH, recipes
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError

DSV3 = "Et*3|(tt|)*7t|(tt|)*8t|(tt|)*13mL"


def problems_of(*overrides, **options):
    with pytest.raises(ConfigError) as error:
        compose(overrides, **options)
    return list(error.value.problems)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_shipped_recipe_composes_and_says_where_its_values_come_from(name):
    composed = compose([f"recipe={name}"])
    assert composed.config.recipe == name
    assert set(composed.provenance) == set(text_keys())
    assert composed.notes == ()
    given = {source for source in composed.provenance.values() if source.startswith("recipe")}
    assert given
    assert all(source.startswith(f"recipe {name} (recipes/{name}.yaml:") for source in given)


def test_provenance_names_the_line_that_sets_the_value():
    composed = compose(["recipe=deepseek_v3", "steps=5"])
    for key, source in composed.provenance.items():
        if not source.endswith(")") or not source.startswith("recipe"):
            continue
        line = int(source.rpartition(":")[2].rstrip(")"))
        text = recipes()["deepseek_v3"].path.read_text().splitlines()[line - 1]
        assert text.strip().startswith(key.rpartition(".")[2]), (key, text)
    assert composed.provenance["train.steps"] == "command line"
    assert composed.provenance["optim.eps"] == "default"
    assert composed.provenance["parallel.overlap_p2p_comm"].startswith("conf/parallel/default.yaml:")
    assert composed.provenance["model.num_layers"].startswith("conf/model/deepseek_v3.yaml:")


@pytest.mark.parametrize(
    "spelling", ["recipe=quickstart", "+recipe=quickstart", "++recipe=quickstart", "recipe='quickstart'"]
)
def test_every_spelling_of_a_recipe_wins_over_the_base_and_loses_to_the_command_line(spelling):
    composed = compose([spelling, "steps=7"])
    assert (
        composed.config.parallel.pipeline_model_parallel_size == 2 != RunConfig().parallel.pipeline_model_parallel_size
    )
    assert composed.config.train.steps == 7
    assert composed.config.model.hidden_size != RunConfig().model.hidden_size


def test_without_a_recipe_the_schema_and_conf_decide():
    composed = compose([])
    assert composed.config.parallel.overlap_p2p_comm
    assert not composed.config.parallel.batch_p2p_comm
    composed.config.parallel = RunConfig().parallel
    assert composed.config == RunConfig()


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("model.num_layerz", "model.num_layers"),
        ("train.stepz", "train.steps"),
        ("paralell.pp", "parallel.pipeline_model_parallel_size"),
        ("pipeline_model_parallel_size", "parallel.pipeline_model_parallel_size"),
        ("bogus.key", ""),
        ("stepz", "steps"),
    ],
)
def test_an_unknown_key_is_an_error_with_any_prefix(prefix, key, suggestion):
    (problem,) = problems_of(f"{prefix}{key}=3")
    assert problem.code == "PP-E101"
    assert key in problem.message
    if suggestion:
        assert problem.remedy == f"{suggestion}=3"
        compose([problem.remedy])


def test_all_problems_are_told_at_once_each_with_its_source():
    found = problems_of(
        "recipe=quickstrt", "model.num_layerz=3", "steps=x", "mbs=0", "log.profile=true",
        "slurm=yes", "scale=smok", "hydra.run.dir=x", "data=foo", "lr=(", "data.path=${nothing.here}", "log.name=",
        "quickstart",
    )  # fmt: skip
    codes = [problem.code for problem in found]
    assert sorted(codes) == sorted(
        ["PP-E104", "PP-E101", "PP-E102", "PP-E103", "PP-E101", "PP-E110", "PP-E104", "PP-E122", "PP-E102", "PP-E105",
         "PP-E114", "PP-E103", "PP-E105"]
    )  # fmt: skip
    assert all("command line" in problem.place for problem in found)


@pytest.mark.parametrize(
    ("typed", "nearest"), [("quickstrt", "quickstart"), ("deepseek", "deepseek_v3"), ("llama8b", "llama3_8b")]
)
def test_a_misspelt_recipe_names_the_nearest(typed, nearest):
    (problem,) = problems_of(f"+recipe={typed}")
    assert problem.code == "PP-E104"
    assert problem.remedy == f"recipe={nearest}"
    assert f"did you mean {nearest}" in problem.message


@pytest.mark.parametrize("typed", ["recipe=zzz", "model=zzz"])
def test_a_name_that_is_like_none_lists_all(typed):
    (problem,) = problems_of(typed)
    assert all(name in problem.message for name in ("deepseek_v3", "llama3_8b"))


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("steps=1e3", "train.steps", 1000),
        ("steps=1_000", "train.steps", 1000),
        ("steps='12'", "train.steps", 12),
        ("lr=1", "optim.lr", 1.0),
        ("log.tensorboard=true", "log.tensorboard", True),
        ("log.name=2024", "log.name", "2024"),
        ("log.name=1e3", "log.name", "1e3"),
        ("vpp=null", "parallel.virtual_pipeline_model_parallel_size", None),
        ("launch.env.A=1", "launch.env", {"A": "1"}),
        ("launch.env={A: x,B: 2}", "launch.env", {"A": "x", "B": "2"}),
        ("data.path=/x/{a,b}/*.txt", "data.path", "/x/{a,b}/*.txt"),
        (f"layout={DSV3}", LAYOUT, DSV3),
        ("layout=[[E,t],[t,L]]", LAYOUT, [["E", "t"], ["t", "L"]]),
        ("pipeline.pp_schedule=Interleaved1F1B", "pipeline.pp_schedule", "Interleaved1F1B"),
        ("launch.nodes=${train.micro_batch_size}", "launch.nodes", 1),
    ],
)
def test_values_get_the_keys_type(typed, key, value):
    assert compose([typed]).config[key] == value


@pytest.mark.parametrize(
    "typed", ["steps=1.5", "steps=x", "steps=true", "steps=[1]", "log.tensorboard=3", "lr=true", "lr=null"]
)
def test_a_value_of_the_wrong_type_is_refused(typed):
    (problem,) = problems_of(typed)
    assert problem.code == "PP-E102"


def test_two_environment_variables_are_both_kept():
    composed = compose(["launch.env.A=1", "launch.env.B=a,b"])
    assert composed.config.launch.env == {"A": "1", "B": "a,b"}


# --- layouts against sizes -----------------------------------------------------------------------------------------


def test_the_last_value_of_a_key_counts_and_its_provenance_shows_what_it_replaced():
    env = ["launch.env.A=1", "launch.env.B=2", "launch.env.A=3"]
    composed = compose(["+recipe=quickstart", "steps=5", *env, "train.steps=7"])
    assert (composed.config.train.steps, composed.config.launch.env) == (7, {"A": "3", "B": "2"})
    assert composed.provenance["train.steps"] == "command line, replacing steps=5"
    assert composed.provenance["launch.env"] == "command line, replacing launch.env.A=1"
    with pytest.raises(ConfigError) as error:
        compose(["pp=2", "pp=0"])
    assert "pipeline_model_parallel_size = 0 (command line, replacing pp=2)" in str(error.value)


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ([], True),
        (["pp=16"], True),
        (["vpp=2", "gbs=64"], True),
        (["model=deepseek_v3"], True),
        (["pp=8"], False),
        (["pp=8", "vpp=1"], False),
        (["model.num_layers=30"], False),
        (["--mtp-num-layers", "0"], False),
        (["model=llama3_8b", "train.recompute_modules=[mlp]"], False),
    ],
)
def test_a_recipes_layout_gives_way_to_other_sizes(typed, kept):
    composed = compose(["+recipe=deepseek_v3", *typed])
    layout = composed.config.parallel.pipeline_model_parallel_layout
    if kept:
        assert layout == DSV3
        assert composed.provenance[LAYOUT].startswith("recipe deepseek_v3")
        assert not any("layout" in note for note in composed.notes)
    else:
        assert layout is None
        assert composed.provenance[LAYOUT].startswith("derived: layout set aside because")
        assert DSV3 in composed.notes[0]


def test_a_typed_layout_is_never_changed():
    composed = compose(["+recipe=deepseek_v3", "pp=8", "vpp=1", f"layout={DSV3}"])
    assert composed.config.parallel.pipeline_model_parallel_layout == DSV3
    assert composed.provenance[LAYOUT] == "command line"


def test_a_layout_file_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.txt").write_text(f"  {DSV3}\n")
    (tmp_path / "cut.yaml").write_text("- [E, t]\n- [t, L]\n")
    assert compose(["layout=@cut.txt"]).config.parallel.pipeline_model_parallel_layout == DSV3
    composed = compose(["layout=@cut.yaml"])
    assert composed.config.parallel.pipeline_model_parallel_layout == [["E", "t"], ["t", "L"]]
    assert composed.provenance[LAYOUT] == "command line (file cut.yaml)"
    (problem,) = problems_of("layout=@none.txt")
    assert problem.code == "PP-E123"
    assert "No such file" in problem.message


# --- one value, two names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "size"),
    [
        (["mbs=4"], 4),
        (["pipeline.pp_microbatch_size=4"], 4),
        (["recipe=quickstart", "pipeline.pp_microbatch_size=4"], 4),
        (["mbs=4", "pipeline.pp_microbatch_size=4"], 4),
    ],
)
def test_both_names_of_the_micro_batch_size_agree(typed, size):
    config = compose(typed).config
    assert (config.train.micro_batch_size, config.pipeline.pp_microbatch_size) == (size, size)


def test_two_micro_batch_sizes_are_a_contradiction():
    (problem,) = problems_of("mbs=2", "pipeline.pp_microbatch_size=4")
    assert problem.code == "PP-E103"


# --- the user's own recipes ----------------------------------------------------------------------------------------


@pytest.fixture
def own_recipe(tmp_path, monkeypatch):
    def write(text, name="mine"):
        (tmp_path / f"{name}.yaml").write_text(text)
        monkeypatch.setenv(RECIPES_PATH, str(tmp_path))
        return tmp_path / f"{name}.yaml"

    return write


def test_a_users_recipe_can_build_on_a_shipped_one(own_recipe):
    path = own_recipe("defaults:\n  - quickstart\n  - _self_\ntrain:\n  steps: 9\n")
    composed = compose(["+recipe=mine"])
    assert composed.config.train.steps == 9
    assert composed.config.log.name == "quickstart"
    assert composed.provenance["train.steps"] == f"recipe mine ({path}:5)"
    assert composed.provenance["log.name"].startswith("recipe quickstart (recipes/quickstart.yaml:")


def test_a_recipe_may_be_a_file_that_lies_anywhere(tmp_path):
    path = tmp_path / "my own.yaml"
    path.write_text("defaults:\n  - quickstart\n  - _self_\ntrain:\n  steps: 9\n")
    composed = compose([f"recipe={path}"])
    assert composed.config.train.steps == 9
    assert composed.provenance["train.steps"] == f"recipe my own ({path}:5)"
    (problem,) = problems_of(f"recipe={tmp_path}/none.yaml")
    assert (problem.code, "no recipe file" in problem.message) == ("PP-E104", True)
    (problem,) = problems_of(f"recipe={path.with_suffix('.yml')}")
    assert problem.remedy.splitlines()[0] == f"'+recipe={path}'", "the file with the other ending is there"


def test_a_users_recipe_hides_a_shipped_one_of_its_name(own_recipe):
    own_recipe("train: {steps: 3}\n", "quickstart")
    assert compose(["recipe=quickstart"]).config.train.steps == 3


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("train: {stepz: 3}\nmodel: {num_layers: x}\nfoo: 1\n", ["PP-E101", "PP-E101", "PP-E102"]),
        ("train: [\n", ["PP-E115"]),
        ("- 1\n", ["PP-E115"]),
        ("train: 3\n", ["PP-E102"]),
        ("defaults: [override /model: nope, _self_]\n", ["PP-E115"]),
        ("defaults: [nope, _self_]\n", ["PP-E115"]),
        ("defaults: [mine]\n", ["PP-E115"]),
        *((f"defaults: {wrong}\n", ["PP-E115"]) for wrong in ("3", "{a: b}", "[3]", "[[a]]", "[{1: 2}]", "[{}]")),
        ("# @package\n", ["PP-E115"]),
        ("".join(f"a{number}: 1\n" for number in range(20_000)), ["PP-E101"] * 21),
        ("slurm: yes\n", ["PP-E101"]),
        ("published: [{what: a}]\n", ["PP-E102"]),
        ("parallel: {timers: 3}\n", ["PP-E113"]),
        ("train: {steps: 0}\n", ["PP-E103"]),
        ("launch: {env: {A: [1]}}\n", ["PP-E102"]),
    ],
)
def test_what_is_wrong_in_a_recipe_is_told_with_its_line(own_recipe, text, codes):
    path = own_recipe(text)
    found = problems_of("+recipe=mine")
    assert sorted(problem.code for problem in found) == codes
    assert all(f"{path}:" in problem.place for problem in found)
    assert all(problem.remedy or "leave it out" in problem.message for problem in found)
    if codes == ["PP-E115"]:
        subprocess.run(found[0].remedy, shell=True, check=True, capture_output=True)


@pytest.mark.parametrize(
    "row", ["${launch.env.A%d}${launch.env.A%d}", "${launch.env.${launch.env.N%d}}${launch.env.${launch.env.N%d}}"]
)
def test_interpolations_that_multiply_are_refused_and_a_chain_is_not(own_recipe, row):
    names = "".join(f"    N{n}: A{n}\n" for n in range(40))
    lines = "".join(f"    A{n + 1}: '{row % (n, n)}'\n" for n in range(39))
    own_recipe(f"launch:\n  env:\n    A0: x\n{names}{lines}")
    (problem,) = problems_of("+recipe=mine")
    assert problem.code == "PP-E114" and "longer than 65536 characters" in problem.message and problem.remedy
    own_recipe("launch:\n  env:\n    A0: x\n" + "".join(f"    A{n + 1}: '${{.A{n}}}y'\n" for n in range(20)))
    assert compose(["+recipe=mine"]).config.launch.env["A20"] == "x" + "y" * 20


def test_deep_interpolation_is_refused(own_recipe):
    own_recipe("log: {name: '" + "${" * 3000 + "a" + "}" * 3000 + "'}\n")
    (problem,) = problems_of("+recipe=mine")
    assert (problem.code, bool(problem.remedy)) == ("PP-E114", True)


def test_an_empty_recipe_is_the_defaults(own_recipe):
    own_recipe("# nothing\n")
    assert compose(["+recipe=mine"]).config.train == RunConfig().train


# --- resume --------------------------------------------------------------------------------------------------------


def test_override_keeps_what_was_composed_and_moves_the_layout():
    first = compose(["recipe=deepseek_v3", "steps=5"])
    same = override(first.config, first.provenance, [])
    assert same.config == first.config
    assert same.provenance == first.provenance
    moved = override(first.config, first.provenance, ["pp=8", "steps=9"])
    assert moved.config.train.steps == 9
    assert moved.config.parallel.pipeline_model_parallel_layout is None
    assert first.config.parallel.pipeline_model_parallel_size == 16


def test_override_refuses_another_recipe():
    first = compose([])
    with pytest.raises(ConfigError, match="keeps its recipe"):
        override(first.config, first.provenance, ["recipe=quickstart"])


# --- training ------------------------------------------------------------------------------------------------------


def test_training_what_can_only_be_planned_is_one_sentence():
    typed = ("model.fp8=hybrid", "model.attention_dropout=0.1", "model.attention_backend=fused")
    (problem,) = problems_of("+recipe=deepseek_v3", *typed, for_training=True)
    assert problem.code == "PP-E118"
    for what in ("products of experts in 8 bits", "attention dropout in fused kernels"):
        assert problem.message.count(what) == 1
    assert "\n" not in problem.message
    assert (
        problem.remedy == "ppctl plan +recipe=deepseek_v3 model.fp8=hybrid model.attention_dropout=0.1 "
        "model.attention_backend=fused"
    )


@pytest.mark.parametrize(
    ("typed", "missing"),
    [
        (["model.attention_dropout=0.1", "model.attention_backend=flash"], "attention dropout in fused kernels"),
        (["model.add_bias_linear=true", "model.num_moe_experts=4"], "biases of experts"),
        (["model.add_bias_linear=true", "model.multi_latent_attention=true"], "biases of latent attention"),
    ],
)
def test_blocks_that_have_no_module_can_be_planned_alone(typed, missing):
    compose(typed)
    (problem,) = problems_of(*typed, for_training=True)
    assert problem.code == "PP-E118" and missing in problem.message


@pytest.mark.parametrize("name", recipes())
def test_the_recipes_may_train(name):
    compose([f"recipe={name}"], for_training=True)


_VALUES = st.one_of(
    st.sampled_from(
        ["1", "-1", "0", "1e3", "null", "true", "x", "", "${train.steps}", "${x", "[1,2]", "{a: 1}", "'q", "nan"]
    ),
    st.text(alphabet="aE1,.()[]{}$'\"\\ |*:@", max_size=8),
)
_TOKENS = st.builds(
    "{}{}={}".format,
    st.sampled_from(["", "+", "++", "~"]),
    st.sampled_from([*ALIASES, *text_keys(), "recipe", "model", "train", "launch.env.X", "hydra.x", "published"]),
    _VALUES,
)


@settings(max_examples=150)
@given(st.lists(st.one_of(_TOKENS, st.text(max_size=12)), max_size=4))
def test_any_command_line_is_a_config_or_a_list_of_problems(tokens):
    try:
        composed = compose(tokens)
    except ConfigError as error:
        assert error.problems
        assert all(problem.code.startswith("PP-E1") and problem.message for problem in error.problems)
    else:
        assert from_mapping(to_mapping(composed.config)) == composed.config
