"""What happens over the steps of a capture: a short table, sentences, and records."""

from __future__ import annotations

from collections.abc import Sequence

from mxcli.flows.sums import StepTotal, series
from mxcli.numerics.metrics import judged_number
from mxcli.output.cells import noise_cell, number_cell
from mxcli.output.numbers import significant
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

_COLUMNS = (
    Column("step"),
    Column("SQNR\ndB"),
    Column("saturated\n% of elements", drop=2),
    Column("underflowed\n% of elements", drop=2),
    Column("amax", drop=3),
    Column("bias", drop=1),
)
FIRST, LAST, WORST = "first", "last", "worst"


def series_lines(totals: Sequence[StepTotal], screen: Screen) -> list[str]:
    """The first, the last and the worst step of each role, however many there are; nothing of a single step."""
    if not totals:
        return []
    rows = list[Row]()
    for (role, axis), found in series(totals).items():
        called = series_name(role, axis)
        rows += [[f"{called}, {' and '.join(words)}", *_cells(found[at])] for at, words in _told(found).items()]
    steps = len({each.step for each in totals})
    return aligned((Column(f"over {steps:,} steps", right=False), *_COLUMNS), rows, screen)


def series_sentences(totals: Sequence[StepTotal]) -> list[str]:
    """How the SQNR of each role goes from the first step to the last, and where it is lowest."""
    said = []
    for (role, axis), found in series(totals).items():
        ends = [judged_number(found[at].metrics, "sqnr_db") for at in (0, -1)]
        worst = worst_of(found)
        if worst is None or None in ends:
            continue
        called = role if axis is None else f"{role} along {axis}s"
        before, after = map(significant, ends)
        lowest = f"{significant(judged_number(found[worst].metrics, 'sqnr_db'))} dB at step {found[worst].step:,}"
        said.append(
            f"{called}: SQNR goes from {before} dB at step {found[0].step:,} to {after} dB at step {found[-1].step:,}; "
            f"the lowest of {len(found):,} steps is {lowest}."
        )
    return said


def series_name(role: str, way: str | None) -> str:
    """What a series is called: by its role, and the axis or recipe where there are several."""
    return role if way is None else f"{role} {way}"


def series_records(totals: Sequence[StepTotal]) -> list[dict[str, object]]:
    """A record per step and role for JSON."""
    return [
        {
            "step": each.step,
            "role": each.role,
            **({} if each.axis is None else {"axis": each.axis}),
            **each.metrics,
        }
        for each in totals
    ]


def worst_of(found: Sequence[StepTotal]) -> int | None:
    """The place of the step with the lowest SQNR, the first of equals; None where none has one."""
    sqnrs = [judged_number(each.metrics, "sqnr_db") for each in found]
    return min((at for at, sqnr in enumerate(sqnrs) if sqnr is not None), key=lambda at: sqnrs[at] or 0.0, default=None)


def _told(found: Sequence[StepTotal]) -> dict[int, list[str]]:
    """The places that are told of, in order of the steps, and as what."""
    places: dict[int, list[str]] = {}
    for at, word in ((0, FIRST), (len(found) - 1, LAST), (worst_of(found), WORST)):
        if at is not None:
            places.setdefault(at, []).append(word)
    return dict(sorted(places.items()))


def _cells(total: StepTotal) -> list[str]:
    metrics = total.metrics
    numbers = ("saturated_percent", "underflowed_percent", "amax", "bias")
    return [f"{total.step:,}", noise_cell(metrics, "sqnr_db"), *(number_cell(metrics, name) for name in numbers)]
