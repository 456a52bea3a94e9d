"""Limits on metrics (`--fail-on`): parsed safely, checked for every tensor, reported all at once.

A condition that depends on a metric which a tensor lacks has not passed: it is reported like a failure.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import LimitError, UsageError, did_you_mean, printable
from mxcli.numerics.estimates import is_of_part, uncertainty_of
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import ESTIMATED, METRICS, NUMBERS, OF_SAMPLE, judged_number

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
_NAMED = 10
_WAY_OUT = (
    " What cannot be checked has not passed: leave such tensors out (--exclude), or say for which the condition "
    "counts, as in 'sqnr_db<20 and nonfinite==0'."
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition under which a tensor fails: the `text` as typed, its tree, and the metrics it names in order."""

    text: str
    tree: ast.expr
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The outcome of conditions: the number of measurements `checked`, a sentence for each failure, and one for each
    condition that could not be evaluated for some tensors."""

    checked: int
    failures: tuple[str, ...]
    unevaluated: tuple[str, ...] = ()


def parse_condition(text: str, known: Collection[str] = NUMBERS) -> Condition:
    """Return the condition that an expression states: comparisons (< <= > >= == !=) of metrics (those of tensors, or
    others that are `known`) with numbers or metrics, joined by `and` and `or`, with parentheses.

    Raises UsageError for anything else; nothing of it is ever executed.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        metrics = tuple(dict.fromkeys(_names_in(tree, text, known)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(text, "it is not a comparison") from error
    if not metrics:
        raise _unreadable(text, "it names no metric")
    return Condition(text, tree, metrics)


def fails(condition: Condition, metrics: Metrics) -> bool | None:
    """Return whether a tensor fails; None if that depends on a metric that is absent.

    An exact result has an infinite SQNR and no error, so that it is better than any limit.
    """
    return _holds(condition.tree, metrics)


def check_limits(conditions: Iterable[Condition], measured: Iterable[tuple[str, Metrics]]) -> Limits:
    """Check all conditions on all measurements, each with its name."""
    stated, checked, failures = tuple(conditions), 0, list[str]()
    lacking: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, metrics in measured:
        checked += 1
        for condition in stated:
            failed = fails(condition, metrics)
            if failed:
                failures.append(_failure(name, condition, metrics))
            elif failed is None:
                absent = tuple(metric for metric in condition.metrics if judged_number(metrics, metric) is None)
                lacking.setdefault((condition.text, absent), []).append(name)
    return Limits(checked, tuple(failures), tuple(_unevaluated(*each, names) for each, names in lacking.items()))


def limit_error(limits: Limits) -> LimitError:
    """Return the failures, and what could not be evaluated, as one error."""
    problems = (*limits.unevaluated, *limits.failures)
    if len(problems) == 1:
        return LimitError(problems[0] + _WAY_OUT if limits.unevaluated else problems[0])
    failures, unevaluated = len(limits.failures), len(limits.unevaluated)
    counts = [f"{failures:,} failure{'s' if failures > 1 else ''}"] if failures else []
    counts += [f"{unevaluated:,} that could not be evaluated"] if unevaluated else []
    headline = f"--fail-on: {' and '.join(counts)} in {limits.checked:,} measurements."
    return LimitError(headline + _WAY_OUT if unevaluated else headline, problems)


def _names_in(node: ast.expr, text: str, known: Collection[str]) -> Iterator[str]:
    """Yield the metrics of an expression; raises UsageError if it is not a valid condition."""
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            if not isinstance(value, (ast.BoolOp, ast.Compare)):
                raise _unreadable(text, f"'{printable(ast.unparse(value))}' is not a comparison")
            yield from _names_in(value, text, known)
    elif isinstance(node, ast.Compare):
        unknown = [op for op in node.ops if type(op) not in _COMPARISONS]
        if unknown:
            raise _unreadable(text, "it compares by something else than < <= > >= == !=")
        for side in (node.left, *node.comparators):
            if isinstance(side, ast.Name):
                yield _known(side.id, text, known)
            elif _number(side) is None:
                raise _unreadable(text, f"'{printable(ast.unparse(side))}' is neither a metric nor a number")
    else:
        raise _unreadable(text, f"'{printable(ast.unparse(node))}' is not a comparison")


def _known(name: str, text: str, known: Collection[str]) -> str:
    if name in known:
        return name
    if known is NUMBERS and name in METRICS:
        raise UsageError(f"--fail-on '{printable(text)}': {name} is not one number, so it cannot be compared.")
    raise UsageError(
        f"--fail-on '{printable(text)}': no metric is called {printable(name)}; "
        f"{'`mxcli explain` lists them' if known is NUMBERS else ', '.join(known)}.{did_you_mean(name, known)}"
    )


def _number(node: ast.expr) -> float | None:
    """Return the number that a node spells, with its sign, or None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _number(node.operand)
        return -value if value is not None and isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    return None


def _holds(node: ast.expr, metrics: Metrics) -> bool | None:
    if isinstance(node, ast.BoolOp):
        return _joined([_holds(value, metrics) for value in node.values], deciding=isinstance(node.op, ast.Or))
    assert isinstance(node, ast.Compare)
    sides = [_value(side, metrics) for side in (node.left, *node.comparators)]
    pairs = [
        None if left is None or right is None else _COMPARISONS[type(op)](left, right)
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
    ]
    return _joined(pairs, deciding=False)


def _joined(values: Sequence[bool | None], *, deciding: bool) -> bool | None:
    """Return `or` of values (`deciding` is True) or `and` (False); None is unknown."""
    if deciding in values:
        return deciding
    return None if None in values else not deciding


def _value(node: ast.expr, metrics: Metrics) -> float | None:
    return judged_number(metrics, node.id) if isinstance(node, ast.Name) else _number(node)


def _failure(name: str, condition: Condition, metrics: Metrics) -> str:
    values = (f"{metric} is {_described(metrics, metric)}" for metric in condition.metrics)
    return f"{name}: {', '.join(values)} (--fail-on '{printable(condition.text)}')"


def _unevaluated(text: str, absent: Sequence[str], names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return (
        f"--fail-on '{printable(text)}' could not be evaluated without {' and '.join(absent)}: absent for "
        f"{', '.join(names[:_NAMED])}{more}."
    )


def _described(metrics: Metrics, name: str) -> str:
    """Return the number compared, and whether it comes from a sample."""
    shown = _shown(judged_number(metrics, name))
    if not is_of_part(metrics):
        return shown
    unsure = uncertainty_of(metrics, name)
    words = {
        ESTIMATED: f"estimated at {shown}" + ("" if unsure is None else f" ±{unsure:.2g}"),
        OF_SAMPLE: f"{shown} in the sample",
    }
    return words.get(METRICS[name].sampled, shown)


def _shown(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(
        f"--fail-on '{printable(text)}' cannot be read: {why}. Compare metrics with numbers, joined by and, or, as in "
        f"{_EXAMPLE}."
    )
