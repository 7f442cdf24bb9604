"""What stands against a cut is found on a miniature before anything is trained, and named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from foreign_models import FEW, config_of, model_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.errors import ConfigError
from ppctl.foreign import foreign_stage, library
from ppctl.foreign.anatomy import CannotCut, _sides, survey
from ppctl.foreign.describe import describe, main
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model, read_own_config
from ppctl.foreign.miniature_proof import drops_of, prove
from ppctl.geometry.layers import Layer


@pytest.mark.parametrize("kind", FEW)
def test_a_model_that_can_be_cut_is_proved_with_all_its_gradients(kind: str) -> None:
    proof = prove(config_of(kind))
    assert proof.stages == ("embedding", "decoder.0", "decoder.1", "decoder.2", "decoder.3", "loss")
    own = dict(make_model(config_of(kind), "meta").named_parameters())
    assert proof.gradients == len(own) + proof.anatomy.tied


def test_a_full_sized_config_becomes_a_miniature_with_all_layers() -> None:
    proof = prove(
        transformers.Qwen2Config(num_hidden_layers=10, layer_types=None, hidden_size=8192, vocab_size=150_000)
    )
    assert proof.anatomy.count == 10
    runs = "0 to decoder.1", "2 to decoder.4", "5 to decoder.6", "7 to decoder.9"
    assert proof.stages[1:-1] == tuple(f"decoder.{run}" for run in runs)


def test_sums_that_threads_divide_do_not_stand_against_a_cut() -> None:
    config = transformers.Qwen3MoeConfig(num_hidden_layers=4, num_experts=32, num_experts_per_tok=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert prove(config).anatomy.count == 4
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("words", [64, 512])
def test_a_model_of_few_words_is_proved_with_tokens_that_it_has(words: int) -> None:
    config = config_of("Llama")
    config.vocab_size = config.intermediate_size = config.max_position_embeddings = words
    assert prove(config).anatomy.count == 4
    config.attention_dropout = 0.5
    assert drops_of(config) == {"attention_dropout": 0.5}
    config.attention_dropout, config.resid_pdrop = 0.0, 0.5  # of no module
    assert drops_of(config) == {}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "keys and values that layers share": ("Gemma3nText", dict(num_hidden_layers=10, num_kv_shared_layers=5), "layer"),
    "token ids read by every layer": ("Gemma4Text", {}, "model.layers.0"),
    "weights that layers share": ("Zamba2", {}, "is the same parameter as"),
    "several states in one": (
        "DeepseekV4",
        dict(num_hidden_layers=4),
        r"return \[2, 4, 4, 64\] for 2 x 4 tokens, but a message",
    ),
    "weights around all layers": ("XLNet", dict(n_layer=2), "transformer.mask_emb: weights of the module around"),
    "layers that are no modules": ("XLM", dict(n_layers=2), "the candidates are transformer.attentions of 2, "),
    "two stacks of layers": ("HrmText", {}, "the candidates are model.L_module.layers of 16, model.H_module.layers"),
    "sizes of which no model is made": ("Nemotron", {}, r"cannot build a model from this.*\(__init__ in modeling_nemo"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_cut_cannot_carry_is_named(case: str) -> None:
    kind, sizes, named = REFUSED[case]
    with pytest.raises(CannotCut, match=named):
        prove(getattr(transformers, f"{kind}Config")(**sizes))


@pytest.mark.parametrize(
    ("order", "wrong"), [([0, 1], 2), ([0, 2, 1], 1), ([0, 2], 1), ([0, 1, 1, 2], 1), ([0, 1, 2, 0], 0), ([], 0)]
)
def test_a_layer_that_is_left_out_swapped_or_called_again_is_named(order: list[str | int], wrong: int) -> None:
    with pytest.raises(CannotCut, match=f"layers.{wrong} is not called exactly once, after the layers before it"):
        _sides({}, order, 3, "layers")


class _Draws(nn.Module):
    """A layer that adds noise in training."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: torch.Tensor, **named: Any) -> torch.Tensor:
        result: torch.Tensor = self.layer(state, **named) + 0.1 * torch.randn_like(state)
        return result


