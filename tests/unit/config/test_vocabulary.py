"""Where the vocabulary comes from: the tokenizer, unless something sets it; rounded as Megatron does; and said."""

import pytest

from ppctl.cli.plan_text import blocks
from ppctl.config.compose import compose
from ppctl.errors import ConfigError, DataError, Problem
from ppctl.launch.planning import planned

LLAMA = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8"


def count(tokenizer: str) -> int:
    if tokenizer == "missing":
        raise DataError(Problem("PP-E410", "data.tokenizer=missing: No such file"))
    return {"llama": 128_256, "words": 1000}[tokenizer]


def rows(*typed: str, **options) -> tuple[int, str, tuple[str, ...]]:
    composed = compose(typed, count_tokens=count, **options)
    return composed.config.model.vocab_size, composed.provenance["model.vocab_size"], composed.notes


@pytest.mark.parametrize(
    ("typed", "expected", "source"),
    [
        ("data.tokenizer=llama", 128_256, "derived: data.tokenizer=llama has 128,256 tokens"),
        ("data.tokenizer=llama model.vocab_size=5", 5, "command line"),
        ("data.tokenizer=llama model=llama2_7b", 32_000, "conf/model/llama2_7b.yaml"),
        ("data.tokenizer=words recipe=llama3_8b scale=smoke", 1000, "derived: data.tokenizer=words has"),
        ("data.tokenizer=words --make-vocab-size-divisible-by 128", 1024, "make_vocab_size_divisible_by 128 x tp 1"),
        ("data.tokenizer=llama --make-vocab-size-divisible-by 128 tp=8", 129_024, "128 x tp 8"),
        ("model.vocab_size=50257 --make-vocab-size-divisible-by 128", 50_304, "50,257 (command line), rounded up"),
        ("model.vocab_size=256 --make-vocab-size-divisible-by 128", 256, "command line"),
        ("tp=7", 320, "default"),
        ("data.tokenizer=${log.name} log.name=llama", 128_256, "derived: data.tokenizer=llama has 128,256 tokens"),
        ("model.vocab_size=5e4 model.make_vocab_size_divisible_by=128", 50_048, "50,000 (command line), rounded up"),
        ("model.make_vocab_size_divisible_by=${data.seq_length} data.seq_length=512", 512, "divisible_by 512 x tp 1"),
    ],
)
def test_the_vocabulary_is_the_tokenizers_unless_it_is_set_and_is_rounded(typed, expected, source) -> None:
    found, provenance, notes = rows(*typed.split())
    assert found == expected
    assert source in provenance
    assert not [note for note in notes if "vocabulary" in note]


def test_data_without_a_tokenizer_or_a_vocabulary_is_noted() -> None:
    _, _, notes = rows("data.path=x")
    assert "neither data.tokenizer nor model.vocab_size is: the vocabulary is 320" in notes[0]
    assert rows("data.path=x", "model.vocab_size=500")[2] == ()


def test_a_tokenizer_that_is_not_here_is_noted_in_a_plan_and_refused_for_training() -> None:
    found, _, notes = rows("data.tokenizer=missing")
    assert found == 320
    assert "stays 320, because data.tokenizer=missing: No such file; model.vocab_size=N sets it" in notes[0]
    with pytest.raises(ConfigError, match="PP-E410"):
        rows("data.tokenizer=missing", for_training=True)


def test_a_ported_command_line_plans_the_model_of_its_tokenizer(tmp_path) -> None:
    """Llama 3's sizes with a tokenizer of 128,256 tokens: 8.03 B parameters, and the plan's text says why."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({str(n): n for n in range(128_256)})).save(str(tmp_path / "tokenizer.json"))
    composed, plan, problems = planned([*LLAMA.split(), f"data.tokenizer={tmp_path}"])
    assert (problems, plan and plan.params_total) == ([], 8_030_261_248)
    assert composed is not None and plan is not None
    line = blocks(plan, composed.config, 1000)[0].splitlines()[1]
    assert line == f"vocabulary 128,256 (data.tokenizer={tmp_path} has 128,256 tokens)"
