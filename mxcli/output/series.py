"""What happens over the steps of a capture: a short table, sentences, and records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mxcli.flows.measure.compare import Comparison, best_of
from mxcli.flows.measure.totals import TrainingStepTotal, totals_over_steps
from mxcli.numerics.metrics import judged_number
from mxcli.output.numbers import ABSENT, counted, noise_cell, number_cell, significant
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


def series_lines(totals: Sequence[TrainingStepTotal], screen: Screen) -> list[str]:
    """The first, the last and the worst step of each role, however many there are; nothing of a single step."""
    if not totals:
        return []
    rows = list[Row]()
    for (role, axis), found in totals_over_steps(totals).items():
        called = series_name(role, axis)
        rows += [[f"{called}, {' and '.join(words)}", *_cells(found[at])] for at, words in _told(found).items()]
    steps = len({each.step for each in totals})
    return aligned((Column(f"over {steps:,} steps", right=False), *_COLUMNS), rows, screen)


def series_sentences(totals: Sequence[TrainingStepTotal]) -> list[str]:
    """How the SQNR of each role goes from the first step to the last, and where it is lowest."""
    said = []
    for (role, axis), found in totals_over_steps(totals).items():
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


def series_records(totals: Sequence[TrainingStepTotal]) -> list[dict[str, object]]:
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


def worst_of(found: Sequence[TrainingStepTotal]) -> int | None:
    """The place of the step with the lowest SQNR, the first of equals; None where none has one."""
    sqnrs = [judged_number(each.metrics, "sqnr_db") for each in found]
    return min((at for at, sqnr in enumerate(sqnrs) if sqnr is not None), key=lambda at: sqnrs[at] or 0.0, default=None)


def _told(found: Sequence[TrainingStepTotal]) -> dict[int, list[str]]:
    """The places that are told of, in order of the steps, and as what."""
    places: dict[int, list[str]] = {}
    for at, word in ((0, FIRST), (len(found) - 1, LAST), (worst_of(found), WORST)):
        if at is not None:
            places.setdefault(at, []).append(word)
    return dict(sorted(places.items()))


def _cells(total: TrainingStepTotal) -> list[str]:
    metrics = total.metrics
    numbers = ("saturated_percent", "underflowed_percent", "amax", "bias")
    return [f"{total.step:,}", noise_cell(metrics, "sqnr_db"), *(number_cell(metrics, name) for name in numbers)]


_COMPARED_COLUMNS = (
    Column("first\nSQNR dB", drop=2),
    Column("last\nSQNR dB", drop=2),
    Column("worst\nSQNR dB"),
    Column("at step", drop=1),
    Column("best at\nsteps"),
)


@dataclass(frozen=True, slots=True)
class _Role:
    """The steps of a role under every combination, and at how many of them each is best."""

    role: str
    steps: tuple[Sequence[TrainingStepTotal], ...]

    @property
    def wins(self) -> list[int]:
        """At how many steps each combination is best."""
        best = [best_of([total.metrics for total in at]) for at in zip(*self.steps, strict=True)]
        return [best.count(place) for place in range(len(self.steps))]


def compared_series_lines(comparison: Comparison, screen: Screen) -> list[str]:
    """The first, the last and the worst step of each role under each combination, however many steps there are; nothing
    of a single step."""
    if not comparison.by_step:
        return []
    rows, names = list[Row](), comparison.combinations.names
    for of_role in _roles(comparison):
        rows += [] if not rows else [None]
        for name, found, won in zip(names, of_role.steps, of_role.wins, strict=True):
            worst = worst_of(found)
            lowest = [ABSENT, ABSENT] if worst is None else [_sqnr(found[worst]), f"{found[worst].step:,}"]
            rows.append([f"{of_role.role}: {name}", _sqnr(found[0]), _sqnr(found[-1]), *lowest, f"{won:,}"])
    steps = len({each.step for each in comparison.by_step[0]})
    return aligned((Column(f"over {steps:,} steps", right=False), *_COMPARED_COLUMNS), rows, screen)


def compared_series_sentences(comparison: Comparison) -> list[str]:
    """Which combination is best at how many steps, of each role."""
    said = []
    for of_role in _roles(comparison):
        pairs = sorted(zip(of_role.wins, comparison.combinations.names, strict=True), key=lambda pair: -pair[0])
        listed = ", ".join(f"{name} at {won:,}" for won, name in pairs if won)
        if listed:
            said.append(f"{of_role.role}: of {counted(len(of_role.steps[0]), 'step')} best is {listed}.")
    return said


def compared_series_records(comparison: Comparison) -> list[dict[str, object]]:
    """A record per step and role for JSON, with the metrics under each combination by its name."""
    return [
        {
            "step": at[0].step,
            "role": at[0].role,
            "metrics": dict(zip(comparison.combinations.names, (total.metrics for total in at), strict=True)),
        }
        for at in zip(*comparison.by_step, strict=True)
    ]


def _roles(comparison: Comparison) -> Iterator[_Role]:
    under = [totals_over_steps(totals) for totals in comparison.by_step]
    for key in under[0] if under else ():
        yield _Role(key[0], tuple(each[key] for each in under))


def _sqnr(total: TrainingStepTotal) -> str:
    return noise_cell(total.metrics, "sqnr_db")
