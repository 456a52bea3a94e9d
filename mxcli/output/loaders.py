"""Verdicts of engines as lines and fields, and the table of loader rules as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.rule import AT_A_LOSS, LOADS, NOT_KNOWN, OUTCOMES, RUN, WRONGLY
from mxcli.files.loaders.rules import RULES
from mxcli.output.fields import TEXT, TEXT_OR_NULL, Field, Fields, choice
from mxcli.output.screen import Screen
from mxcli.output.table import Column, Row, aligned

if TYPE_CHECKING:
    from mxcli.files.layouts import Layout
    from mxcli.files.loaders.rule import LoaderRule
    from mxcli.files.loaders.verdict import Verdict

LOADER: Fields[Verdict] = Fields(
    Field("engine", lambda verdict: verdict.engine.name, TEXT),
    Field("version", lambda verdict: verdict.version or None, TEXT_OR_NULL),
    Field("outcome", lambda verdict: verdict.outcome, choice(OUTCOMES)),
    Field("reason", lambda verdict: verdict.reason, TEXT),
    Field("evidence", lambda verdict: None if verdict.evidence is None else str(verdict.evidence), TEXT_OR_NULL),
)
"""The verdict of an engine as a record."""


def loader_lines(verdicts: Iterable[Verdict], named: Sequence[str] = ()) -> list[str]:
    """Return a line on every engine that is named, else on those that load the layout; and on those that load it
    wrongly without an error."""
    shown = (
        each for each in verdicts if (each.engine.name in named if named else each.usual) or each.outcome == WRONGLY
    )
    return [each.sentence for each in shown]


def rule_sentences(layout: Layout) -> list[str]:
    """Return the rules of a layout, by engine, each as a sentence with the way it is known."""
    return [
        _sentence(rule, layout)
        for name in ENGINES
        for rule in RULES
        if rule.engine == name and layout.name in rule.layouts
    ]


def _sentence(rule: LoaderRule, layout: Layout) -> str:
    verb = {WRONGLY: "loads", AT_A_LOSS: "loads", NOT_KNOWN: "may or may not load"}.get(rule.outcome, rule.outcome)
    manner = {WRONGLY: " wrongly", AT_A_LOSS: " at a loss"}.get(rule.outcome, "")
    where = "" if rule.when is None else f" where {rule.when.meaning}"
    why = f": {rule.why}{f', unless {rule.unless}' if rule.unless else ''}" if rule.why else ""
    formats = ", ".join(name for name in rule.formats if name in layout.formats) or "all formats"
    return f"{_title(rule)} {verb} {formats}{manner}{where}{why} ({rule.evidence})"


def layouts_table(layouts: Iterable[Layout], screen: Screen) -> list[str]:
    """Return the engines that load each layout in some format, with the best way in which that is known."""
    columns = (Column("layout", right=False), Column("loaded by, in some formats at least", right=False))
    rows: list[Row] = []
    for layout in layouts:
        best: dict[str, LoaderRule] = {}
        for rule in sorted(_loading_rules(layout), key=lambda rule: rule.evidence.kind != RUN):
            best.setdefault(rule.engine, rule)
        listed = [f"{_title(best[name])} ({best[name].evidence})" for name in ENGINES if name in best]
        rows.append([layout.name, ", ".join(listed) or "none: mxcli dequantize reads it back"])
    return aligned(columns, rows, screen)


def loaders_table(layouts: Iterable[Layout], screen: Screen) -> list[str]:
    """Return the engines that load each layout, with the formats that they load, and how that is known."""
    columns = (Column("layout", right=False), Column("loaded by", right=False), Column("known by", right=False),
               Column("formats", right=False))  # fmt: skip
    by_rows: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for layout in layouts:
        loaded = ((_title(rule), str(rule.evidence), _listed(rule, layout)) for rule in _loading_rules(layout))
        by_rows.setdefault(tuple(loaded), []).append(layout.name)
    rows: list[Row] = []
    for cells, names in by_rows.items():
        rows += [["" if at else ", ".join(names), *row] for at, row in enumerate(cells)]
    return aligned(columns, rows, screen)


def _loading_rules(layout: Layout) -> list[LoaderRule]:
    """Return the rules with which engines load a layout, by engine."""
    rules = [rule for name in ENGINES for rule in RULES if rule.engine == name and layout.name in rule.layouts]
    return [rule for rule in rules if rule.when is None and rule.outcome in (LOADS, AT_A_LOSS)]


def _title(rule: LoaderRule) -> str:
    return f"{ENGINES[rule.engine].title} {rule.evidence.version}".rstrip()


def _listed(rule: LoaderRule, layout: Layout) -> str:
    loaded = [name for name in layout.formats if rule.covers(name)]
    return "all" if len(loaded) == len(layout.formats) else ", ".join(loaded)
