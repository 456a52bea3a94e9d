"""A recommendation as a table and sentences, as JSON and as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from mxcli.errors import printable
from mxcli.flows.recommend.candidates import BITS, KEEP_PERCENT, MIN_SQNR, Effect, Group, Target
from mxcli.flows.recommend.recommend import GroupChoice, Recommendation
from mxcli.flows.write.records import options_record
from mxcli.numerics.metrics import Objective, number_of
from mxcli.output.export import csv_text, json_text
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, counted, quantity, significant, trimmed
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

DEFAULT_SORT = "harm"
RECORD_KEYS = (
    "name", "group", "role", "dtype", "shape", "elements", "option", "bits_per_element", "harm", "sqnr_db", "chosen"
)  # fmt: skip
_TARGETS = {
    BITS: "at most {:g} bits per element on average, scales included",
    MIN_SQNR: "an SQNR of {:g} dB or more for every tensor",
    KEEP_PERCENT: "at most {:g} % of the elements kept",
}


@dataclass(frozen=True, slots=True)
class Sort:
    """An order of groups: by what, and in words."""

    key: Callable[[GroupChoice], float | str]
    words: str


SORTS: dict[str, Sort] = {
    # Per tensor: three fused layers of ordinary harm are no worse than each of them.
    "harm": Sort(lambda choice: -_worst(choice) / len(choice.group.tensors), "most harm per tensor first"),
    "sqnr_db": Sort(lambda choice: choice.option.sqnr_db, "lowest SQNR first"),
    "bits_per_element": Sort(lambda choice: -choice.option.bits / choice.group.elements, "most bits first"),
    "elements": Sort(lambda choice: -choice.group.elements, "largest first"),
    "name": Sort(lambda choice: choice.group.name, "in order of name"),
}
"""By the names of the JSON records."""


def recommendation_text(
    result: Recommendation, screen: Screen, sort: str = DEFAULT_SORT, top: int | None = None
) -> str:
    """What was asked, the groups in the order of `sort`, and the outcome in words; `top` limits the groups shown."""
    ranked = sorted(result.choices, key=SORTS[sort].key)
    shown = ranked if top is None else ranked[:top]
    head = [
        source_line(result.source, result.total, result.by_dtype),
        target_line(result.target, [choice.group for choice in result.choices]),
        objective_line(result.objective),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines = [bold(lines[0], screen), *lines[1:], ""]
    lines += aligned(_columns(result), [*(_row(choice, result) for choice in shown), None, _total(result)], screen)
    lines.append("")
    if len(shown) < len(ranked):
        lines += folded_lines(f"{len(shown):,} of {counted(len(ranked), 'group')} shown, {SORTS[sort].words}", screen)
    for sentence in conclusion(result):
        first, *rest = folded_lines(sentence, screen, "  ")
        lines += [bold(first, screen), *(bold(line, screen) for line in rest)]
    return "\n".join(lines)


def target_line(target: Target, groups: Sequence[Group]) -> str:
    """What is asked, and of how much."""
    tensors = sum(len(group.tensors) for group in groups)
    return (
        f"target: {_TARGETS[target.kind].format(target.value)}; chosen for "
        f"{quantity(sum(group.elements for group in groups))} elements in {counted(tensors, 'tensor')}"
    )


def objective_line(objective: Objective) -> str:
    """What harm is."""
    return f"harm: error of {objective.of} ({objective.name}), {objective.formula}"


def recommendation_json(result: Recommendation, **more: object) -> str:
    """The whole recommendation as one object; `more` are further keys."""
    report = result.report
    content: dict[str, object] = {
        "source": result.source,
        "elements": result.total.elements,
        "bytes": result.total.bytes,
        "by_dtype": {dtype: asdict(total) for dtype, total in result.by_dtype.items()},
        "target": {result.target.kind: result.target.value},
        "objective": {"name": result.objective.name, "formula": result.objective.formula},
        "formats": list(result.formats),
        "chosen_for_elements": result.elements,
        "bits_per_element": result.bits_per_element,
        "harm": result.harm,
        "harm_lower_bound": result.bound,
        "exact": result.exact,
        "smallest_harm": result.smallest_harm,
        "kept_elements_percent": _kept_percent(result),
        "conclusion": conclusion(result),
        "notes": list(result.notes),
        "predicted_totals": None if report is None else report.sum,
        "recipe": options_record(result.recipe),
        "groups": [_group_record(choice) for choice in result.choices],
        "tensors": list(tensor_records(result)),
        **more,
    }
    return json_text("recommend", content)


def recommendation_csv(result: Recommendation) -> str:
    """One row per tensor and option, under the names of the JSON records; `option` is the key there."""
    rows = (
        {**tensor, "option": name, **effect} for tensor in tensor_records(result) for name, effect in _options(tensor)
    )
    return csv_text(rows, RECORD_KEYS)


def conclusion(result: Recommendation) -> list[str]:
    """The outcome in words."""
    kept, groups = len(result.kept), len(result.choices)
    bits = f"{result.bits_per_element:.4g} bits per element on average"
    first = f"Recommended: {bits}, {_formats(result)}; {kept:,} of {counted(groups, 'group')} kept"
    if result.target.kind == KEEP_PERCENT:
        first += f", {trimmed(_kept_percent(result))} % of the elements"
    sentences = [f"{first}."]
    if kept == groups:
        return [*sentences, "No format named is good enough for any group: there is nothing to quantize."]
    smallest = _smallest(result)
    if result.smallest_harm > 0:
        removed = 100 * (1 - result.harm / result.smallest_harm)
        sentences.append(
            f"That removes {trimmed(removed)} % of the harm that {smallest} throughout would do "
            f"({significant(result.harm)} of {significant(result.smallest_harm)})."
        )
    if result.target.kind == MIN_SQNR:
        worst = min(result.choices, key=lambda choice: choice.option.sqnr_db)
        if math.isfinite(worst.option.sqnr_db):
            sentences.append(
                f"No choice is smaller; the lowest SQNR of {result.objective.of} is "
                f"{significant(worst.option.sqnr_db)} dB, in {printable(worst.group.name)}."
            )
    elif result.exact:
        sentences.append("No other choice within the target does less harm.")
    else:
        above = 100 * (result.harm / result.bound - 1) if result.bound > 0 else math.inf
        sentences.append(
            f"The search was ended early: this is within {significant(above)} % of the least harm possible."
        )
    return sentences


def _smallest(result: Recommendation) -> str:
    names = {min(choice.options, key=lambda option: option.bits).name for choice in result.choices}
    return next(iter(names)) if len(names) == 1 else "the smallest format of each group"


def _formats(result: Recommendation) -> str:
    """Formats with the number of groups that get them, most used first."""
    count = {name: sum(choice.option.name == name for choice in result.choices) for name in result.formats}
    used = sorted((name for name in count if count[name]), key=lambda name: -count[name])
    return ", ".join(f"{name} for {count[name]:,}" for name in used) or "no format for any"


def _kept_percent(result: Recommendation) -> float:
    return 100 * sum(choice.group.elements for choice in result.kept) / result.elements


def _worst(choice: GroupChoice) -> float:
    return min(choice.options, key=lambda option: option.bits).harm


def _columns(result: Recommendation) -> Sequence[Column]:
    return (
        Column("tensor or group", right=False),
        Column("tensors", drop=3),
        Column("elements", drop=4),
        *(Column("harm", group=name, drop=1) for name in result.formats),
        Column("chosen", right=False),
        Column("bits per\nelement", drop=5),
        Column("lowest\nSQNR dB", drop=2),
    )


def _row(choice: GroupChoice, result: Recommendation) -> Row:
    group, option = choice.group, choice.option
    harms = [None if (each := choice.of(name)) is None else each.harm for name in result.formats]
    return [
        printable(group.name),
        f"{len(group.tensors):,}",
        quantity(group.elements),
        *(significant(harm) for harm in harms),
        option.name,
        f"{option.bits / group.elements:.4g}",
        significant(option.sqnr_db) if math.isfinite(option.sqnr_db) else "exact",
    ]


def _total(result: Recommendation) -> Row:
    """Everything: the harm where every group that can has a format, and what was chosen."""
    harms = []
    for name in result.formats:
        options = [choice.of(name) for choice in result.choices]
        harms.append(None if None in options else math.fsum(option.harm for option in options if option))
    sqnr = None if result.report is None or result.report.sum is None else number_of(result.report.sum, "sqnr_db")
    return [
        f"all {counted(len(result.choices), 'group')}",
        f"{sum(len(choice.group.tensors) for choice in result.choices):,}",
        quantity(result.elements),
        *(significant(harm) for harm in harms),
        f"harm {significant(result.harm)}",
        f"{result.bits_per_element:.4g}",
        ABSENT if sqnr is None else f"all {significant(sqnr)}",
    ]


def _group_record(choice: GroupChoice) -> dict[str, object]:
    group = choice.group
    return {
        "name": group.name,
        "tensors": [info.name for info in group.tensors],
        "elements": group.elements,
        "chosen": choice.option.name,
        "options": {
            option.name: {
                "bits_per_element": option.bits / group.elements,
                "harm": option.harm,
                "sqnr_db": option.sqnr_db if math.isfinite(option.sqnr_db) else None,
            }
            for option in choice.options
        },
    }


def tensor_records(result: Recommendation) -> Iterator[dict[str, object]]:
    """The tensors for JSON and JSON lines, in the order of the groups."""
    for choice in result.choices:
        for at, info in enumerate(choice.group.tensors):
            yield {
                "name": info.name,
                "group": choice.group.name,
                "role": info.role,
                "dtype": info.dtype,
                "shape": list(info.shape),
                "elements": info.elements,
                "chosen": choice.option.name,
                "options": {option.name: _effect(option.effects[at], info.elements) for option in choice.options},
            }


def _options(tensor: dict[str, object]) -> list[tuple[str, dict[str, object]]]:
    options = tensor["options"]
    return list(options.items()) if isinstance(options, dict) else []


def _effect(effect: Effect, elements: int) -> dict[str, object]:
    sqnr = effect.sqnr_db if math.isfinite(effect.sqnr_db) else None
    return {"bits_per_element": effect.bits / elements, "harm": effect.harm, "sqnr_db": sqnr}
