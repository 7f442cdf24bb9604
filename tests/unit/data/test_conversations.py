"""Which tokens of a conversation are learned, token by token, for templates with and without the keyword."""

import json
import re
from functools import partial

import numpy as np
import pytest
from chats import CHATML, CHATML_SAYS, EXPECTED, MISTRAL, TALK, THINKS, WITH_SYSTEM, chat, tokenizer_directory
from tokenizers import Tokenizer, processors

from ppctl.config.schema import DataConfig
from ppctl.data import chat_template
from ppctl.data.chat_template import open_template
from ppctl.data.conversation_rows import packed
from ppctl.data.conversations import encode_conversations
from ppctl.data.load import load_data, load_tokenizer
from ppctl.data.prompts import make_prompt
from ppctl.errors import DataError


@pytest.fixture
def directory(tmp_path):
    return partial(tokenizer_directory, tmp_path)


def lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def encoded(directory, *values, form="chat", tokenizer=None):
    name = tokenizer or str(directory)
    template = open_template(name, None) if form == "chat" else None
    return list(encode_conversations([lines(directory / "data.jsonl", *values)], load_tokenizer(name), template))


def refused(directory, *values, **named):
    with pytest.raises(DataError) as caught:
        encoded(directory, *values, **named)
    return caught.value.problems


def by_hand(text):
    tokens, learned, now = [], [], False
    for word in text.split(" "):
        if word in ("+", "-"):
            now = word == "+"
        else:
            tokens.append(" " if word == "_" else word)
            learned.append(now)
    return tokens, learned


@pytest.mark.parametrize("name", EXPECTED)
def test_the_tokens_that_are_learned_one_by_one(directory, name):
    template, turns, expected = EXPECTED[name]
    home = directory(template)
    (one,) = encoded(home, chat(*turns))
    pieces = [one.text[b:e] for b, e in zip(one.begins, [*one.begins[1:], len(one.text)], strict=True)]
    assert (pieces, one.learned.tolist()) == by_hand(expected)


def test_sharegpt_and_templates_in_settings_mean_the_same(directory):
    ours = encoded(directory(CHATML), chat(*WITH_SYSTEM))[0]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    theirs = {"conversations": [{"from": names[role], "value": content} for role, content in WITH_SYSTEM]}
    home = directory(
        None, chat_template=[{"name": "tool_use", "template": ""}, {"name": "default", "template": CHATML}]
    )
    (home / "chat_template.jinja").unlink()
    again = encoded(home, theirs)[0]
    assert ours.tokens.tolist() == again.tokens.tolist() and ours.learned.tolist() == again.learned.tolist()


@pytest.mark.parametrize(("tokenizer", "begin"), [("byte", []), (None, ["<s>"])])
def test_of_a_prompt_with_its_completion_the_completion_and_an_end_are_learned(directory, tokenizer, begin):
    home = directory(None)
    (one,) = encoded(home, {"prompt": "é =", "completion": " a"}, form="completion", tokenizer=tokenizer)
    prompt = len(begin) + 4  # é is two bytes
    assert one.learned.tolist() == [False] * prompt + [True] * 3
    assert one.tokens[-1] == load_tokenizer(tokenizer or str(home)).eos
    assert one.runs() == [(False, "é ="), (True, " a<end>")]


def processed(home, after):
    """The tokenizer's directory, with another post-processor."""
    library = Tokenizer.from_file(str(home / "tokenizer.json"))
    library.post_processor = after
    library.save(str(home / "tokenizer.json"))
    return home


@pytest.mark.parametrize("template", [None, CHATML_SAYS, CHATML])
def test_spaces_of_an_answer_are_learned_although_the_tokenizer_leaves_them_out_of_positions(directory, template):
    answer = "  if x:\n     y  "
    line = (
        {"prompt": "code: ", "completion": answer} if template is None else chat(("user", "a"), ("assistant", answer))
    )
    form = "completion" if template is None else "chat"
    (whole,) = encoded(processed(directory(template), processors.ByteLevel(trim_offsets=False)), line, form=form)
    (trimmed,) = encoded(processed(directory(template), processors.ByteLevel()), line, form=form)
    assert trimmed.learned.tolist() == whole.learned.tolist() and trimmed.runs() == whole.runs()
    assert any(learned and answer in text for learned, text in whole.runs())


