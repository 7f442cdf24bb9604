"""Conversations as transformers' own `apply_chat_template` renders and encodes them."""

import json

import pytest
from chats import EXPECTED, chat, tokenizer_directory
from transformers import PreTrainedTokenizerFast

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
