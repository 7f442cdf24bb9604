"""Limits of the rendering of a chat template: it is a program of somebody else's, and may never end.

Knows Jinja's sandbox, and what of a template takes long or makes longer texts. Must not know conversations. Counted,
not timed: on a slow machine the same conversations are refused as on a fast one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Set, Sized, ValuesView
from functools import wraps
from types import NoneType
from typing import Any

from jinja2 import TemplateError, Undefined, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_STEPS = 10**9
"""Steps of one rendering, about one second; 200 turns of a conversation take a hundredth of them."""
LONGEST = 2**24
"""Characters of a text that a template makes: no conversation has as many."""
MOST_ENTRIES = 2**20
"""Values in a list or a mapping, with those in its own lists and mappings."""
MOST_BITS = 2**10
"""Bits of a whole number."""
LONGEST_SOURCE = 2**16
"""Characters of a template. The longest published ones have a third."""

_NODE, _OPERATION, _CALL = 50, 3_000, 10_000
"""Steps of a piece of a loop's body, of a filter or an operator, and of a call."""
_WALKED, _MADE, _SPLIT, _TURN, _SLOW = 150, 20, 100, 1_000, 2_000
"""Steps of an entry that is looked at, of one of a new list, of one split off, of a turn, of a slow filter's entry."""
_CHARACTER = 15
"""Steps of a character in a quick filter, and in the methods of texts."""
_QUICK = "capitalize e escape indent join lower replace safe string tojson trim upper"
_BY_ENTRY = "batch dictsort groupby list max min reverse slice sort sum unique"
_FREE = "attr count d default first items last length map reject rejectattr select selectattr"
"""Filters whose operands' length does not matter, except as they hand on one entry after another."""
_COMPARING = "!= < <= == > >= eq equalto ge greaterthan gt in le lessthan lower lt ne upper"
"""Tests that look at all of a value."""
_SEARCHING = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
"""Methods that may compare each character of a text with each one of another."""
_TURNS, _JOINED, _SPENT, _SEEN, _CUT = "ppctl_turns", "ppctl_joined", "ppctl_spent", "ppctl_seen", "ppctl_cut"
"""The names of the filters around what a loop goes through, in place of `~`, and around other pieces of a template."""
_UNCOUNTED = ("encode", "translate", "expandtabs")
"""Methods of texts that no template needs: what they make is long by other rules, or no text."""
_ATOMS = frozenset([int, float, bool, NoneType])
_PLAIN = (str, int, float, NoneType, Undefined, range)
"""Types of values that are the same text in every process, apart from what holds such values."""