BOTH = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)])


@pytest.mark.parametrize("after", [BOTH, processors.Sequence([processors.ByteLevel(), BOTH])])
def test_an_end_that_the_tokenizer_adds_itself_is_learned_of_a_completion_and_ends_no_prompt(directory, after):
    home = processed(directory(None), after)
    (one,) = encoded(home, {"prompt": "a = ", "completion": "b "}, form="completion")
    tokenizer = load_tokenizer(str(home))
    assert one.tokens[[0, -1]].tolist() == [256, tokenizer.eos] and one.tokens.tolist().count(257) == 1
    assert one.learned.tolist() == [False] * 5 + [True] * 3
    assert one.runs() == [(False, "a = "), (True, "b <end>")]
    for text in ("a = ", ""):
        prompt = make_prompt(text, tokenizer, None).tokens
        assert prompt[0] == 256 and len(prompt) == 1 + len(text) and 257 not in prompt
    assert make_prompt("a</s>", tokenizer, None).tokens[-1] == 257  # somebody wrote it


BAD = {
    "no messages": ({"text": "a"}, CHATML, "PP-E418", "but an object of text"),
    "an empty list": (chat(), CHATML, "PP-E418", "but a list that is empty or has other values there"),
    "no content": (chat(("user", None), ("assistant", "a")), CHATML, "PP-E418", "but messages without"),
    "content of numbers": (chat(("user", "a"), ("assistant", [1])), CHATML, "PP-E418", 'messages with a "content"'),
    "half a pair": (chat(("user", "a"), ("assistant", "\ud83d")), CHATML, "PP-E411", "not UTF-8 text: surrogates"),
    "no role": ({"messages": [{"content": "a"}]}, CHATML, "PP-E418", 'messages with a "role"'),
    "tools that are no list": (
        chat(*TALK, tools={"name": "f"}),
        CHATML,
        "PP-E418",
        'JSON under "tools" (data.format=chat) but an object there',
    ),
    "tools of text": (
        chat(*TALK, tools=["f"]),
        CHATML,
        "PP-E418",
        'JSON under "tools" (data.format=chat) but a list that',
    ),
    "tools that are no JSON": (
        chat(*TALK, tools="f"),
        CHATML,
        "PP-E418",
        'JSON under "tools" (data.format=chat) but text there',
    ),
    "nothing learned": (chat(("user", "a")), CHATML, "PP-E422", "without an assistant turn"),
    "no prefix": (chat(*TALK), THINKS, "PP-E420", "writes earlier turns differently when others follow"),
    "refused": (chat(*WITH_SYSTEM), MISTRAL, "PP-E420", "there is no system role"),
    "a clock": (chat(*TALK), "{{ strftime_now('%d') }}", "PP-E420", "data must not depend on the day"),
    "no template": (chat(*TALK), None, "PP-E419", "has no chat template"),
    "no Jinja": (chat(*TALK), "{% for %}", "PP-E419", "Jinja cannot read the chat template"),
    "a break": (chat(*TALK), "{% break %}", "PP-E419", "'break' outside loop"),
    "a long number": (chat(*TALK), "{{ " + "9" * 6000 + " }}", "PP-E419", "4300 digits"),
    "chance": (chat(*TALK), "{{ messages | random }}", "PP-E419", "No filter named 'random'"),
    "chance in texts": (chat(*TALK), "{{ lipsum() }}", "PP-E420", "'lipsum' is undefined"),
    "marks": (chat(("user", "\ufdd0"), ("assistant", "a")), CHATML, "PP-E420", "which are no characters"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_learned_from_is_refused_by_name(directory, kind):
    value, template, code, said = BAD[kind]
    (problem,) = refused(directory(template), value)
    assert problem.code == code and said in problem.message


@pytest.mark.parametrize("named", [True, False])
def test_a_template_that_is_no_text_is_refused_by_its_file(directory, named):
    home = directory(CHATML, chat_template=CHATML)
    (home / "chat_template.jinja").write_bytes(b"{{ \xff }}")
    with pytest.raises(DataError, match="cannot be read: 'utf-8' codec can't decode byte 0xff in position 3") as caught:
        open_template(str(home), str(home / "chat_template.jinja") if named else None)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E419" and problem.place == str(home / "chat_template.jinja")
    assert problem.remedy == ("data.chat_template=null" if named else "data.chat_template=FILE.jinja")


@pytest.mark.parametrize(("key", "code"), [("tokenizer", "PP-E410"), ("chat_template", "PP-E419")])
def test_the_home_of_nobody_is_a_directory_that_is_not_there(directory, key, code):
    data = config(directory(CHATML), chat(*TALK), **{key: "~nobody-has-this-name/a"})
    with pytest.raises(DataError, match=f"{code}: .*~nobody-has-this-name/a.* No such file"):
        load_data(data)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_that_does_not_end_is_refused(directory, monkeypatch, template):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    (problem,) = refused(directory(template), chat(*TALK))
    assert problem.code == "PP-E420" and "it takes more than 0.2 s" in problem.message


DOUBLED = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = EACH %}{% endfor %}{{ n.x }}"
LONG = {
    "a sum": DOUBLED.replace("EACH", "n.x + n.x"),
    "a tilde": DOUBLED.replace("EACH", "n.x ~ n.x"),
    "a product": "{{ 'ab' * 10 ** 10 }}",
    "a product of lists": "{{ [1] * 10 ** 10 }}",
    "a replacement": DOUBLED.replace("EACH", "n.x|replace('a', n.x)"),
    "a method": DOUBLED.replace("EACH", "n.x.replace('a', n.x)"),
    "a width": "{{ 'a'|center(10 ** 10) }}",
    "a width in a format": "{{ '%9999999999d' % 1 }}",
    "a width in braces": "{{ '{:>9999999999}'.format('a') }}",
    "a filled text": "{{ 'a'.ljust(10 ** 10) }}",
    "an indent": "{{ 'a\nb'|indent(10 ** 10) }}",
    "joined": DOUBLED.replace("EACH", "[n.x, n.x]|join(n.x)"),
    "joined by a method": DOUBLED.replace("EACH", "n.x.join([n.x, n.x])"),
    "a block": DOUBLED.replace("{% set n.x = EACH %}", "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "lists in lists": DOUBLED.replace("EACH", "[n.x, n.x]"),
    "lists as JSON": DOUBLED.replace("EACH", "[n.x, n.x]").replace("{{ n.x }}", "{{ n.x|tojson }}"),
    "lists as a text": DOUBLED.replace("EACH", "[n.x, n.x]").replace("{{ n.x }}", "{{ '%s' % n.x }}"),
    "loops that put out": "{% set x = 'a' * 9999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
}


@pytest.mark.parametrize("kind", LONG)
def test_a_template_that_fills_the_memory_is_refused(directory, monkeypatch, kind):
    monkeypatch.setattr(chat_template, "MEMORY", 2**27)
    (problem,) = refused(directory(LONG[kind]), chat(*TALK))
    assert problem.code == "PP-E420" and re.search("more than (128 MiB|16,777,216 characters)", problem.message)


@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler('a', 'b') }}",
        "{{ joiner(',')|string }}",
        "{{ 'x' ~ raise_exception }}",
        "{{ '%s' % ([{'a': joiner()}],) }}",
        "{{ '{}'.format(messages[0].items) }}",
        "{{ messages|map(attribute='role') }}",
        "{{ [messages[0].get]|join }}",
    ],
)
def test_a_template_puts_no_places_in_memory_into_the_data(directory, template):
    (problem,) = refused(directory(template), chat(*TALK))
    assert problem.code == "PP-E420" and "a place in memory" in problem.message


