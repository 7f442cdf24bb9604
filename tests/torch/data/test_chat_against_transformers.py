"""Conversations as transformers' own `apply_chat_template` renders and encodes them."""

import json

import pytest
from chats import EXPECTED, chat, tokenizer_directory
from transformers import PreTrainedTokenizerFast

from ppctl.cli.main import main
from ppctl.data.chat_template import open_template
from ppctl.data.conversations import encode_conversations
from ppctl.data.load import load_tokenizer


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_and_generated_parts_are_those_of_transformers(tmp_path, name):
    template, turns, _ = EXPECTED[name]
    home = tokenizer_directory(tmp_path, template)
    messages = chat(*turns)["messages"]
    (home / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    found = encode_conversations([home / "chat.jsonl"], load_tokenizer(str(home)), open_template(str(home), None))
    (one,) = found
    says = "generation %}" in template
    library = PreTrainedTokenizerFast.from_pretrained(home)
    theirs = library.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=says)
    assert one.tokens.tolist() == theirs["input_ids"]
    if says:
        assert one.learned.astype(int).tolist() == theirs["assistant_masks"]


ENDS_IN_A_BLANK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT: {% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}USER: {{ m.content }} {% endif %}{% endfor %}"
)


def test_a_token_that_begins_before_the_generated_part_is_learned_as_in_transformers(tmp_path, capsys):
    home = tokenizer_directory(tmp_path, ENDS_IN_A_BLANK)
    merging = json.loads((home / "tokenizer.json").read_text())
    merging["model"]["merges"] = [["\u0120", "H"]]
    merging["model"]["vocab"]["\u0120H"] = len(merging["model"]["vocab"]) + len(merging["added_tokens"])
    (home / "tokenizer.json").write_text(json.dumps(merging))
    messages = chat(("user", "a"), ("assistant", "Hi"), ("user", "b"), ("assistant", "Ha"))["messages"]
    (home / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    (one,) = encode_conversations([home / "chat.jsonl"], load_tokenizer(str(home)), open_template(str(home), None))
    library = PreTrainedTokenizerFast.from_pretrained(home)
    theirs = library.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert one.tokens.tolist() == theirs["input_ids"]
    assert one.learned.astype(int).tolist() == theirs["assistant_masks"]
    assert [text for learned, text in one.runs() if learned] == [" Hi", " Ha"] and one.early == 2
    assert main(["data", "show", str(home / "chat.jsonl"), "--format", "chat", "--tokenizer", str(home)]) == 0
    assert "2 of the learned ones begin before the answer and end in it" in capsys.readouterr().out