def test_random_draws_in_a_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = library._transformers().LlamaForCausalLM

    class Noisy(made):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = nn.ModuleList(map(_Draws, self.model.layers))

    monkeypatch.setitem(
        transformers.AutoModelForCausalLM._model_mapping._extra_content, transformers.LlamaConfig, Noisy
    )
    with pytest.raises(CannotCut, match=r"model\.layers\.0 draws random numbers"):
        prove(config_of("Llama"))


NEWLY: dict[str, tuple[str, dict[str, Any]]] = {
    "layers that return a list": ("OpenAIGPT", dict(n_layer=3, attn_pdrop=0.1)),
    "fewer layers than num_hidden_layers": ("LongcatFlash", dict(num_layers=3)),
    "biases with two names in one part": ("Bert", dict(num_hidden_layers=3, is_decoder=True)),
    "a padding token that the code compares with": ("Roberta", dict(num_hidden_layers=3, is_decoder=True)),
    "a token that has to be a number": ("Cwm", dict(num_hidden_layers=3)),
    "heads of a state space that fill the stream": ("Mamba2", dict(num_hidden_layers=3)),
    "the same beside attention": ("Bamba", dict(num_hidden_layers=3, attn_layer_indices=[1])),
    "a width of its own for the state space": ("FalconH1", dict(num_hidden_layers=3)),
    "no heads at all": ("Rwkv", dict(num_hidden_layers=3)),
    "heads of linear attention": ("KimiLinear", dict(num_hidden_layers=3)),
    "sizes in configs within the config": (
        "Dbrx",
        dict(n_layers=3, attn_config=dict(rope_theta=5e5, kv_n_heads=8, clip_qkv=8.0)),
    ),
}


@pytest.mark.parametrize("case", NEWLY)
def test_the_librarys_own_sizes_become_a_miniature_and_are_proved(case: str) -> None:
    kind, sizes = NEWLY[case]
    assert prove(getattr(transformers, f"{kind}Config")(**sizes)).anatomy.count == 3


def test_a_buffer_that_is_not_made_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_stage, "_make_buffers", lambda *_: None)
    with pytest.raises(CannotCut, match=r"model\.layers\.0: with the same hidden state before it"):
        prove(config_of("Llama"))


def test_what_routers_record_reaches_the_models_own_loss_over_all_layers() -> None:
    assert prove(config_of("Mixtral balanced")).anatomy.routers == (1, 1, 1, 1)
    assert prove(config_of("Mixtral")).anatomy.routers == ()


def _nothing_arrives(stage: ForeignStage) -> None:
    stage._arrived_logits = ()


def _zeros_arrive(stage: ForeignStage) -> None:
    stage._arrived_logits = [torch.zeros_like(each) for each in stage._arrived_logits]


def _no_gradient_goes_back(stage: ForeignStage) -> None:
    stage._arrived_logits = [each.detach() + 0 * each for each in stage._arrived_logits]


def _one_arrives_for_all(stage: ForeignStage) -> None:
    """Another order of them would not do: their mean may have the same bits."""
    stage._arrived_logits = [*stage._arrived_logits[:1]] * len(stage._arrived_logits)


PLANTED = {
    _nothing_arrives: "lm_head or a later layer reads something from another stage",
    _zeros_arrive: "lm_head: with all hidden states .* what the model's own code adds to the loss differs",
    _no_gradient_goes_back: r"its gradient differs",
    _one_arrives_for_all: r"differs",
}


@pytest.mark.parametrize("plant", PLANTED)
def test_an_error_in_what_a_hop_carries_for_that_loss_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    unaltered = ForeignStage._called

    def altered(stage: ForeignStage, *called: Any) -> Any:
        plant(stage)
        return unaltered(stage, *called)

    monkeypatch.setattr(ForeignStage, "_called", altered)
    with pytest.raises(CannotCut, match=PLANTED[plant]):
        prove(config_of("Mixtral balanced"))


