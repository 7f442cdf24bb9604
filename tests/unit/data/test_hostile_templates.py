"""Chat templates that are made to hang or to fill the memory are refused soon, and those that people use are not."""

import re
import resource
import time

import pytest
from published_templates import PUBLISHED, conversation

from ppctl.data import chat_template
from ppctl.data.chat_template import ChatTemplate, RenderingFailed
from ppctl.data.rendering import LONGEST
from ppctl.errors import DataError

TEXTS = {"letters": "'a' * 10 ** 6", "words": "'a b ' * 10 ** 6", "lines": "'a\n' * 10 ** 6", "marks": "'<' * 10 ** 6"}
SLOW = (
    "wordwrap(1)", "urlize", "title", "list|sort|join", "list|unique|list|join", "list|groupby('x')", "striptags",
    "list|pprint", "batch(1)|list|tojson", "map('upper')|map('lower')|join", "wordcount", "list|sum(start='')",
    "truncate(9, end='b' * 10 ** 6)", "list|reverse|list|string", "select('in', 'a' * 10 ** 6)|list", "xmlattr",
    "list|max",
)  # fmt: skip
AGAIN = "{% set n = namespace(x=X) %}{% for i in range(99999) %}{% set n.x = EACH %}{% endfor %}"
LOOPED = {
    "splits": ("'a ' * 10 ** 6", "n.x.split() and n.x"),
    "splits at": ("'a ' * 10 ** 6", "n.x.split(' ') and n.x"),
    "lines": ("'\n' * 10 ** 6", "n.x.splitlines() and n.x"),
    "strips": ("'a' * 10 ** 6", "n.x.strip('b' * 10 ** 6 + 'a') and n.x"),
    "trims": ("'a' * 10 ** 6", "n.x|trim('b' * 10 ** 6 + 'a') and n.x"),
    "searches from the end": ("'a' * 10 ** 6", "n.x.rfind('b' + 'a' * 10 ** 5) and n.x"),
    "splits from the end": ("'a' * 10 ** 6", "n.x.rsplit('b' + 'a' * 10 ** 5) and n.x"),
    "searches": ("'a' * 10 ** 6", "n.x.find('b') and n.x"),
    "compares": ("'a' * 10 ** 6", "(n.x == 'a' * 10 ** 6) and n.x"),
    "looks into": ("'a' * 10 ** 6", "('b' in n.x) or n.x"),
    "tests": ("'a' * 10 ** 6", "(n.x is upper) or n.x"),
    "cuts": ("[1] * 10 ** 6", "n.x[1:] and n.x"),
    "joins lists": ("[1] * 10 ** 5", "(n.x + n.x)[:10 ** 5]"),
    "turns": ("'a' * 10 ** 6", "n.x[::-1]"),
    "cuts texts": ("'a' * 10 ** 6", "n.x[1:] ~ 'a'"),
    "counts": ("'a' * 10 ** 6", "n.x|length and n.x|upper"),
    "finds in lists": ("[1] * 10 ** 5", "(n.x.index(1) + n.x.count(2)) or n.x"),
    "looks into lists": ("[1] * 10 ** 5", "(2 in n.x) or n.x"),
    "numbers": ("3 ** 600", "n.x * n.x // n.x"),
    "calls": ("1", "range(3) and namespace(x=1).x"),
    "names": ("((1,) * 1000,) * 1000", "{n.x: 1} and n.x"),
    "keys": ("((1,) * 1000,) * 1000", "messages[0][n.x] or n.x"),
    "JSON": ("messages", "n.x|tojson * 100 and n.x"),
}
NESTED = "{% set n = namespace(x=1, y=1) %}{% for i in range(60) %}{% set n.x = X %}{% set n.y = Y %}{% endfor %}"
BIG = "{% set b = 'a' * 10 ** 6 %}"
WHOLE = {
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "loops with conditions": "{% for i in range(9999) %}{% for j in range(9999) if j > 9999 %}{% endfor %}{% endfor %}",
    "a loop in itself": "{% for i in range(999) recursive %}{{ loop(range(999)) if loop.depth < 4 }}{% endfor %}",
    "a loop in itself that skips": "{% for i in range(9) recursive %}{% for j in range(99999) %}"
    "{{ loop(range(99999)) if loop.depth0 }}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n < 40 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "a long macro": "{% macro f() %}{% if x %}"
    + "{{ y }}" * 5000
    + "{% endif %}"
    + "{% set z = 1 %}" * 2000
    + "{% endmacro %}"
    "{% for i in range(99999) %}{{ f() }}{% endfor %}",
    "callers": "{% macro f() %}{% for i in range(99999) %}{{ caller() }}{% endfor %}{% endmacro %}"
    "{% call f() %}" + "{% set z = 1 %}" * 3000 + "{% endcall %}",
    "a long body": "{% for i in range(99999) %}" + "{% set z = 1 %}" * 3000 + "{% endfor %}",
    "fields": BIG + "{{ ('{0}' * 10 ** 5).format(b) }}",
    "named fields": BIG + "{{ ('%(a)s' * 10 ** 5) % {'a': b} }}",
    "widths": "{{ '%9999999d' * 1000 % ((1,) * 1000) }}",
    "widths as values": "{{ '%*d' * 100 % ((9999999, 1) * 100) }}",
    "widths in braces": "{{ ('{:>9999999}' * 1000).format(*[1] * 1000) }}",
    "widths in widths": "{{ '{:{}{}}'.format('a', 99999, 9999) }}",
    "joins a range": BIG + "{{ range(99999)|join(b) }}",
    "joins keys": BIG + "{{ b.join(messages[0].keys()) * 10 ** 6 }}",
    "joins what is mapped": BIG + "{{ ''.join(range(99999)|map('replace', '9', b)) }}",
    "replaces in a list": BIG + "{{ [b]|replace('a', b) }}",
    "replaces nothing": BIG + "{{ b.replace('', b) }}",
    "replaces by name": BIG + "{{ b|replace(new=b, old='a') }}",
    "JSON with an indent": "{{ (([[1]] * 1000)|list)|tojson(indent=10 ** 6) }}",
    "JSON with separators": BIG + "{{ ([1] * 10 ** 5)|tojson(separators=(b, b)) }}",
    "wraps with a text": "{{ ('a' * 10 ** 5)|wordwrap(1, true, 'b' * 10 ** 5) }}",
    "links with a text": "{{ ('http://a ' * 10 ** 4)|urlize(target='b' * 10 ** 5) }}",
    "sums of lists": "{{ ([[1]] * 10 ** 5)|sum(start=[])|length }}",
    "fills": BIG + "{{ [1]|batch(10 ** 9, b) }}",
    "tuples in tuples": NESTED.replace("X", "(n.x, n.x)").replace("Y", "(n.y, n.y)") + "{{ n.x == n.y }}",
    "mappings in mappings": NESTED.replace("X", "{'a': n.x, 'b': n.x}").replace("Y", "{'a': n.y, 'b': n.y}")
    + "{{ n.x == n.y }}",
    "lists of one list": "{% set a = [[1] * 10 ** 5] * 10 ** 5 %}{{ a == [[1] * 10 ** 5] * 10 ** 5 }}",
    "a set of a list": "{% set a = [[1] * 10 ** 5] * 10 ** 5 %}{{ a|sort }}",
    "a list as text": "{% set a = ['a' * 10 ** 5] * 10 ** 5 %}{{ a }}",
    "a million cuts": BIG + "{% for c in b %}{% for d in b %}{% endfor %}{% endfor %}",
    "blocks": "{% set n = namespace(x='a') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "filled blocks": BIG + "{% for i in range(999) %}{% filter upper %}{{ b }}{% endfilter %}{% endfor %}",
    "constants": "{{ 'a'" + "|replace('a', 'aaaaaaaaaa')" * 20 + "}}",
    "a long source": "{{ a }}" * 10**5,
    "a deep source": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep attributes": "{{ a" + ".b" * 20000 + " }}",
    "deep lists": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "deep blocks": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "deep sums": "{{ 1" + " + 1" * 10000 + " }}",
    "deep negations": "{{ " + "not " * 10000 + " 1 }}",
}
HOSTILE = {
    **{f"{text} | {name}": f"{{{{ ({made})|{name} }}}}" for text, made in TEXTS.items() for name in SLOW},
    **{f"again {kind}": AGAIN.replace("X", x, 1).replace("EACH", each) for kind, (x, each) in LOOPED.items()},
    **WHOLE,
}


