"""Limits that a user states on metrics (`--fail-on`): read safely, checked for every tensor, told all at once."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from mxcli.errors import LimitError, UsageError, did_you_mean, printable
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import METRICS, NUMBERS, number_of

Metrics = Mapping[str, Value]

_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_EXAMPLE = "'saturated_percent>0.1 or sqnr_db<20'"


@dataclass(frozen=True, slots=True)
class Condition:
    """Under what a tensor fails: the `text` as typed, its meaning, and the metrics it speaks of in order."""

    text: str
    tree: ast.expr
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What conditions found: how many measurements were `checked`, a sentence for each that fails, and notes on
    metrics that some tensor lacks."""

    checked: int
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def parse_condition(text: str) -> Condition:
    """The condition that an expression states: comparisons (< <= > >= == !=) of metrics with numbers or metrics,
    joined by `and` and `or`, with parentheses.

    Raises UsageError for anything else; nothing of it is ever executed.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        metrics = tuple(dict.fromkeys(_names_in(tree, text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(text, "it is no comparison") from error
    if not metrics:
        raise _unreadable(text, "it names no metric")
    return Condition(text, tree, metrics)


def holds(condition: Condition, metrics: Metrics) -> bool:
    """Whether a tensor fails; a comparison with a metric that is absent is never true."""
    return _holds(condition.tree, metrics)


def check_limits(conditions: Iterable[Condition], measured: Iterable[tuple[str, Metrics]]) -> Limits:
    """All conditions for everything measured, under the names given."""
    stated, checked, failures = tuple(conditions), 0, []
    absent: dict[tuple[str, str], list[str]] = {}
    for name, metrics in measured:
        checked += 1
        for condition in stated:
            if holds(condition, metrics):
                failures.append(_failure(name, condition, metrics))
            for metric in condition.metrics:
                if metrics[metric] is None:
                    absent.setdefault((condition.text, metric), []).append(name)
    return Limits(checked, tuple(failures), tuple(_absences(absent)))


def limit_error(limits: Limits) -> LimitError:
    """The failures as one error."""
    if len(limits.failures) == 1:
        return LimitError(limits.failures[0])
    return LimitError(
        f"--fail-on: {len(limits.failures):,} failures in {limits.checked:,} measurements.",
        limits.failures,
    )


def _names_in(node: ast.expr, text: str) -> Iterator[str]:
    """The metrics of an expression that is what it may be; raises UsageError where it is not."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            if not isinstance(value, (ast.BoolOp, ast.Compare)):
                raise _unreadable(text, f"'{printable(ast.unparse(value))}' is no comparison")
            yield from _names_in(value, text)
    elif isinstance(node, ast.Compare):
        unknown = [op for op in node.ops if type(op) not in _COMPARISONS]
        if unknown:
            raise _unreadable(text, "it compares by something else than < <= > >= == !=")
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Name):
                yield _known(side.id, text)
            elif _number(side) is None:
                raise _unreadable(text, f"'{printable(ast.unparse(side))}' is neither a metric nor a number")
    else:
        raise _unreadable(text, f"'{printable(ast.unparse(node))}' is no comparison")


def _known(name: str, text: str) -> str:
    if name in NUMBERS:
        return name
    if name in METRICS:
        raise UsageError(f"--fail-on '{printable(text)}': {name} is not one number, so it cannot be compared.")
    raise UsageError(
        f"--fail-on '{printable(text)}': no metric is called {printable(name)}; `mxcli explain` lists them."
        f"{did_you_mean(name, NUMBERS)}"
    )


def _number(node: ast.expr) -> float | None:
    """The number that a node is, with its sign; None: it is none."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(node.operand)
        return -value if value is not None and isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    return None


def _holds(node: ast.expr, metrics: Metrics) -> bool:
    if isinstance(node, ast.BoolOp):
        values = (_holds(value, metrics) for value in node.values)
        return all(values) if isinstance(node.op, ast.And) else any(values)
    assert isinstance(node, ast.Compare)
    sides = [_value(side, metrics) for side in (node.left, *node.comparators)]
    return all(
        left is not None and right is not None and _COMPARISONS[type(op)](left, right)
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
    )


def _value(node: ast.expr, metrics: Metrics) -> float | None:
    return number_of(metrics, node.id) if isinstance(node, ast.Name) else _number(node)


def _failure(name: str, condition: Condition, metrics: Metrics) -> str:
    values = (f"{metric} is {_shown(metrics[metric])}" for metric in condition.metrics)
    return f"{name}: {', '.join(values)} (--fail-on '{printable(condition.text)}')"


def _shown(value: Value) -> str:
    return "absent" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _absences(absent: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    for (text, metric), names in absent.items():
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        yield (
            f"--fail-on '{printable(text)}': {metric} is absent for {names[0]}{more}, of which no comparison with it "
            "is true."
        )


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(
        f"--fail-on '{printable(text)}' cannot be read: {why}. Compare metrics with numbers, joined by and, or, as in "
        f"{_EXAMPLE}."
    )
