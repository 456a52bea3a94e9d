"""A verification as text, as JSON and as CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from mxcli.errors import printable
from mxcli.flows.verify.check import NOTE, PROBLEM, SEVERITIES, WARNING, Finding, Result
from mxcli.flows.verify.errors import Distance
from mxcli.flows.verify.provenance import Provenance
from mxcli.flows.verify.verify import Verification, Verified
from mxcli.flows.write.records import scheme_record
from mxcli.output.export import csv_text, json_text
from mxcli.output.formats import rules_words
from mxcli.output.inspection import source_line
from mxcli.output.numbers import counted, shape_text, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

SHOWN = 10
"""Findings of a check, and weights beside their source, that the text shows unless told otherwise."""
_PLURALS = {PROBLEM: "problems", WARNING: "warnings", NOTE: "notes"}
_ERRORS = (
    Column("tensor", right=False),
    Column("shape", right=False, drop=3),
    Column("format", right=False, drop=2),
    Column("SQNR\ndB"),
    Column("relative\nerror"),
    Column("largest\nerror", drop=1),
    Column("bytes of", right=False),
)
RECORD_KEYS = (
    "name",
    "format",
    "shape",
    "problems",
    "warnings",
    "notes",
    "amax",
    "tensor_scale",
    "sqnr_db",
    "relative_error",
    "mse",
    "max_abs_error",
    "bytes_of",
    "findings",
)


def verification_text(result: Verification, screen: Screen, top: int | None = None) -> str:
    """What was looked at, the findings by check with the worst first, errors where there is a source, and the outcome.

    `top` limits the findings shown of each check and the weights shown, never what is counted.
    """
    shown = SHOWN if top is None else top
    head = [
        f"{source_line(result.source, result.total, result.by_dtype)}; quantized ({result.layout})",
        _weights(result),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines = [bold(lines[0], screen), *lines[1:]]
    for severity in SEVERITIES:
        for check in result.found(severity):
            lines += ["", *_check_lines(check, screen, shown)]
    if result.compared:
        lines += ["", *_error_lines(result, screen, shown)]
    lines.append("")
    for sentence in conclusion(result):
        first, *rest = folded_lines(sentence, screen, "  ")
        lines += [bold(first, screen), *(bold(line, screen) for line in rest)]
    return "\n".join(lines)


def conclusion(result: Verification) -> list[str]:
    """The outcome in words."""
    sentences = [*_origin_sentences(result)]
    made = sum(1 for each in result.results if each.skipped is None)
    weights = counted(len(result.weights), "weight")
    told = [
        f"{count:,} {severity if count == 1 else _PLURALS[severity]} ({_by_check(result.found(severity))})"
        for severity in SEVERITIES
        if (count := result.counts.get(severity, 0))
    ]
    outcome = "sound" if result.is_sound else "not sound"
    said = ", ".join(told) if told else "nothing found"
    return [*sentences, f"{printable(result.source)} is {outcome}: {said}; {made} checks of {weights}."]


def failure_sentence(result: Verification) -> str:
    """What a verification that failed says on stderr."""
    count = result.counts[PROBLEM]
    word = PROBLEM if count == 1 else _PLURALS[PROBLEM]
    return f"{printable(result.source)}: {count:,} {word} ({_by_check(result.found(PROBLEM))})"


def verification_json(result: Verification) -> str:
    """All of it as one object."""
    total = result.distance
    content: dict[str, object] = {
        "source": result.source,
        "layout": result.layout,
        "elements": result.total.elements,
        "bytes": result.total.bytes,
        "by_dtype": {dtype: asdict(part) for dtype, part in result.by_dtype.items()},
        "against": result.against,
        "sound": result.is_sound,
        "counts": {_PLURALS[severity]: result.counts.get(severity, 0) for severity in SEVERITIES},
        "conclusion": conclusion(result),
        "totals": {"tensors": len(result.compared), **_error_record(total)} if result.compared else None,
        "notes": list(result.notes),
        "checks": [_check_record(each) for each in result.results],
        "findings": list(_finding_records(result)),
        "weights": [{key: part for key, part in record.items() if key != "findings"} for record in _records(result)],
    }
    return json_text("verify", content)


def verification_csv(result: Verification) -> str:
    """One row per weight, and one per other place with a finding, under the names of the JSON records; `findings` are
    those of the place."""
    records = list(_records(result))
    known = {place for weight in result.weights for place in weight.places}
    others: dict[str, list[dict[str, object]]] = {}
    for record in _finding_records(result):
        if record["where"] not in known:
            others.setdefault(str(record["where"]), []).append(record)
    records += [{"name": where, **_counted(found), "findings": found} for where, found in others.items()]
    return csv_text(records, RECORD_KEYS)


def _weights(result: Verification) -> str:
    formats = Counter(weight.format for weight in result.weights).most_common()
    told = ", ".join(f"{name} {count:,}" for name, count in formats) or "none that could be read"
    against = "" if result.against is None else f"; against {printable(result.against)}"
    return f"{counted(len(result.weights), 'quantized weight')}: {told}{against}"


def _by_check(results: Sequence[Result]) -> str:
    return ", ".join(f"{result.name} {len(result.findings):,}" for result in results)


def _check_lines(result: Result, screen: Screen, shown: int) -> list[str]:
    lines = [bold(line, screen) for line in folded_lines(f"{result.severity} {result.name}: {result.meaning}", screen)]
    alike = len({(finding.need, finding.way_out) for finding in result.findings}) == 1
    for finding in result.findings[:shown]:
        told = f"  {printable(finding.where)}: {printable(finding.value)}"
        lines += folded_lines(told if alike else f"{told}; {_remedy(finding)}", screen, "    ")
    hidden = len(result.findings) - shown
    if hidden > 0:
        lines.append(f"  and {hidden:,} more" if shown else f"  {hidden:,} found")
    if alike:
        lines += folded_lines(f"  {_remedy(result.findings[0])}", screen, "  ")
    return lines


def _remedy(finding: Finding) -> str:
    return f"needed: {printable(finding.need)}." + (f" {printable(finding.way_out)}" if finding.way_out else "")


def _error_lines(result: Verification, screen: Screen, shown: int) -> list[str]:
    ranked = sorted(result.compared, key=_harm)
    rows: list[Row] = [_error_row(weight) for weight in ranked[:shown]]
    total = ["", "", *_error_cells(result.distance), ""]
    rows += [None, [f"all {counted(len(ranked), 'tensor')}", *total]]
    lines = aligned(_ERRORS, rows, screen)
    if shown < len(ranked):
        lines += folded_lines(f"{shown:,} of {counted(len(ranked), 'tensor')} shown, worst sqnr_db first", screen)
    return lines


def _harm(weight: Verified) -> float:
    sqnr = None if weight.distance is None else weight.distance.sqnr_db
    return math.inf if sqnr is None else sqnr


def _error_row(weight: Verified) -> list[str]:
    assert weight.distance is not None
    whose = "" if weight.origin is None else _short_origin(weight.origin)
    return [
        printable(weight.name),
        shape_text(weight.shape),
        weight.format,
        *_error_cells(weight.distance),
        whose,
    ]


def _error_cells(distance: Distance) -> list[str]:
    if not distance.noise:
        return ["exact", "exact", "0"]
    return [significant(distance.sqnr_db), significant(distance.relative_error), significant(distance.max_abs_error)]


def _short_origin(origin: Provenance) -> str:
    whose = f"{origin.scheme.scale_rule.name} as {origin.scheme.dialect.name}"
    if origin.draws_unknown:
        return "draws not known"
    return whose if origin.exact else f"{_share(origin.equal_blocks, origin.blocks)} of blocks {whose}"


def _share(part: int, whole: int) -> str:
    """A percentage that is 100 only where all of it is meant."""
    percent = 100.0 * part / whole if whole else 0.0
    return f"{min(percent, 99.9):.1f} %" if part < whole else "100 %"


def _origin_sentences(result: Verification) -> Iterator[str]:
    """Whose bytes the weights have, those of most first, and what the others come nearest to."""
    traced = [weight.origin for weight in result.weights if weight.origin is not None]
    exact = Counter(origin.scheme for origin in traced if origin.exact)
    every = len(traced)
    for recipe, count in exact.most_common():
        which = (
            f"all {counted(count, 'weight')} have"
            if count == every
            else f"{counted(count, 'weight')} of {every:,} have"
        )
        yield (
            f"Bytes: {which.replace('1 weight have', '1 weight has')} those of {rules_words(recipe)} "
            f"({recipe.format.name})."
        )
    drawn = sum(1 for origin in traced if origin.draws_unknown)
    if drawn:
        yield (
            f"Bytes: {drawn:,} of {counted(every, 'weight')} {'is' if drawn == 1 else 'are'} said to be of stochastic "
            "rounding, whose draws are not known: no seed is recorded."
        )
    rest = [origin for origin in traced if not origin.exact and not origin.draws_unknown]
    if rest:
        near = Counter(origin.scheme for origin in rest).most_common(1)[0][0]
        mine = [origin for origin in rest if origin.scheme == near]
        equal, blocks = sum(origin.equal_blocks for origin in mine), sum(origin.blocks for origin in mine)
        yield (
            f"Bytes: {counted(len(rest), 'weight')} of {every:,} {'has' if len(rest) == 1 else 'have'} those of no "
            f"rule known here; nearest is mostly {near.scale_rule.name} as {near.dialect.name}, with "
            f"{_share(equal, blocks)} of the blocks tried."
        )


def _check_record(result: Result) -> dict[str, object]:
    return {
        "name": result.name,
        "severity": result.severity,
        "meaning": result.meaning,
        "how": result.how,
        "findings": len(result.findings),
        "skipped": result.skipped,
    }


def _finding_records(result: Verification) -> Iterator[dict[str, object]]:
    for each in result.results:
        for finding in each.findings:
            yield {
                "check": each.name,
                "severity": each.severity,
                "where": finding.where,
                "value": finding.value,
                "need": finding.need,
                "way_out": finding.way_out,
            }


def _records(result: Verification) -> Iterator[dict[str, object]]:
    """A record for each weight, with the findings of the tensors and the module it consists of."""
    by_place: dict[str, list[dict[str, object]]] = {}
    for record in _finding_records(result):
        by_place.setdefault(str(record["where"]), []).append(record)
    for weight in result.weights:
        found = [record for place in weight.places for record in by_place.get(place, ())]
        yield {
            "name": weight.name,
            "format": weight.format,
            "shape": list(weight.shape),
            **_counted(found),
            "amax": weight.summary.amax,
            "tensor_scale": weight.summary.scale,
            **(_error_record(weight.distance) if weight.distance is not None else {}),
            "bytes_of": _origin_record(weight.origin),
            "findings": found,
        }


def _counted(found: Sequence[Mapping[str, object]]) -> dict[str, object]:
    return {_PLURALS[kind]: sum(1 for record in found if record["severity"] == kind) for kind in SEVERITIES}


def _error_record(distance: Distance) -> dict[str, object]:
    return {
        "sqnr_db": distance.sqnr_db,
        "relative_error": distance.relative_error,
        "mse": distance.mse,
        "max_abs_error": distance.max_abs_error,
    }


def _origin_record(origin: Provenance | None) -> dict[str, object] | None:
    if origin is None:
        return None
    return {
        **scheme_record(origin.scheme),
        "exact": origin.exact,
        "equal_blocks": origin.equal_blocks,
        "blocks_tried": origin.blocks,
        "tensor_scale_equal": origin.tensor_scale,
        "draws_unknown": origin.draws_unknown,
    }
