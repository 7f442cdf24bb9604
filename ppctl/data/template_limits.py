"""What a rendering of a chat template may use: a template is a program of somebody else's, and may never end.

Knows Jinja's sandbox, and what of a template makes longer texts. Must not know conversations. Counted, not timed: on a
slow machine the same conversations are refused as on a fast one.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MappingView, Set, Sized
from functools import wraps
from types import NoneType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_TURNS = 10_000_000
"""Turns of loops of one rendering, which take seconds; a call counts as fifty. A template that goes on never ends."""
LONGEST = 2**26
"""Characters of a text, or entries of a list, that a template makes: no conversation has as many."""
MOST_MADE = 2**30
"""The same of all that one rendering makes. A template that adds each turn to a text makes the square of that."""
MOST_BITS = 2**14
"""Of a whole number: Python prints none of more than 4,300 digits."""
_TURNS, _JOINED = "ppctl_turns", "ppctl_joined"
"""The names of the filters around what a loop goes through, and in place of `~`."""
_UNCOUNTED = ("encode", "translate", "expandtabs")
"""Methods of texts that no template needs: what they make is long by other rules, or no text."""
_PLAIN = (str, int, float, NoneType, Undefined, range)
"""What is the same text in every process, apart from what holds such values."""


class Limited(ImmutableSandboxedEnvironment):
    """Ends a rendering that has too many turns, or makes too long texts, with a TemplateError; `begin` starts to count.

    Lengths are looked at before something is made, as far as they follow from its operands: one step is enough to fill
    a memory.
    """

    intercepted_binops = frozenset(["+", "-", "*", "**", "%"])

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, finalize=self._shown, **named)
        self.filters = {name: self.bounded(each) for name, each in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _JOINED: self.concat}
        self.begin()

    def begin(self) -> None:
        """Count anew."""
        self._turns_left, self._made_left = MOST_TURNS, MOST_MADE

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        found: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        found.set_environment(self)
        return found

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As the sandbox's, without methods whose results are not foreseen."""
        return attr not in _UNCOUNTED and super().is_safe_attribute(obj, attr, value)

    def concat(self, pieces: Iterable[Any]) -> str:
        """What a template, a block or `~` puts one behind another."""
        texts, length = [], 0
        for piece in pieces:
            length += _printed(piece)
            self._check(length)
            texts.append(str(piece))
        text: str = self._noted("".join(texts))
        return text

    def call(self, context: Any, callee: Any, /, *arguments: Any, **named: Any) -> Any:
        """As the sandbox's, counted."""
        self._count(50)
        method = getattr(callee, "__wrapped__", callee)  # the sandbox's own str.format is a function
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _printed([*arguments, *named.values()])
            self._foresee(method.__name__, text, *arguments, *named.values())
        else:
            self._foresee("", *arguments, *named.values())
        return self._noted(super().call(context, callee, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox's, where the result is no longer than it may be."""
        if operator == "**":
            _check_bits(max(_number(right), 0) * _number(left).bit_length())
        elif operator == "*":
            _check_bits(_number(left).bit_length() + _number(right).bit_length())
            self._check(max(_length(left) * _number(right), _length(right) * _number(left)))
        elif operator == "+":
            self._check(_length(left) + _length(right))
        elif isinstance(left, str) and operator == "%":
            _printed(right)
            self._foresee("format", left, right)
        return self._noted(super().call_binop(context, operator, left, right))

    def _shown(self, value: Any) -> Any:
        """What a template puts out, before it is text."""
        self._check(_printed(value))
        return value

    def bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted; Jinja's marks on it stay."""

        @wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            seen = [list(self._turns(each)) if isinstance(each, Iterator) else each for each in arguments]
            given = [*(seen[1:] if hasattr(function, "jinja_pass_arg") else seen), *named.values()]
            if function.__name__ != "do_default":
                _printed(given)
            self._foresee(function.__name__.removeprefix("do_"), *given)
            return self._noted(function(*seen, **named))

        return counted

    def _foresee(self, name: str, *operands: Any) -> None:
        """Refuse widths and counts that are too large, and what lays a text between the parts of another."""
        texts = [each for each in operands if isinstance(each, str)]
        several = max((len(each) for each in operands if isinstance(each, list | tuple)), default=0)
        length = sum(map(size_of, operands)) + max(map(_number, operands), default=0)
        if name == "replace" and len(texts) > 2:
            length += texts[0].count(texts[1]) * len(texts[2])
        elif name == "join":
            length += max(several, *map(len, texts), 0) * max(map(len, texts), default=0) if texts else 0
        elif name == "indent" and texts:
            length += texts[0].count("\n") * max(map(_number, operands), default=len(texts[-1]))
        elif name in ("format", "format_map") and texts and _longest_number(texts[0]) > len(str(LONGEST)):
            length += LONGEST  # a width of nine digits
        elif name == "round":
            _check_bits(max(map(abs, map(_number, operands[1:2])), default=0) * 4)  # ten to this power
        self._check(length)

    def _turns(self, items: Any) -> Iterator[Any]:
        for item in items:
            self._count()
            yield item

    def _count(self, turns: int = 1) -> None:
        self._turns_left -= turns
        if self._turns_left < 0:
            raise TemplateError(f"its loops have more than {MOST_TURNS:,} turns: it does not seem to end")

    def _check(self, length: int) -> None:
        if length > LONGEST:
            raise TemplateError(f"it makes a text of more than {LONGEST:,} characters")

    def _noted(self, made: Any) -> Any:
        if isinstance(made, Set) and not isinstance(made, KeysView | ItemsView):
            raise TemplateError("it makes a set, whose order is another one in every process")
        _check_bits(_number(made).bit_length())
        self._made_left -= _length(made)
        if self._made_left < 0:
            raise TemplateError(f"it makes texts of more than {MOST_MADE:,} characters together")
        self._check(_length(made))
        return made


class _Counted(NodeTransformer):
    """Puts filters that count around what loops go through, and in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _TURNS, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, _JOINED, [], [], None, None, lineno=node.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateError(f"it makes a number of more than {MOST_BITS:,} bits")


def _printed(value: Any) -> int:
    """The size of what becomes text, as `size_of`. Raises TemplateError where the text would name a place in memory."""
    return size_of(value, _PLAIN)


def size_of(value: Any, plain: tuple[type, ...] = (object,)) -> int:
    """About the characters of a value as text, or somewhat more than LONGEST: lists may hold themselves many times.

    Raises TemplateError for what is neither `plain` nor holds values.
    """
    size, waiting = 0, [value]
    while waiting and size <= LONGEST:
        each = waiting.pop()
        size += 1 + (len(each) if isinstance(each, str) else 0)
        if isinstance(each, Mapping):
            waiting += each.keys()
            waiting += each.values()
        elif isinstance(each, list | tuple | set | MappingView):
            waiting.extend(iter(each))  # type: ignore[arg-type]  # all views of mappings that there are
        elif not isinstance(each, plain):
            raise TemplateError(f"it puts out a {type(each).__name__}, whose text would name a place in memory")
    return size


def _longest_number(text: str) -> int:
    """The digits of the longest number in a text."""
    return max(map(len, "".join(each if each.isdigit() else " " for each in text).split()), default=0)
