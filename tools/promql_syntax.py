"""Parse the subset of PromQL that the dashboard and the alerts use, to check them without Prometheus.

Unknown syntax is refused, so that no query passes the checks unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTIONS = {
    "abs": ("vector",),
    "absent": ("vector",),
    "avg_over_time": ("range",),
    "clamp_min": ("vector", "number"),
    "deriv": ("range",),
    "histogram_quantile": ("number", "vector"),
    "increase": ("range",),
    "max_over_time": ("range",),
    "rate": ("range",),
}
"""Argument types of each function."""
AGGREGATIONS = ("avg", "count", "max", "min", "sum")
PRECEDENCE = {"or": 1, "and": 2, "unless": 2, "==": 3, "!=": 3, "<=": 3, "<": 3, ">=": 3, ">": 3}
PRECEDENCE.update({"+": 4, "-": 4, "*": 5, "/": 5})
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
DURATION = re.compile(r"(?:[0-9]+(?:ms|[smhdw]))+")
TOKEN = re.compile(
    r"""\s*(?:(?P<duration>(?:[0-9]+(?:ms|[smhdw]))+)(?![a-zA-Z0-9_])|(?P<number>[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)
    |(?P<name>[a-zA-Z_][a-zA-Z0-9_]*)|(?P<string>"(?:[^"\\]|\\.)*")|(?P<op>=~|!~|==|!=|<=|>=|[-+*/<>=(){}\[\],]))""",
    re.VERBOSE,
)


class SyntaxProblemError(ValueError):
    """A query that is not PromQL, or outside the supported subset."""


@dataclass(frozen=True, slots=True)
class Number:
    value: float


@dataclass(frozen=True, slots=True)
class Selector:
    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()
    range_s: float | None = None
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    args: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    op: str
    by: tuple[str, ...]
    arg: Node


@dataclass(frozen=True, slots=True)
class Binary:
    op: str
    left: Node
    right: Node
    as_bool: bool = False
    on: tuple[str, ...] | None = None


Node = Number | Selector | Call | Aggregate | Binary


def seconds(duration: str) -> float:
    if not DURATION.fullmatch(duration):
        raise SyntaxProblemError(f"no duration: {duration!r}")
    return sum(int(number) * UNITS_S[unit] for number, unit in re.findall(r"([0-9]+)(ms|[smhdw])", duration))


def parse(text: str) -> Node:
    parser = _Parser(text)
    node = parser.binary(0)
    parser.take("end")
    return node


def walk(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Binary):
        yield from walk(node.left)
        yield from walk(node.right)
    elif isinstance(node, Aggregate):
        yield from walk(node.arg)
    elif isinstance(node, Call):
        for arg in node.args:
            yield from walk(arg)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._tokens: list[tuple[str, str]] = []
        rest = text.rstrip()
        while self._at < len(rest):
            found = TOKEN.match(rest, self._at)
            if found is None:
                raise SyntaxProblemError(f"cannot read {rest[self._at : self._at + 20]!r} in {text!r}")
            self._tokens.append((found.lastgroup or "", found.group(found.lastgroup or 0)))
            self._at = found.end()
        self._tokens.append(("end", "end"))
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at][1]

    def take(self, *wanted: str, kind: str | None = None) -> str:
        """The next token, if it is one of these or of this kind."""
        found_kind, found = self._tokens[self._at]
        if (wanted and found not in wanted) or (kind is not None and found_kind != kind):
            raise SyntaxProblemError(f"{found!r} where {wanted or kind} belongs in {self._text!r}")
        self._at += 1
        return found

    def took(self, wanted: str) -> bool:
        if self.peek() == wanted:
            self._at += 1
            return True
        return False

    def binary(self, least: int) -> Node:
        left = self.unary()
        while PRECEDENCE.get(self.peek(), 0) > least:
            op = self.take()
            as_bool = self.took("bool")
            on = self._names() if self.took("on") else None
            left = Binary(op, left, self.binary(PRECEDENCE[op]), as_bool, on)
        return left

    def unary(self) -> Node:
        if self.took("("):
            node = self.binary(0)
            self.take(")")
            return node
        if self._tokens[self._at][0] == "number":
            return Number(float(self.take()))
        name = self.take(kind="name")
        if name in AGGREGATIONS:
            by = self._names() if self.took("by") else ()
            self.take("(")
            node = self.binary(0)
            self.take(")")
            return Aggregate(name, by, node)
        if self.peek() == "(":
            return self._call(name)
        return self._selector(name)

    def _call(self, name: str) -> Call:
        if name not in FUNCTIONS:
            raise SyntaxProblemError(f"the function {name} is not known here: {self._text!r}")
        self.take("(")
        args = [self.binary(0)]
        while self.took(","):
            args.append(self.binary(0))
        self.take(")")
        if tuple(_kind(arg) for arg in args) != FUNCTIONS[name]:
            raise SyntaxProblemError(f"{name} takes {FUNCTIONS[name]}: {self._text!r}")
        return Call(name, tuple(args))

    def _selector(self, name: str) -> Selector:
        matchers: list[tuple[str, str, str]] = []
        if self.took("{"):
            while not self.took("}"):
                label, op = self.take(kind="name"), self.take("=", "!=", "=~", "!~")
                value = self.take(kind="string")[1:-1]
                try:
                    re.compile(value)
                except re.error as error:
                    raise SyntaxProblemError(f"{value!r} is no pattern: {error}") from error
                matchers.append((label, op, value))
                if self.peek() != "}":
                    self.take(",")
        range_s = None
        if self.took("["):
            range_s = seconds(self.take(kind="duration"))
            self.take("]")
        offset_s = seconds(self.take(kind="duration")) if self.took("offset") else 0.0
        return Selector(name, tuple(matchers), range_s, offset_s)

    def _names(self) -> tuple[str, ...]:
        names: list[str] = []
        self.take("(")
        while not self.took(")"):
            names.append(self.take(kind="name"))
            if self.peek() != ")":
                self.take(",")
        return tuple(names)


def _kind(node: Node) -> str:
    if isinstance(node, Number):
        return "number"
    return "range" if isinstance(node, Selector) and node.range_s is not None else "vector"