def test_what_templates_do_every_day_stays(directory):
    template = (
        "{% set c = cycler('1', '2') %}{% set j = joiner(',') %}{% set ns = namespace(n=0) %}"
        "{% for m in messages %}{{ j() }}{{ c.next() }}{{ m['role']|default(loop.index0, true)|upper }}"
        "{{ m.keys()|list }}{{ m|tojson }}{{ missing|default('') }}{{ loop.last }}{{ 2 ** 3 * 1.5 - 1 }}"
        "{{ '%05.1f' % 2 }}"
        "{{ 2.5|round(1, 'floor') }}{{ none }}{{ [m.role, 1]|join('-') }}{{ messages|map(attribute='role')|join }}"
        "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ messages[0].items() }}{{ range(2)|list }}{{ tools }}"
    )
    text = open_template(str(directory(template)), None).render([{"role": "user", "content": "a"}] * 2)[0]
    once = 'USER[\'role\', \'content\']{"role": "user", "content": "a"}'
    assert text.startswith(f"1{once}False11.0002.02.5Noneuser-1useruser,2{once}True")
    assert text.endswith("2dict_items([('role', 'user'), ('content', 'a')])[0, 1]None")


def test_loops_that_are_counted_know_where_they_are(directory):
    template = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% else %}-"
        "{% endfor %}{% for m in messages[::-1] %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (one,) = encoded(directory(template), chat(("user", "a"), ("assistant", "b"), ("user", "c")))
    assert one.text == "1/2False2/2Truecba"


