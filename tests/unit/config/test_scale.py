"""`+scale=smoke` and `+scale=axes`: what they keep, what they change, and that what is typed is stronger."""

from pathlib import Path

import pytest
import yaml

from ppctl.config.compose import RefusedError, compose, override
from ppctl.config.keys import text_keys
from ppctl.config.mapping import nested
from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.resources import recipes
from ppctl.plan import build_plan

KEPT = (
    "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size", "model.num_layers",
    "parallel.pipeline_model_parallel_layout", "pipeline.pp_schedule", "model.mtp_num_layers", "model.moe_layer_freq",
    "model.multi_latent_attention", "model.qk_layernorm", "model.share_embeddings_and_output_weights", "parallel.bf16",
    "model.moe_router_score_function", "model.moe_router_enable_expert_bias", "model.moe_router_load_balancing_type",
    "model.moe_aux_loss_coeff", "model.mtp_loss_scaling_factor", "model.moe_router_topk_scaling_factor",
)  # fmt: skip


@pytest.mark.parametrize("recipe", recipes())
def test_a_miniature_keeps_what_makes_the_run_this_run(recipe):
    full, small = compose([f"+recipe={recipe}"]).config, compose([f"+recipe={recipe}", "+scale=smoke"]).config
    for key in KEPT:
        assert small[key] == full[key], key
    plan, original = build_plan(small), build_plan(full)
    assert not plan.problems
    assert plan.layout == original.layout
    assert [s.layers for s in plan.stages] == [s.layers for s in original.stages]
    sizes = plan.sizes
    assert sizes.world == sizes.pp == original.sizes.pp
    assert plan.num_microbatches == (2 * sizes.pp if plan.schedule.name == "dualpipev" else sizes.pp)
    assert (small.model.hidden_size, small.data.seq_length, small.launch.device) == (64, 64, "any")
    assert small.cost.device is None, "its seconds are those of where it runs"
    assert plan.params_total < 10e6


def test_the_table_of_what_is_made_small_fits_a_screen():
    (note, *_) = compose(["+recipe=deepseek_v3", "+scale=smoke"]).notes
    assert "optim.lr_pieces  " in note and max(map(len, note.splitlines())) < 100


def test_deepseek_v3_routes_in_proportion():
    model = compose(["+recipe=deepseek_v3", "+scale=smoke"]).config.model
    routing = (
        model.num_moe_experts, model.moe_router_topk, model.moe_router_num_groups, model.moe_router_group_topk,
    )  # fmt: skip
    assert routing == (8, 2, 4, 2)
    assert model.moe_shared_expert_intermediate_size == model.moe_ffn_hidden_size


@pytest.mark.parametrize("recipe", recipes())
def test_a_miniature_of_axes_makes_each_axis_two_ranks_long(recipe):
    full, small = (
        compose([f"+recipe={recipe}"]).config,
        compose([f"+recipe={recipe}", "+scale=axes"], for_training=True),
    )
    plan, original = build_plan(small.config), build_plan(full, compose([f"+recipe={recipe}"]).provenance)
    assert not plan.problems
    for axis in ("pp", "vpp", "tp", "cp", "ep", "etp"):
        assert getattr(plan.sizes, axis) == min(getattr(original.sizes, axis), 2), axis
    assert plan.sizes.world <= 16
    assert set(moe_layer_pattern(small.config.model)) == set(moe_layer_pattern(full.model))
    assert small.config.parallel.sequence_parallel == full.parallel.sequence_parallel
    for key in KEPT:
        if key.partition(".")[0] == "model" and key not in ("model.num_layers", "model.moe_layer_freq"):
            assert small.config[key] == full[key], key