class Limited(ImmutableSandboxedEnvironment):
    """Ends a rendering of too many steps or with too long texts with a TemplateError; `begin` starts to count.

    Lengths are looked at before something is made, as far as they follow from its operands: one operation is enough to
    fill a memory. Before `begin` there are no steps, so that Jinja computes nothing while it compiles.
    """

    intercepted_binops = frozenset(["+", "-", "*", "**", "%"])

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, finalize=self._shown, **named)
        self._steps_left = 0
        self.filters = {name: self.bounded(name, each) for name, each in self.filters.items()}
        self.filters |= {_TURNS: self._turns, _JOINED: self.concat, _SPENT: self._spend}
        self.filters |= {_SEEN: self._seen, _CUT: self._noted}
        compared = {name: self._test(each) for name, each in self.tests.items() if name in _COMPARING.split()}
        self.tests = {**self.tests, **compared}

    def begin(self) -> None:
        """Count anew."""
        self._steps_left = MOST_STEPS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > LONGEST_SOURCE:
            raise TemplateError(f"it has more than {LONGEST_SOURCE:,} characters")
        counted: nodes.Template = _Counted().visit(super()._parse(source, name, filename))
        counted.set_environment(self)
        return counted

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse, beside what the sandbox refuses, methods whose results are not foreseen."""
        return attr not in _UNCOUNTED and super().is_safe_attribute(obj, attr, value)

    def concat(self, pieces: Iterable[Any]) -> str:
        """Join what a template, a block or `~` puts one behind another."""
        texts, length = [], 0
        for piece in pieces:
            length += self._printed(piece)
            self._spend(_WALKED)
            _check(length)
            texts.append(str(piece))
        text: str = self._noted("".join(texts))
        return text

    def call(self, context: Any, callee: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call as the sandbox does, and count."""
        self._spend(_CALL)
        method = getattr(callee, "__wrapped__", callee)  # the sandbox's own str.format is a function
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            arguments = tuple(list(each) if isinstance(each, Iterator) else each for each in arguments)
            self._foresee(method.__name__, owner, *arguments, *named.values(), ordered=not named)
        else:
            compared = isinstance(owner, list | tuple) and method.__name__ in ("index", "count")
            for each in (owner, *arguments) if compared else (*arguments, *named.values()):
                self._seen(each)
        return self._noted(super().call(context, callee, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute as the sandbox does, where the result is no longer than it may be."""
        self._spend(_OPERATION)
        if operator == "**":
            _check_bits(max(_number(right), 0) * _number(left).bit_length())
        elif operator == "*":
            _check_bits(_number(left).bit_length() + _number(right).bit_length())
            _check(max(_length(left) * _number(right), _length(right) * _number(left)))
        elif operator == "+":
            _check(_length(left) + _length(right))
        elif isinstance(left, str) and operator == "%":
            self._foresee("format", left, right)
        return self._noted(super().call_binop(context, operator, left, right))

    def _shown(self, value: Any) -> Any:
        """Count the characters of what a template puts out, before it is text."""
        if not isinstance(value, str):
            self._spend(_CHARACTER * self._printed(value))
        return value

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is counted; Jinja's marks on it stay."""
        free, by_entry = name in _FREE.split(), name in _BY_ENTRY.split()
        rate = _CHARACTER if by_entry or name in _QUICK.split() else _SLOW

        @wraps(function)
        def counted(*arguments: Any, **named: Any) -> Any:
            self._spend(_OPERATION)
            if not free:
                arguments = tuple(list(each) if isinstance(each, Iterator) else each for each in arguments)
                given = [*(arguments[1:] if hasattr(function, "jinja_pass_arg") else arguments), *named.values()]
                if by_entry:
                    self._spend(_SLOW * sum(map(_length, given)))
                self._foresee(name, *given, rate=rate, ordered=not named)
            return self._noted(function(*arguments, **named))

        return counted

    def _test(self, function: Any) -> Callable[..., Any]:
        @wraps(function)
        def counted(*arguments: Any) -> Any:
            return function(*map(self._seen, arguments))

        return counted

    def _foresee(self, name: str, *operands: Any, rate: int = _CHARACTER, ordered: bool = True) -> None:
        """Spend the steps of characters, and refuse what makes too long a text; not `ordered`: with named ones."""
        sizes = [self._printed(each) for each in operands]
        texts = sorted(len(each) for each in operands if isinstance(each, str))
        first, widest = operands[0] if operands else "", max(map(_number, operands), default=0)
        length = sum(sizes) + widest
        self._spend(rate * sum(sizes))
        if name in _SEARCHING and len(texts) > 1:
            self._spend(texts[-1] * texts[-2])
        if name == "replace" and len(operands) > 2:
            exact = ordered and all(isinstance(each, str) for each in operands[:3])
            length += (first.count(operands[1]) if exact else sizes[0] + 1) * max(sizes[1:])
        elif name == "sum" and any(isinstance(each, list | tuple) for each in operands[1:]):
            self._spend(_length(first) ** 2)  # each sum of lists is a new list
        elif name == "join":
            length += max(map(_length, operands)) * max(texts, default=0)
        elif name == "indent":
            length += str(first).count("\n") * max(widest, *sizes[1:], 0)
        elif name in ("format", "format_map"):
            length += _format_length(str(first), max(sizes) + widest)
        elif name in ("split", "rsplit", "splitlines"):
            exact = ordered and name != "splitlines" and len(texts) > 1
            self._spend(_SPLIT * (first.count(str(operands[1])) if exact else sizes[0]))
        elif name == "round":
            _check_bits(max(map(abs, map(_number, operands[1:])), default=0) * 4)  # ten to this power
        elif rate == _SLOW and len(texts) > 1:
            length += texts[-1] * texts[-2]
        _check(length)

    def _turns(self, items: Any, steps: int = _TURN) -> Iterator[Any]:
        for item in items:
            self._spend(steps)
            yield item

    def _spend(self, steps: int) -> bool:
        """Count steps. True, for a place where a template needs a value."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateError(f"it takes more than {MOST_STEPS:,} steps: it does not seem to end")
        return True

    def _seen(self, value: Any) -> Any:
        """The value, once all that it holds is counted: it is compared, or put into another one."""
        self._spend(self._size(value))
        return value

    def _noted(self, made: Any) -> Any:
        if isinstance(made, str):
            self._spend(2 * len(made))
        elif type(made) in _ATOMS:
            _check_bits(_number(made).bit_length())
            return made
        elif isinstance(made, Iterator):
            return self._turns(made)
        elif isinstance(made, Set) and not isinstance(made, KeysView | ItemsView):
            raise TemplateError("it makes a set, whose order is another one in every process")
        else:
            self._spend(_MADE * _length(made))
        _check(_length(made))
        return made

    def _printed(self, value: Any) -> int:
        """`_size` of what becomes text. Raises TemplateError where the text would name a place in memory."""
        return self._size(value, _PLAIN)

    def _size(self, value: Any, plain: tuple[type, ...] = (object,)) -> int:
        """About the characters of a value as text; its entries are counted.

        Raises TemplateError for what is neither `plain` nor holds values, and for too many: lists may hold themselves
        many times.
        """
        if isinstance(value, str):
            return len(value)
        size, entries, waiting = 0, 0, [value]
        while waiting:
            each = waiting.pop()
            entries += 1
            size += 1
            if entries > MOST_ENTRIES:
                raise TemplateError(f"it makes a list of more than {MOST_ENTRIES:,} entries")
            if isinstance(each, str):
                size += len(each)
            elif type(each) in _ATOMS:
                continue
            elif isinstance(each, Mapping):
                waiting += each.keys()
                waiting += each.values()
            elif isinstance(each, list | tuple | set | KeysView | ValuesView | ItemsView):
                waiting += each
            elif not isinstance(each, plain):
                raise TemplateError(f"it puts out a {type(each).__name__}, whose text would name a place in memory")
        self._spend(_WALKED * entries)
        _check(size)
        return size


class _Counted(NodeTransformer):
    """Puts filters that count where a template loops, compares, cuts, or makes lists, and in place of `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        steps = nodes.Const(_steps_of(node))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _TURNS, steps)
        if node.recursive:  # the template hands the items of an inner turn to the loop itself
            spent = _filtered(steps, _SPENT)
            node.test = spent if node.test is None else nodes.And(spent, node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        steps = nodes.Const(_steps_of(node))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(steps, _SPENT), lineno=node.lineno))
        return node

    visit_CallBlock = visit_Macro  # its body is a macro, too

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(each.expr for each in node.ops)]
        among = any(each.op in ("in", "notin") for each in node.ops)
        if among or not any(map(_is_constant, sides)):  # a constant ends a comparison where it ends
            node.expr = _seen(node.expr)
            for each in node.ops:
                each.expr = _seen(each.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, _CUT)
        node.arg = _seen(node.arg)
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _seen(node)

    visit_Tuple = visit_Dict = visit_List


def _filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _seen(node: nodes.Expr) -> nodes.Expr:
    return node if _is_constant(node) else _filtered(node, _SEEN)


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Literal) and all(map(_is_constant, node.iter_child_nodes()))


def _steps_of(node: nodes.Node) -> int:
    """Steps of a turn of a loop, or of a macro, apart from what its operations count themselves."""
    return _TURN + _NODE * sum(1 for _ in node.find_all(nodes.Node))


def _check(length: int) -> None:
    if length > LONGEST:
        raise TemplateError(f"it makes a text of more than {LONGEST:,} characters")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateError(f"it makes a number of more than {MOST_BITS:,} bits")


def _format_length(text: str, operand: int) -> int:
    """At most the length of what a format adds; fields in fields may be of any width."""
    if re.search(r"\{[^{}]*\{", text.replace("{{", "")):
        return LONGEST + 1
    widths = re.findall(r"\d+", " ".join(re.findall(r"%(?:\([^)]*\))?[-#0 +]*[\d.]*|\{[^{}]*\}", text)))
    return (text.count("%") + text.count("{")) * operand + sum(int(each[:9]) for each in widths)