def test_a_turn_that_calls_a_tool_needs_no_content(directory):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    template = CHATML.replace("{{ m.content }}", "{{ m.content or 'calls' }}")
    (one,) = encoded(directory(template), {"messages": [{"role": "user", "content": "a"}, calls]})
    assert (True, "calls<|im_end|>\n") in one.runs()


@pytest.mark.parametrize("tools", [[{"name": "f"}], []])
def test_tools_as_text_are_the_list_that_the_text_writes(directory, tools):
    home = directory("{{ tools|length }}{% for t in tools %}{{ t.name }}{% endfor %}" + CHATML)
    listed, text = encoded(home, chat(*TALK, tools=tools), chat(*TALK, tools=json.dumps(tools)))
    assert listed.text == text.text and text.text.startswith(f"{len(tools)}{'f' if tools else ''}<|im_start|>")


def test_a_line_that_is_no_json_is_shown_one_of_its_format(directory):
    home = directory(CHATML)
    (home / "data.jsonl").write_text("{not json\n")
    with pytest.raises(DataError) as caught:
        list(encode_conversations([home / "data.jsonl"], load_tokenizer(str(home)), open_template(str(home), None)))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E403" and json.loads(problem.remedy or "")["messages"]


def test_a_template_that_writes_nothing_leaves_nothing_to_show(directory):
    (one,) = encoded(directory(""), chat(*TALK))
    assert not len(one.tokens) and one.runs() == []


def test_one_wrong_form_is_one_message(directory):
    (problem,) = refused(directory(CHATML), *[{"text": "a"}] * 30)
    assert problem.code == "PP-E418" and problem.place.endswith("data.jsonl:5\nand 15 or more")


def config(home, *values, **changes):
    path = lines(home / "data.jsonl", *values)
    return DataConfig(**{"path": str(path), "tokenizer": str(home), "format": "chat"} | changes)


