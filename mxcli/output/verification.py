"""A verification as text, as JSON and as CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, SEVERITIES, WARNING, Finding, Result
from mxcli.output.conclusion import bold_lines
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import (
    COUNT,
    FLAG,
    NUMBER,
    SCHEME,
    SCHEME_OPTIONS,
    SOURCE,
    TEXT,
    TEXT_OR_NULL,
    Field,
    Fields,
    array,
    attributes,
    choice,
    nested,
    record_of,
    records,
)
from mxcli.output.formats import rules_words
from mxcli.output.inspection import source_line
from mxcli.output.loaders import LOADER, loader_lines
from mxcli.output.numbers import EXACT, counted, shape_text, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.verify.against.provenance import Provenance
    from mxcli.flows.verify.alone import Coverage
    from mxcli.flows.verify.errors import Distance
    from mxcli.flows.verify.repair import Repair
    from mxcli.flows.verify.verify import Verification, Verified

SHOWN = 10
"""Findings of a check, and weights compared with their source, that the text shows by default."""
_PLURALS = {PROBLEM: "problems", WARNING: "warnings", NOTE: "notes"}


@dataclass(frozen=True, slots=True)
class _Found:
    check: Result
    finding: Finding


@dataclass(frozen=True, slots=True)
class _Place:
    """A weight, or another place (`weight` None), with the findings there."""

    name: str
    found: Sequence[_Found]
    weight: Verified | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        return Counter(each.check.severity for each in self.found)


def _count(severity: str, counts: Mapping[str, int]) -> int:
    return counts.get(severity, 0)


def _distance_cell(name: str, exact: str, distance: Distance) -> str:
    return significant(getattr(distance, name)) if distance.noise else exact


_DISTANCE: Fields[Distance] = Fields(
    Field("sqnr_db", lambda distance: distance.sqnr_db, NUMBER, "SQNR\ndB",
          cell=partial(_distance_cell, "sqnr_db", EXACT)),
    Field("relative_error", lambda distance: distance.relative_error, NUMBER, "relative\nerror",
          cell=partial(_distance_cell, "relative_error", EXACT)),
    Field("mse", lambda distance: distance.mse, NUMBER),
    Field("max_abs_error", lambda distance: distance.max_abs_error, NUMBER, "largest\nerror", drop=1,
          cell=partial(_distance_cell, "max_abs_error", "0")),
)  # fmt: skip
_COUNTS: Fields[Mapping[str, int]] = Fields(
    *(Field(_PLURALS[severity], partial(_count, severity), COUNT) for severity in SEVERITIES)
)
_PROVENANCE: Fields[Provenance] = Fields(
    Fields(SCHEME, SCHEME_OPTIONS).through(lambda of: of.scheme),
    Field("exact", lambda of: of.exact, FLAG, meaning="all bytes equal those that these rules make of the source"),
    Field("equal_blocks", lambda of: of.equal_blocks, COUNT),
    Field("blocks_tried", lambda of: of.blocks, COUNT),
    Field("tensor_scale_equal", lambda of: of.tensor_scale, FLAG),
    Field("draws_unknown", lambda of: of.draws_unknown, FLAG,
          meaning="recorded as stochastic rounding, without its seed"),
)  # fmt: skip
_FINDING: Fields[_Found] = Fields(
    Field("check", lambda found: found.check.name, TEXT),
    Field("severity", lambda found: found.check.severity, choice(SEVERITIES)),
    attributes(TEXT, "where", "value", "need", "way_out").through(lambda found: found.finding),
)
_CHECK: Fields[Result] = Fields(
    attributes(TEXT, "name"),
    Field("severity", lambda check: check.severity, choice(SEVERITIES)),
    attributes(TEXT, "meaning", "how"),
    Field("findings", lambda check: len(check.findings), COUNT),
    Field("skipped", lambda check: check.skipped, TEXT_OR_NULL, meaning="the reason if it was not made"),
)
_WEIGHT: Fields[Verified] = Fields(
    Field("name", lambda weight: weight.name, TEXT, "tensor", right=False),
    Field("format", lambda weight: weight.format, TEXT, "format", right=False, drop=2),
    Field("shape", lambda weight: list(weight.shape), array(COUNT), "shape", right=False, drop=3,
          cell=lambda weight: shape_text(weight.shape)),
    Field("amax", lambda weight: weight.summary.amax, NUMBER),
    Field("tensor_scale", lambda weight: weight.summary.scale, NUMBER),
    _DISTANCE.optional().through(lambda weight: weight.distance),
    nested("bytes_of", lambda weight: weight.provenance, _PROVENANCE, title="bytes of", right=False,
           cell=lambda weight: "" if weight.provenance is None else _short(weight.provenance)),
)  # fmt: skip
_COVERAGE: Fields[Coverage] = Fields(
    attributes(COUNT, "weights"),
    Field("by_record", lambda of: of.by_record, COUNT, meaning="weights whose bytes are those that the record states"),
    Field("by_values", lambda of: of.by_values, COUNT, meaning="weights that were decoded and looked at"),
    Field("unchecked", lambda of: of.unchecked, COUNT, meaning="weights in formats that are not read"),
    attributes(COUNT, "tensors"),
    Field("tensors_by_record", lambda of: of.tensors_by_record, COUNT,
          meaning="tensors whose bytes are those that the record states"),
    Field("proof", lambda of: of.proof, TEXT, meaning="what the record proves"),
    Field("model", lambda of: of.model, TEXT, meaning="what names and shapes were compared with"),
    Field("unread", lambda of: of.unread, TEXT_OR_NULL, meaning="why codes were not read"),
)  # fmt: skip
_TABLE = _WEIGHT.only("name", "shape", "format", "sqnr_db", "relative_error", "max_abs_error", "bytes_of")
_PLACE: Fields[_Place] = Fields(
    attributes(TEXT, "name"),
    _WEIGHT.only("format", "shape").through(lambda place: place.weight),
    _COUNTS.through(lambda place: place.counts),
    _WEIGHT.without("name", "format", "shape").through(lambda place: place.weight),
)
_PLACE_WITH_FINDINGS: Fields[_Place] = Fields(_PLACE, records("findings", lambda place: place.found, _FINDING))
RECORD_KEYS = tuple(_PLACE_WITH_FINDINGS.names)
"""The columns of CSV."""

_REPAIR: Fields[Repair] = Fields(
    attributes(TEXT, "file"),
    Field("tensors", lambda repair: list(repair.tensors), array(TEXT), meaning="empty if other bytes were damaged"),
)
VERIFICATION: Fields[Verification] = Fields(
    SOURCE["source"],
    Field("layout", lambda result: result.layout, TEXT),
    SOURCE.without("source"),
    Field("against", lambda result: result.against, TEXT_OR_NULL, meaning="the source compared with"),
    Field(
        "sound",
        lambda result: result.is_sound,
        FLAG,
        meaning="there are no problems, and not all weights are unchecked",
    ),
    record_of("checked", lambda result: result.coverage, _COVERAGE),
    record_of("counts", lambda result: result.counts, _COUNTS),
    Field("conclusion", lambda result: conclusion(result), array(TEXT)),
    nested(
        "totals",
        lambda result: result if result.compared else None,
        Fields(
            Field("tensors", lambda result: len(result.compared), COUNT),
            _DISTANCE.through(lambda result: result.distance),
        ),
    ),
    Field("notes", lambda result: list(result.notes), array(TEXT)),
    records("loaders", lambda result: result.loaders, LOADER),
    records("repaired", lambda result: result.repaired, _REPAIR),
    records("checks", lambda result: result.results, _CHECK),
    records("findings", lambda result: _found(result), _FINDING),
    records("weights", lambda result: _weights(result), _PLACE),
)
"""The JSON of `mxcli verify`."""


def verification_text(result: Verification, screen: Screen, top: int | None = None) -> str:
    """Return the formats, the findings by check with the worst first, errors if there is a source, and the outcome.

    `top` limits the findings shown of each check and the weights shown, not those counted.
    """
    shown = SHOWN if top is None else top
    head = [
        f"{source_line(result.source, result.total, result.by_dtype)}; quantized ({result.layout})",
        _formats_line(result),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines = [bold(lines[0], screen), *lines[1:]]
    for repair in result.repaired:
        lines += ["", *folded_lines(_repaired_line(repair), screen)]
        lines += [f"  {printable(name)}" for name in repair.tensors[:shown]]
        lines += [f"  and {len(repair.tensors) - shown:,} more"] if len(repair.tensors) > shown else []
    for severity in SEVERITIES:
        for check in result.found(severity):
            lines += ["", *_check_lines(check, screen, shown)]
    if result.compared:
        lines += ["", *_error_lines(result, screen, shown)]
    texts = loader_lines(result.loaders, result.engines)
    loaders = [line for text in texts for line in folded_lines(text, screen)]
    return "\n".join([*lines, *([""] if loaders else []), *loaders, "", *bold_lines(conclusion(result), screen)])


def _repaired_line(repair: Repair) -> str:
    what = f": {counted(len(repair.tensors), 'tensor')}" if repair.tensors else ""
    return f"repaired {printable(repair.file)}{what}; it is as recorded again"


def conclusion(result: Verification) -> list[str]:
    """Return the outcome in words."""
    made = sum(1 for each in result.results if each.skipped is None)
    found = ", ".join(
        f"{count:,} {severity if count == 1 else _PLURALS[severity]} ({_by_check(result.found(severity))})"
        for severity in SEVERITIES
        if (count := result.counts.get(severity, 0))
    )
    checks = f"{made} checks of {counted(result.coverage.weights, 'weight')}"
    nothing = "nothing found" if result.is_sound else _why_unchecked(result)
    outcome = f"{_outcome(result)}: {found or nothing}"
    return [
        *_provenance_sentences(result),
        _coverage_sentence(result.coverage),
        f"{printable(result.source)} {outcome.rstrip('.')}; {checks}.",
    ]


def _outcome(result: Verification) -> str:
    if result.is_sound:
        unread = result.coverage.unchecked
        return f"is sound but for {counted(unread, 'weight')} not checked" if unread else "is sound"
    return "is not sound" if result.counts.get(PROBLEM) else "could not be checked"


def _why_unchecked(result: Verification) -> str:
    return printable(result.coverage.unread or "no weight is in a format that is read").rstrip(".")


def _coverage_sentence(coverage: Coverage) -> str:
    """Return how many weights were checked, and how."""
    ways = [
        f"{count:,} {way}"
        for count, way in ((coverage.by_record, "by the record"), (coverage.by_values, "by their values"))
        if count
    ]
    done = coverage.by_record + coverage.by_values
    left = f"; {coverage.unchecked:,} not checked: their format is not read" if coverage.unchecked else ""
    listed = f" ({', '.join(ways)})" if ways else ""
    return (
        f"Checked: {done:,} of {counted(coverage.weights, 'weight')}{listed}{left}. Bytes: {coverage.proof}. "
        f"Names and shapes: by {coverage.model}."
    )


def failure_sentence(result: Verification) -> str:
    """Return the error of a verification that found problems, or that could check nothing."""
    if not result.counts.get(PROBLEM):
        return f"{printable(result.source)}: could not be checked: {_why_unchecked(result)}."
    count = result.counts[PROBLEM]
    word = PROBLEM if count == 1 else _PLURALS[PROBLEM]
    return f"{printable(result.source)}: {count:,} {word} ({_by_check(result.found(PROBLEM))})"


def verification_json(result: Verification) -> str:
    """Return the verification as JSON."""
    return json_text("verify", VERIFICATION.record(result))


def verification_csv(result: Verification) -> str:
    """Return a row per weight, and one per other place with a finding; `findings` are those of the place."""
    known = {place for weight in result.weights for place in weight.places}
    by_place = _by_place(_found(result)).items()
    places = (*_weights(result), *(_Place(where, found) for where, found in by_place if where not in known))
    return csv_text(map(_PLACE_WITH_FINDINGS.record, places), RECORD_KEYS)


def _found(result: Verification) -> Iterator[_Found]:
    return (_Found(check, finding) for check in result.results for finding in check.findings)


def _by_place(found: Iterable[_Found]) -> dict[str, list[_Found]]:
    places: dict[str, list[_Found]] = {}
    for each in found:
        places.setdefault(each.finding.where, []).append(each)
    return places


def _weights(result: Verification) -> Iterator[_Place]:
    """Yield each weight with the findings on its tensors and its module."""
    by_place = _by_place(_found(result))
    for weight in result.weights:
        yield _Place(weight.name, [each for place in weight.places for each in by_place.get(place, ())], weight)


def _formats_line(result: Verification) -> str:
    formats = Counter(weight.format for weight in result.weights).most_common()
    listed = ", ".join(f"{name} {count:,}" for name, count in formats) or "none that could be read"
    against = "" if result.against is None else f"; against {printable(result.against)}"
    return f"{counted(len(result.weights), 'quantized weight')}: {listed}{against}"


def _by_check(checks: Sequence[Result]) -> str:
    return ", ".join(f"{check.name} {len(check.findings):,}" for check in checks)


def _check_lines(check: Result, screen: Screen, shown: int) -> list[str]:
    lines = [bold(line, screen) for line in folded_lines(f"{check.severity} {check.name}: {check.meaning}", screen)]
    alike = len({(finding.need, finding.way_out) for finding in check.findings}) == 1
    for finding in check.findings[:shown]:
        value = f"  {printable(finding.where)}: {printable(finding.value)}"
        lines += folded_lines(value if alike else f"{value}; {_remedy(finding)}", screen, "    ")
    hidden = len(check.findings) - shown
    if hidden > 0:
        lines.append(f"  and {hidden:,} more" if shown else f"  {hidden:,} found")
    if alike:
        lines += folded_lines(f"  {_remedy(check.findings[0])}", screen, "  ")
    return lines


def _remedy(finding: Finding) -> str:
    return f"needed: {printable(finding.need)}." + (f" {printable(finding.way_out)}" if finding.way_out else "")


def _error_lines(result: Verification, screen: Screen, shown: int) -> list[str]:
    ranked = sorted(result.compared, key=_harm)
    total = _DISTANCE.cells(result.distance)
    rows: list[Row] = [_TABLE.cells(weight) for weight in ranked[:shown]]
    rows += [None, [f"all {counted(len(ranked), 'tensor')}", "", "", *total, ""]]
    lines = aligned(_TABLE.columns(), rows, screen)
    if shown < len(ranked):
        lines += folded_lines(f"{shown:,} of {counted(len(ranked), 'tensor')} shown, worst sqnr_db first", screen)
    return lines


def _harm(weight: Verified) -> float:
    sqnr = None if weight.distance is None else weight.distance.sqnr_db
    return math.inf if sqnr is None else sqnr


def _short(provenance: Provenance) -> str:
    if provenance.draws_unknown:
        return "draws not known"
    rules = f"{provenance.scheme.scale_rule.name} as {provenance.scheme.dialect.name}"
    return rules if provenance.exact else f"{_share(provenance.equal_blocks, provenance.blocks)} of blocks {rules}"


def _share(part: int, whole: int) -> str:
    """Return a percentage; it is 100 only if part is the whole."""
    percent = 100.0 * part / whole if whole else 0.0
    return f"{min(percent, 99.9):.1f} %" if part < whole else "100 %"


def _provenance_sentences(result: Verification) -> Iterator[str]:
    """Yield the rules that made the bytes, the most frequent first, and the nearest rules for other weights."""
    traced = [weight.provenance for weight in result.weights if weight.provenance is not None]
    weights = counted(len(traced), "weight")
    for scheme, count in Counter(each.scheme for each in traced if each.exact).most_common():
        some = f"all {weights}" if count == len(traced) else f"{count:,} of {weights}"
        yield f"Bytes: {some} {'matches' if count == 1 else 'match'} {rules_words(scheme)} ({scheme.format.name})."
    if drawn := sum(1 for each in traced if each.draws_unknown):
        yield (
            f"Bytes: {drawn:,} of {weights} {'is' if drawn == 1 else 'are'} recorded as stochastic rounding without a "
            "seed, so the draws are not known."
        )
    if wrong := sum(1 for each in traced if each.named and not each.exact):
        are = "is" if wrong == 1 else "are"
        yield f"Bytes: {wrong:,} of {weights} {are} not what the named rules make of the source."
    rest = [each for each in traced if not (each.exact or each.draws_unknown or each.named)]
    if rest:
        near = Counter(each.scheme for each in rest).most_common(1)[0][0]
        mine = [each for each in rest if each.scheme == near]
        equal, blocks = sum(each.equal_blocks for each in mine), sum(each.blocks for each in mine)
        yield (
            f"Bytes: {len(rest):,} of {weights} {'matches' if len(rest) == 1 else 'match'} none of the known rules; "
            f"nearest is mostly {near.scale_rule.name} as {near.dialect.name}, with {_share(equal, blocks)} of the "
            "blocks tried."
        )