SOME = (
    "loops in loops", "macros", "a long body", "fields", "joins a range", "tuples in tuples", "constants", "again cuts",
    "a deep source", "deep sums", "words | wordwrap(1)", "again numbers",
)  # fmt: skip
KINDS = [pytest.param(kind, marks=[] if kind in SOME else pytest.mark.whole) for kind in HOSTILE]
REFUSED = "more than|parenthes|recursion|too deep|at most|ends the process"


def render(template: str) -> str:
    return ChatTemplate(template, {}, "the template").render([{"role": "user", "content": "a"}])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_template_ends_within_its_limits_and_costs_this_process_nothing(kind, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    monkeypatch.setattr(chat_template, "MEMORY", 2**28)
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        assert len(render(HOSTILE[kind])) <= LONGEST and kind not in SOME
    except (RenderingFailed, DataError) as error:
        assert kind not in SOME or re.search(REFUSED, str(error))
    assert time.process_time() - begin < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**17  # KiB


def test_the_next_conversation_gets_a_new_process(monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    message = {"role": "user", "content": ""}
    endless = ChatTemplate("{% if messages[1:] %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}"
                           "{% endfor %}{% endif %}b", {}, "the template")  # fmt: skip
    with pytest.raises(RenderingFailed, match=r"it takes more than 0\.2 s"):
        endless.render([message] * 2)
    assert endless.render([message])[0] == "b"


def test_sets_have_one_order_in_all_processes():
    template = "{{ messages[0].keys() - ['role'] }}" + "{{ {'a': 1, 'b': 2, 'c': 3, 'd': 4}.keys() - ['b'] }}"
    assert render(template) == render(template)


@pytest.mark.parametrize("words", [30, 1000])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_template_renders_200_turns_with_tools_in_a_fraction_of_the_time(name, words, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", chat_template.SECONDS / 5)
    template = ChatTemplate(PUBLISHED[name], {"bos_token": "<s>", "eos_token": "</s>"}, "the template")
    messages, tools = conversation(200, words)
    text, _ = template.render(messages, tools)
    assert text.count("question 49") == words and ("search1" in text or name == "DeepSeek R1")