class _Remembers(nn.Module):
    """A layer that hands something on beside its hidden state, by way of the model."""

    def __init__(self, layer: nn.Module, model: Any) -> None:
        super().__init__()
        self.layer, self.model = layer, [model]

    def forward(self, state: torch.Tensor, **named: Any) -> torch.Tensor:
        (model,) = self.model
        before = getattr(model, "seen", 0.0)
        model.seen = state.detach().mean()
        result: torch.Tensor = self.layer(state, **named) + 0.1 * before
        return result


def test_state_that_bypasses_the_hop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = library._transformers().LlamaForCausalLM

    class Bypass(made):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.layers = nn.ModuleList(_Remembers(layer, self.model) for layer in self.model.layers)

        def forward(self, *arguments: Any, **named: Any) -> Any:
            self.model.seen = 0.0
            return super().forward(*arguments, **named)

    monkeypatch.setitem(
        transformers.AutoModelForCausalLM._model_mapping._extra_content, transformers.LlamaConfig, Bypass
    )
    with pytest.raises(CannotCut, match=r"model\.layers\.1: with the same hidden state before it"):
        prove(config_of("Llama"))


def test_modules_of_other_stages_have_shapes_and_no_memory() -> None:
    config = config_of("Llama")
    proof = prove(config)
    held = ForeignStage(make_model(config, "meta"), proof.anatomy, [Layer("decoder", 1)])
    stand_ins = [each for module in held.model.modules() for each in vars(module).values() if isinstance(each, Tensor)]
    assert {each.untyped_storage().nbytes() for each in stand_ins} == {4}
    shapes = [tuple(each.shape) for name, each in model_of("Llama").state_dict().items() if ".layers.1." not in name]
    assert sorted(tuple(each.shape) for each in stand_ins) == sorted(shapes)
    assert {name for name, _ in held.model.named_parameters()} == set(held.canonical_parameters())
    assert set(held.canonical_parameters()) == set(held.parameter_rows())
    assert all(name.startswith("model.layers.1.") for name in held.canonical_parameters())


def directory(where: Path, config: Any) -> Path:
    config.save_pretrained(where)
    return where


def test_a_model_that_cannot_be_cut_is_an_error_with_a_code(tmp_path: Path) -> None:
    out = tmp_path / "answer.json"
    assert main([str(directory(tmp_path, transformers.Zamba2Config())), str(out)]) == 0
    assert [problem["code"] for problem in json.loads(out.read_text())["problems"]] == ["PP-E528"]


@pytest.mark.parametrize(
    ("kind", "words"), [("T5", "has an encoder"), ("Bert", "no causal language model"), ("Llava", "several modalities")]
)
def test_what_is_no_language_model_alone_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_own_config(directory(tmp_path, getattr(transformers, f"{kind}Config")()))
    assert [problem.code for problem in caught.value.problems] == ["PP-E527"]


WRONG: dict[str, tuple[str, str, str]] = {
    "hidden_size=text": ("'hidden_size' expected int, got str", "24", ""),
    "hidden_size=2.5": ("'hidden_size' expected int, got float", "24", ""),
    "hidden_size=true": ("'hidden_size' expected int, got bool", "24", ""),
    "tie_word_embeddings=maybe": ("expected bool, got str (value: 'maybe')", "true", ""),
    "rms_norm_eps=NaN": ("expected float, got str (value: 'NaN')", "1e-06", ""),
    "rms_norm_eps=1e999": ("expected float, got str (value: '1e999')", "1e-06", ""),
    "layer_types=[a,b]": ("expected a list, got str", "", ""),
    "is_encoder_decoder=False": ("takes no text such as 'False'", "false", ""),
    "hiden_size=3": ("no such field; did you mean hidden_size", "3", "hidden_size"),
    "nothing=3": ("no such field", "", ""),
}
"""Field and value -> words of the message; and where it can be typed the remedy's value, and its field if another."""


