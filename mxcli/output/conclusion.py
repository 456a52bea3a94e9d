"""Sentences on reports and comparisons, made from their findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mxcli.errors import printable
from mxcli.output.numbers import EXACT, counted, significant, trimmed
from mxcli.output.screen import Screen, bold, folded_lines

if TYPE_CHECKING:
    from mxcli.flows.measure import comparison_findings, findings

NAMED = 3
"""Outliers that a sentence names."""


def sentences(found: Iterable[findings.Finding]) -> list[str]:
    """Return a sentence per finding."""
    return [_SENTENCES[type(each).__name__](each) for each in found]


def bold_lines(said: Iterable[str], screen: Screen) -> Iterator[str]:
    """Yield the lines of sentences in bold, folded and later lines indented."""
    for sentence in said:
        yield from (bold(line, screen) for line in folded_lines(sentence, screen, "  "))


def _estimated(finding: findings.Estimated) -> str:
    return f"Estimated from {significant(finding.percent)} % of the elements."


def _total_error(finding: findings.TotalError) -> str:
    over = "the only tensor measured" if finding.tensors == 1 else f"all {counted(finding.tensors, 'tensor')}"
    if finding.sqnr_db is None:
        return f"No SQNR exists over {over}: there is no signal, or the noise is not finite."
    if math.isinf(finding.sqnr_db):
        return f"Exact: {over} can be represented without error."
    spread = ""
    if finding.lowest is not None and finding.highest is not None:
        spread = (
            f"; single tensors have {significant(finding.lowest.value)} to {significant(finding.highest.value)} dB, "
            f"{printable(finding.lowest.tensor)} the least"
        )
    return f"SQNR is {significant(finding.sqnr_db)} dB over {over}{spread}."


def _outliers(finding: findings.Outliers) -> str:
    count = len(finding.tensors)
    more = f" and {count - NAMED:,} more" if count > NAMED else ""
    return (
        f"{counted(count, 'tensor')} {'is' if count == 1 else 'are'} more than {finding.below_db:g} dB below the "
        f"median of {significant(finding.median_db)} dB: {', '.join(map(printable, finding.tensors[:NAMED]))}{more}."
    )


def _saturation(finding: findings.Saturation) -> str:
    if not finding.percent:
        return "Nothing saturates: no element exceeds the largest value that its block's scale reaches."
    return (
        f"{significant(finding.percent)} % of elements saturate, in {significant(finding.blocks_percent)} % of blocks"
        f"{_most(finding.most)}."
    )


def _underflow(finding: findings.Underflow) -> str:
    if not finding.percent:
        return "Nothing underflows: every nonzero element keeps a nonzero code."
    return f"{significant(finding.percent)} % of elements underflow to zero{_most(finding.most)}."


def _most(most: findings.TensorValue | None) -> str:
    return "" if most is None else f"; most in {printable(most.tensor)} ({significant(most.value)} %)"


def _scale_underflow(finding: findings.ScaleUnderflow) -> str:
    return f"{counted(finding.blocks, 'block')} lost to a scale that became zero or was clamped."


def _scale_range(finding: findings.ScaleRange) -> str:
    return (
        f"On average blocks use {finding.binades_used:.1f} of the {finding.binades_available:.1f} binades of the "
        f"element format; scale exponents run from {finding.exponent_min} to {finding.exponent_max}."
    )


def _kept(finding: findings.Kept) -> str:
    listed = ", ".join(f"{role} {count:,}" for role, count in finding.by_role.items())
    return f"{counted(sum(finding.by_role.values()), 'tensor')} kept as stored: {listed}."


def _axis_effect(finding: findings.AxisEffect) -> str:
    low, high = finding.worse_db, finding.better_db
    better = f"{finding.role}: blocks along {finding.better}s have"
    if math.isinf(high):
        said = f"{better} an {EXACT} result, along {finding.worse}s {low:.2f} dB SQNR."
    else:
        said = f"{better} {high:.2f} dB SQNR, {high - low:.2f} dB more than along {finding.worse}s ({low:.2f} dB)."
    return _under(finding.scheme) + said


def _axes_equal(finding: findings.AxesEqual) -> str:
    first, second = finding.axes
    return (
        f"{_under(finding.scheme)}Blocks along {first}s and along {second}s differ by less than "
        f"{finding.less_than_db:g} dB in every role."
    )


def _under(scheme: str) -> str:
    return f"{scheme}: " if scheme else ""


def _axes_incomparable(finding: findings.AxesIncomparable) -> str:
    left = (
        f"{counted(finding.tensors, 'tensor')} {'is' if finding.tensors == 1 else 'are'} measured along one axis only"
    )
    return f"{left}, so totals of the two axes cannot be compared."


def _step_trend(finding: findings.StepTrend) -> str:
    called = finding.role if finding.axis is None else f"{finding.role} along {finding.axis}s"
    first, last, worst = (
        f"{significant(db)} dB at step {step:,}" for step, db in (finding.first, finding.last, finding.worst)
    )
    return f"{called}: SQNR goes from {first} to {last}; the lowest of {finding.steps:,} steps is {worst}."


def _step_wins(finding: findings.StepWins) -> str:
    listed = ", ".join(f"{name} at {won:,}" for name, won in finding.wins)
    return f"{finding.role}: of {counted(finding.steps, 'step')} best is {listed}."


def _effect(finding: comparison_findings.Effect) -> str:
    context = f"{finding.format}: against" if finding.format else "Against"
    clauses = [*_bits(finding.bits), *_changes(finding), *(_decibels(finding) or [_unchanged(finding)])]
    return f"{context} {finding.baseline}, {finding.other} {_joined(clauses)}{_stochastic(finding)}."


def _bits(bits: float | None) -> Iterator[str]:
    if bits is not None:
        amount = f"{trimmed(abs(bits))} bits {'more' if bits > 0 else 'fewer'}" if bits else "as many bits"
        yield f"takes {amount} per element"


def _changes(finding: comparison_findings.Effect) -> Iterator[str]:
    saturated, underflowed = finding.saturated_blocks, finding.underflowed
    if saturated is not None and not saturated.after:
        yield f"removes all saturation ({trimmed(saturated.before)} % of blocks)"
    elif saturated is not None and not saturated.before:
        yield f"saturates {trimmed(saturated.after)} % of blocks"
    elif saturated is not None:
        yield f"{_moves(saturated, 'saturation')} of blocks"
    if underflowed is not None:
        yield f"{_moves(underflowed, 'underflow')} of elements"


def _moves(change: comparison_findings.Change, noun: str) -> str:
    verb = "lowers" if change.after < change.before else "raises"
    return f"{verb} {noun} from {trimmed(change.before)} % to {trimmed(change.after)} %"


def _decibels(finding: comparison_findings.Effect) -> list[str]:
    """Return the gains and costs with their numbers of tensors; nothing where no change is worth reporting."""
    clauses = [(verb, found) for verb, found in (("gains", finding.gains_db), ("costs", finding.costs_db)) if found]
    tensors = len(finding.changes_db)
    return [
        f"{verb} {_range(found)} on {_of_all(len(found), tensors, last=at == len(clauses) - 1)}"
        for at, (verb, found) in enumerate(clauses)
    ]


def _unchanged(finding: comparison_findings.Effect) -> str:
    changes = finding.changes_db
    if not changes:
        return "has no SQNR to compare"
    if not any(changes):
        return f"gives the same SQNR on {_of_all(len(changes), len(changes), last=True)}"
    return f"changes the SQNR of no tensor by {finding.equal_db:g} dB"


def _stochastic(finding: comparison_findings.Effect) -> str:
    """Return the caveat for an SQNR where only one of two combinations rounds stochastically."""
    if not finding.stochastic:
        return ""
    clipped = " except from saturation" if finding.stochastic_saturates else ""
    return (
        f" (stochastic rounding is for sums: its errors have no bias{clipped} and cancel there, which an SQNR does not "
        "count)"
    )


def _winner(finding: comparison_findings.Winner) -> str:
    equals = f", with {_joined(finding.equals)} as good" if finding.equals else ""
    listed = "".join(f", {name} on {won:,}" for name, won in finding.others)
    on = _of_all(finding.wins, finding.tensors, last=True) if finding.wins else "none"
    return f"Best SQNR overall: {finding.name}{_in_brackets(finding.sqnr_db)}{equals}; best on {on}{listed}."


def _in_brackets(sqnr_db: float | None) -> str:
    if sqnr_db is None:
        return ""
    return f" ({EXACT})" if math.isinf(sqnr_db) else f" ({significant(sqnr_db)} dB)"


def _biases(finding: comparison_findings.Biases) -> str:
    changes = (
        f"of {change.name} against {change.baseline}: "
        + ", ".join(f"{label} {_bias(own)} against {_bias(other)}" for label, own, other in change.groups)
        for change in finding.changes
    )
    measured = "Bias (mean error, and how many times RMS error / sqrt(elements): about 1 for independent random errors)"
    return f"{measured} {'; '.join(changes)}."


def _bias(bias: comparison_findings.Bias) -> str:
    return f"{significant(bias.mean)} ({bias.standard_errors:.1f})"


def _of_all(count: int, tensors: int, *, last: bool) -> str:
    if count == tensors:
        return {1: "the only tensor", 2: "both tensors"}.get(tensors, f"all {tensors:,} tensors")
    return f"{count:,} of {tensors:,} tensors" if last else f"{count:,}"


def _range(values: Sequence[float]) -> str:
    low, high = (trimmed(value) for value in (min(values), max(values)))
    if high == "inf":
        return "an exact result" if low == high else f"{low} dB to an exact result"
    return f"{low} dB" if low == high else f"{low} to {high} dB"


def _joined(clauses: Sequence[str]) -> str:
    """Return `a`, `a and b`, or `a, b and c`."""
    *before, last = clauses
    return f"{', '.join(before)} and {last}" if before else last


_SENTENCES: dict[str, Callable[[Any], str]] = {
    "Estimated": _estimated,
    "TotalError": _total_error,
    "Outliers": _outliers,
    "Saturation": _saturation,
    "Underflow": _underflow,
    "ScaleUnderflow": _scale_underflow,
    "ScaleRange": _scale_range,
    "Kept": _kept,
    "AxisEffect": _axis_effect,
    "AxesEqual": _axes_equal,
    "AxesIncomparable": _axes_incomparable,
    "StepTrend": _step_trend,
    "StepWins": _step_wins,
    "Effect": _effect,
    "Winner": _winner,
    "Biases": _biases,
}
"""By the class of a finding: naming classes keeps NumPy out of the imports of this module."""
