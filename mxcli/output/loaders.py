"""Verdicts of engines as lines and fields, and the table of loader rules as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mxcli.files.loaders.engine import ENGINES
from mxcli.files.loaders.rule import AT_A_LOSS, NOT_KNOWN, OUTCOMES, READ, RUN, WRONGLY
from mxcli.files.loaders.rules import RULES
from mxcli.files.loaders.verdict import engines_loading, formats_loaded
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


def loader_lines(verdicts: Iterable[Verdict], layout: str, named: Sequence[str] = ()) -> list[str]:
    """Return a line on every engine that is named, else on those that load the layout; and on those that load it
    wrongly without an error."""
    shown = named or engines_loading(layout)
    return [each.sentence for each in verdicts if each.engine.name in shown or each.outcome == WRONGLY]


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
    why = f": {rule.why}" if rule.why else ""
    formats = ", ".join(name for name in rule.formats if name in layout.formats) or "all formats"
    return f"{_title(rule)} {verb} {formats}{manner}{where}{why} ({rule.evidence})"


def layouts_table(layouts: Iterable[Layout], screen: Screen) -> list[str]:
    """Return the engines that load each layout, with what they load of it, and how that is known."""
    columns = (Column("layout", right=False), Column("loaded by", right=False), Column("known by", right=False),
               Column("formats", right=False))  # fmt: skip
    rows: list[Row] = []
    for layout in layouts:
        engines = engines_loading(layout.name)
        for name in engines:
            loaded = formats_loaded(layout.name, name, layout.formats)
            first = layout.name if name == engines[0] else ""
            rows.append([first, _title_of(layout, name), _evidence(layout, name), _listed(loaded, layout)])
        if not engines:
            rows.append([layout.name, "mxcli only (mxcli dequantize)", "", "all"])
    return aligned(columns, rows, screen)


def _title(rule: LoaderRule) -> str:
    return f"{ENGINES[rule.engine].title} {rule.evidence.version}".rstrip()


def _rules_that_load(layout: Layout, engine: str) -> list[LoaderRule]:
    rules = [rule for rule in RULES if rule.engine == engine and layout.name in rule.layouts and rule.when is None]
    return [rule for rule in rules if formats_loaded(layout.name, engine, rule.formats or layout.formats)]


def _title_of(layout: Layout, engine: str) -> str:
    return _title(_rules_that_load(layout, engine)[0])


def _evidence(layout: Layout, engine: str) -> str:
    found = [rule.evidence for rule in _rules_that_load(layout, engine)]
    return str(next((each for each in found if each.kind != RUN), found[0])) if found else READ


def _listed(loaded: Sequence[str], layout: Layout) -> str:
    missing = [name for name in layout.formats if name not in loaded]
    if not missing:
        return "all"
    return ", ".join(loaded) if len(loaded) <= len(missing) else f"all but {', '.join(missing)}"