def test_a_row_is_one_conversation_and_what_fills_it_does_not_count(directory):
    home = directory(MISTRAL)
    rows = load_data(config(home, chat(*TALK), chat(*TALK[:2]), seq_length=30)).training
    ids = np.array([[1], [0]])
    windows, details = rows.samples(ids, 30), rows.details(ids, 30)
    short = encoded(home, chat(*TALK[:2]))[0]
    n = len(short.tokens)
    eos = load_tokenizer(str(home)).eos
    assert windows[0, 0].tolist() == [*short.tokens.tolist(), *[eos] * (31 - n)]
    assert details.counts[0, 0].tolist() == [*short.learned[1:].tolist(), *[False] * (31 - n)]
    assert details.places[0, 0].tolist() == [*range(n), *range(30 - n)]
    assert details.counts[1, 0].sum() == encoded(home, chat(*TALK))[0].learned.sum()


def test_packed_rows_hold_whole_conversations_each_once_and_none_foretells_the_next(directory):
    home = directory(MISTRAL)
    many = [chat(("user", "q" * (n % 5)), ("assistant", "a" * (1 + n % 7))) for n in range(40)]
    packing = dict(pack=True, reset_position_ids=True, reset_attention_mask=True)
    rows = load_data(config(home, *many, seq_length=40, **packing)).training.corpora[0]
    assert sorted(n for row in rows.rows for n in row) == list(range(40)) and len(rows.rows) < 20
    learned = 0
    for number, row in enumerate(rows.rows):
        details = rows.details(np.array(number), 40)
        window = rows.samples(np.array(number), 40)
        bounds = [*np.flatnonzero(details.places == 0), 40]
        assert len(bounds) >= len(row) + 1
        for one, begin in zip(row, bounds, strict=False):
            expected = encoded(home, many[one])[0]
            end = min(begin + len(expected.tokens), 41)
            assert window[begin:end].tolist() == expected.tokens[: end - begin].tolist()
            assert details.counts[begin : end - 1].tolist() == expected.learned[1 : end - begin].tolist()
            assert end == 41 or not details.counts[end - 1]
        learned += details.counts.sum()
    assert learned == sum(one.learned.sum() for one in encoded(home, *many))


def test_packing_is_best_fit_the_longest_first():
    assert packed([3, 9, 4, 6, 1], 10) == [[0], [1, 4], [2, 3]]
    assert packed([10, 10], 10) == [[0], [1]]


@pytest.mark.parametrize(("too_long", "left"), [("cut", [0, 1]), ("leave_out", [1]), ("refuse", None)])
def test_a_conversation_longer_than_a_row_is_refused_cut_or_left_out(directory, too_long, left):
    home = directory(MISTRAL)
    data = config(home, chat(("user", "a"), ("assistant", "b" * 50)), chat(*TALK[:2]), seq_length=20, too_long=too_long)
    if left is None:
        with pytest.raises(DataError) as caught:
            load_data(data)
        (problem,) = caught.value.problems
        assert problem.code == "PP-E421" and problem.remedy == "data.seq_length=57"
        data.seq_length = 57
        assert len(load_data(data).training.corpora[0].rows) == 2
        return
    rows = load_data(data).training.corpora[0]
    assert len(rows.rows) == len(left)
    assert rows.samples(np.array(0), 20)[-2] == (ord("b") - ord("!") if too_long == "cut" else rows.filling)


def test_the_digest_names_tokens_what_is_learned_and_rows(directory):
    home = directory(CHATML)
    digests = {load_data(config(home, chat(*TALK), chat(*TALK), seq_length=n)).training.digest for n in (99, 100, 100)}
    (home / "chat_template.jinja").write_text(CHATML_SAYS)
    digests.add(load_data(config(home, chat(*TALK), chat(*TALK), seq_length=100)).training.digest)
    assert len(digests) == 3


def test_a_split_holds_out_the_last_rows(directory):
    home = directory(CHATML)
    data = config(home, *[chat(("user", str(n)), ("assistant", "a")) for n in range(10)], seq_length=99)
    data.validation_split = 0.2
    found = load_data(data)
    assert found.training.num_samples(99) == 8 and found.held_out.num_samples(99) == 2
    assert found.training.digest != found.held_out.digest
    assert "rows 8 to 10" in found.held_out.description
