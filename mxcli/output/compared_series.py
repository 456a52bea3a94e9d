"""What happens over the steps of a capture under several combinations: a short table, sentences, and records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mxcli.flows.compare import Comparison, best_of
from mxcli.flows.sums import StepTotal, series
from mxcli.output.cells import noise_cell
from mxcli.output.numbers import ABSENT, counted
from mxcli.output.screen import Screen
from mxcli.output.series import worst_of
from mxcli.output.table import Column, Row, aligned

_COLUMNS = (
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
    steps: tuple[Sequence[StepTotal], ...]

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
    return aligned((Column(f"over {steps:,} steps", right=False), *_COLUMNS), rows, screen)


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
    under = [series(totals) for totals in comparison.by_step]
    for key in under[0] if under else ():
        yield _Role(key[0], tuple(each[key] for each in under))


def _sqnr(total: StepTotal) -> str:
    return noise_cell(total.metrics, "sqnr_db")
