"""`ppctl generate`: the tokens of transformers' greedy search, from directories and checkpoints; and its texts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chats import CHATML, tokenizer_directory
from hugging_face_models import hugging_face_model, random_model

from ppctl.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from ppctl.model.draw import drawn
from ppctl.pretrained.generate import open_model, pieces
from ppctl.pretrained.hugging_face import import_directory

CPU = torch.device("cpu")
PROMPT = [3, 17, 5, 5, 40, 9, 1]
FOREIGN = {
    "gpt_neox": ("GPTNeoX", {}),
    "stablelm": ("StableLm", dict(num_key_value_heads=2)),
    "mamba": ("Mamba", dict(state_size=4)),
}
SMALL = dict(vocab_size=52, hidden_size=24, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)


def quiet(name: str, done: int, total: int) -> None:
    """Print no progress."""


def greedy(model, count: int = 24) -> list[int]:
    """Token after token by transformers."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(PROMPT) :].tolist()


def continued(source: Path, count: int = 24) -> list[int]:
    """Token after token by the model at `source`."""
    model, given, tokens = open_model(source, CPU, None, quiet), PROMPT, []
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model.after(torch.tensor([given])).argmax()))
        given = tokens[-1:]
    return tokens


@pytest.mark.parametrize(
    "name",
    ["llama", "llama, tied", "llama, longer as 3.1", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3, yarn", "glm4_moe"],
)
def test_a_familys_tokens_are_those_of_transformers_from_a_directory_and_from_a_checkpoint(name, tmp_path) -> None:
    model = hugging_face_model(name, initializer_range=0.6)
    model.save_pretrained(tmp_path / "hf")
    expected = greedy(model)
    assert len(set(expected)) > 1
    assert continued(tmp_path / "hf") == expected
    checkpoint = import_directory(tmp_path / "hf", tmp_path / "run", quiet).path
    assert continued(checkpoint) == expected


@pytest.mark.parametrize("name", FOREIGN)
def test_transformers_own_code_gives_its_own_tokens(name, tmp_path) -> None:
    kind, more = FOREIGN[name]
    model = random_model(kind, **SMALL, **more)
    model.save_pretrained(tmp_path)
    assert continued(tmp_path) == greedy(model)


def test_draws_follow_temperature_and_the_likeliest_words() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))
    dice = torch.Generator().manual_seed(0)

    def seen(**how: float) -> set[int]:
        return {int(drawn(logits, dice, **how)) for _ in range(400)}

    assert seen() == {0, 1, 2, 3}
    assert seen(top_k=2) == {1, 3} and seen(top_p=0.7) == {1, 3} and seen(top_p=0.4) == {1}
    assert seen(temperature=0.01) == {1}


@pytest.mark.parametrize("kind", ["bytes", "a library's"])
def test_a_character_comes_when_all_its_tokens_have(kind, tmp_path) -> None:
    tokenizer = ByteTokenizer() if kind == "bytes" else HuggingFaceTokenizer.open(tokenizer_directory(tmp_path, CHATML))
    text = "aé€\U0001f600 b"
    ids = tokenizer.encode_pieces([text], around=False)[0].ids.tolist()
    assert [piece for piece in pieces(tokenizer, ids) if piece] == list(text)
    assert "".join(pieces(tokenizer, ids[:2])) == "a\ufffd"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """A llama whose tokenizer has a chat template, and the model itself."""
    home = tokenizer_directory(tmp_path_factory.mktemp("chatting"), CHATML)
    model = hugging_face_model("llama", vocab_size=300, max_position_embeddings=256)
    model.save_pretrained(home)
    return home, model


def ppctl(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ppctl", "generate", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_continues_a_turn_of_a_conversation(chatting) -> None:
    home, model = chatting
    done = ppctl(str(home), "Hi\x1b[2J", "--chat", "--tokens", "9", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    opened = "<|im_start|>user\nHi\x1b[2J<|im_end|>\n<|im_start|>assistant\n"
    assert answer["prompt"] == opened
    ids = HuggingFaceTokenizer.open(home).encode_pieces([opened], around=False)[0].ids.tolist()
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert answer["tokens"] == found[0, len(ids) :].tolist()
    assert answer["ended"] == "limit"


def test_a_system_message_stands_before_the_turn(chatting) -> None:
    home, _ = chatting
    done = ppctl(str(home), "Hi", "--system", "Be brief.", "--tokens", "1", "--json")
    assert done.returncode == 0, done.stderr
    system = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert json.loads(done.stdout)["prompt"] == system + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_command_streams_text_whose_control_characters_are_harmless(chatting) -> None:
    home, _ = chatting
    words = [str(home), "Once", "--tokens", "60", "--temperature", "3", "--seed", "4"]
    one, two = ppctl(*words), ppctl(*words)
    assert one.returncode == 0 and one.stdout == two.stdout != ""
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in one.stdout)
    assert "\\x" in one.stdout and "38 tokens in" in one.stderr and "ended by: end of text" in one.stderr
    assert ppctl(*words[:-1], "5").stdout != one.stdout


def test_a_prompt_that_cannot_be_continued_is_refused_by_name(chatting, tmp_path) -> None:
    home, _ = chatting
    hugging_face_model("llama").save_pretrained(tmp_path)
    lacking = ppctl(str(tmp_path), "Hi")
    assert lacking.returncode == 2 and "PP-E560" in lacking.stderr and "--tokenizer" in lacking.stderr
    beyond = ppctl(str(tmp_path), "Hi", "--tokenizer", "byte")
    assert beyond.returncode == 2 and "the model has only 52 tokens" in beyond.stderr
    plain = ppctl(str(tmp_path), "Hi", "--tokenizer", "byte", "--chat")
    assert plain.returncode == 2 and "PP-E419" in plain.stderr and "--template FILE.jinja" in plain.stderr
    assert ppctl(str(home), "Hi", "--temperature", "0").returncode == 2
    assert "PP-E615" in ppctl(str(tmp_path / "nothing"), "Hi").stderr