@pytest.mark.parametrize("scale", ["smoke", "axes"])
@pytest.mark.parametrize(
    "words",
    [
        "data.format=chat data.chat_template=chatml data.too_long=cut",
        "data.path=[notes.jsonl] data.text_key=body",
        "data.validation_path=held train.eval_interval=500 train.eval_steps=5 checkpoint.keep_best=1",
        "data.validation_split=0.1 train.eval_interval=500 train.eval_steps=5",
        "log.trace=300:303 log.gradients=300:303 log.torch_profile=400:402",
        "train.on_bad_step=rollback:100 checkpoint.keep=3",
        "pipeline.pp_batch_size=64",
        "launch.kubernetes.gpu=8",
        "cost.profile=@profile.json checkpoint.load=runs",
    ],
)
def test_a_miniature_of_a_recipe_for_production_is_accepted(scale: str, words: str, tmp_path: Path) -> None:
    lines = {"recipe": "llama3_8b", "train.steps": "1000", "checkpoint.interval": "500", "data.path": "corpus"}
    lines |= dict(word.split("=", 1) for word in words.split())
    tree = nested({key: value for key, value in lines.items() if key != "recipe"})
    recipe = tmp_path / "production.yaml"
    recipe.write_text(f"defaults: [llama3_8b, _self_]\n{yaml.safe_dump(tree)}")
    small = compose([f"+recipe={recipe}", f"+scale={scale}"])
    plan = build_plan(small.config, small.provenance)
    assert not plan.problems and plan.gradient_accumulation_steps == 1
    assert (small.config.data.path, small.config.data.validation_path, small.config.cost.profile) == (None, None, None)


NO_LIMIT = "pipeline.put_off_limit=null"


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        (("+recipe=llama3_8b", "tp=2", "cp=2"), dict(tp=2, cp=2, pp=2, dp=1)),
        (("+recipe=llama3_8b", "cp=4", "dp=2"), dict(cp=4, pp=2, dp=2)),
        (("+recipe=mixtral_8x7b", "tp=2", "etp=2"), dict(tp=2, ep=2, etp=2, dp=2)),
        (("+recipe=deepseek_v3", "tp=2", "cp=2", "etp=2"), dict(tp=2, cp=2, ep=2, etp=2, dp=1, vpp=2)),
        (
            ("+recipe=deepseek_v3", "pp=1", "vpp=1", "pipeline.pp_schedule=1f1b", NO_LIMIT, "ep=4"),
            dict(pp=1, ep=4, dp=4),
        ),
    ],
)
def test_axes_that_are_typed_are_as_typed(typed, sizes):
    composed = compose([*typed, "+scale=axes"], for_training=True)
    plan = build_plan(composed.config, composed.provenance)
    assert not plan.problems
    assert {axis: getattr(plan.sizes, axis) for axis in sizes} == sizes
    assert composed.config.parallel.sequence_parallel == (sizes.get("tp", 1) > 1 and "ep" in sizes)


def test_every_change_is_in_the_table_with_its_source():
    full, small = compose(["+recipe=deepseek_v3"]), compose(["+recipe=deepseek_v3", "+scale=smoke"])
    (table,) = [note for note in small.notes if "scale=smoke" in note]
    changed = {key for key in text_keys() if key != "scale" and full.config[key] != small.config[key]}
    assert {line.split()[0] for line in table.splitlines()[1:]} == changed
    (last,) = [note for note in small.notes if note != table]
    assert last.startswith("5 steps of 62 layers x 32 microbatches:") and last.endswith("steps=20 overrides it")
    assert {small.provenance[key] for key in changed} == {"scale=smoke"}
    assert "  model.num_moe_experts" in table
    assert "256 -> 8" in table


def test_what_is_typed_is_stronger():
    composed = compose(["+recipe=deepseek_v3", "+scale=smoke", "seq=128", "pp=4", "vpp=1", "steps=5"])
    config = composed.config
    assert (config.data.seq_length, config.train.steps) == (128, 5)
    assert config.train.global_batch_size == 8, "as many microbatches as DualPipeV needs"
    assert composed.provenance["data.seq_length"] == "command line"


def test_a_miniature_takes_so_few_steps_that_it_ends_in_minutes():
    for recipe in recipes():
        config = compose([f"+recipe={recipe}", "+scale=smoke"]).config
        work = config.model.num_layers * config.train.global_batch_size // config.train.micro_batch_size
        assert 1 <= config.train.steps <= 20 and config.train.steps * work <= 10_000
    typed = compose(["+recipe=deepseek_v3", "+scale=smoke", "steps=20"])
    assert typed.config.train.steps == 20 and "20 steps of" not in "".join(typed.notes)
    assert "20 steps of 32 layers x 8 microbatches" in "".join(compose(["+recipe=llama3_8b", "+scale=smoke"]).notes)


def test_an_unknown_scale_and_another_one_on_resume_are_refused():
    with pytest.raises(RefusedError, match=r"PP-E104.*no scale smok; did you mean smoke"):
        compose(["+scale=smok"])
    small = compose(["+scale=smoke"])
    with pytest.raises(RefusedError, match="a resumed run keeps its scale"):
        override(small.config, small.provenance, ["scale=smoke"])