@pytest.mark.parametrize("typed", WRONG)
def test_an_override_that_cannot_be_is_named_with_a_value_that_can(tmp_path: Path, typed: str) -> None:
    where, (words, value, other) = directory(tmp_path, config_of("Gemma2")), WRONG[typed]
    field, _, text = typed.partition("=")
    with pytest.raises(ConfigError) as caught:
        read_own_config(where, {field: text})
    (problem,) = caught.value.problems
    assert problem.code == "PP-E552" and words in problem.message
    assert problem.message.startswith(f"model.hf_overrides.{field}: ")
    if value:
        assert problem.remedy == f"model.hf_overrides.{other or field}={value}"
        read_own_config(where, {} if other else {field: value})


def test_a_dtype_is_no_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype: has no effect") as caught:
        read_own_config(directory(tmp_path, config_of("Gemma2")), {"dtype": "float77"})
    assert caught.value.problems[0].remedy == "parallel.bf16=true"


def test_overrides_that_are_right_are_taken(tmp_path: Path) -> None:
    where = directory(tmp_path, config_of("Gemma2"))
    typed = {"attn_logit_softcapping": "null", "rms_norm_eps": "1", "sliding_window": "7"}
    found = read_own_config(where, typed)
    assert (found.attn_logit_softcapping, found.rms_norm_eps, found.sliding_window) == (None, 1, 7)


def test_fields_that_do_not_fit_each_other_are_said_with_their_values(tmp_path: Path) -> None:
    where = directory(tmp_path, config_of("Gemma2"))
    with pytest.raises(ConfigError, match=r"with model\.hf_overrides\.num_attention_heads=3 cannot be cut"):
        describe(where, {"num_attention_heads": "3"})


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("Roberta", "model.hf_overrides.is_decoder=true"),
        ("Llama4", "save_pretrained(argv[2])' {0} {0}-text"),
        ("Phi4Multimodal", "a directory with"),
    ],
)
def test_the_way_from_what_is_refused_to_a_language_model_is_told(tmp_path: Path, kind: str, remedy: str) -> None:
    where = directory(tmp_path / kind, getattr(transformers, f"{kind}Config")())
    with pytest.raises(ConfigError) as caught:
        read_own_config(where)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E527"
    assert remedy.format(where) in problem.remedy


def test_a_config_that_the_library_itself_refuses_is_a_problem_with_its_reason(tmp_path: Path) -> None:
    where = directory(tmp_path, config_of("Llama"))
    text = (where / "config.json").read_text()
    (where / "config.json").write_text(text.replace('"num_hidden_layers": 4', '"num_hidden_layers": "four"'))
    with pytest.raises(ConfigError, match=r"does not read its config: .*num_hidden_layers") as caught:
        read_own_config(where)
    assert [problem.code for problem in caught.value.problems] == ["PP-E527"]


def test_without_transformers_there_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = directory(tmp_path, config_of("Llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"ppctl\[transformers\]") as caught:
        read_own_config(where)
    assert [problem.code for problem in caught.value.problems] == ["PP-E526"]


def test_an_old_transformers_is_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = directory(tmp_path, config_of("Llama"))
    # Not the name at the top: the library takes another module's place when it first makes a model.
    monkeypatch.setattr(library._transformers(), "__version__", "4.57.1")
    with pytest.raises(ConfigError, match=r"PP-E526.*is 4\.57\.1 here: version 5 or later"):
        read_own_config(where)


class _Reads(TorchDispatchMode):
    """Refuses what a host waits for on a GPU: operations that read a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["Llama", "Gemma2", "Mixtral"])
def test_no_forward_and_no_backward_of_a_stage_reads_a_value(kind: str) -> None:
    blank, layers = make_model(config_of(kind), "meta").train(), [Layer("embedding"), Layer("decoder", 0)]
    found = ForeignStage(blank, survey(model_of(kind)), layers)
    with torch.no_grad():
        for parameter in found.canonical_parameters().values():
            parameter.fill_(0.1)
    with _Reads():
        (state,) = found(torch.arange(24).view(2, 12))
        state.sum().backward()
