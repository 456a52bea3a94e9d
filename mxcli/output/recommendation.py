"""A recommendation as a table and sentences, as JSON and as CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.numerics.metrics import number_of
from mxcli.output.conclusion import bold_lines
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import (
    AMOUNT,
    COUNT,
    FLAG,
    METRIC,
    NUMBER,
    SOURCE,
    TENSORS,
    TEXT,
    Field,
    Fields,
    Schema,
    array,
    attributes,
    mapping,
    nested,
    record_of,
    records,
    records_by_name,
)
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, EXACT, counted, quantity, significant, trimmed
from mxcli.output.report import NOTES, OPTIONS
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Row, aligned

if TYPE_CHECKING:
    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.plan.plan import Options
    from mxcli.flows.recommend.baselines import Baseline
    from mxcli.flows.recommend.candidates import Group, Target
    from mxcli.flows.recommend.recommend import GroupChoice, Recommendation
    from mxcli.numerics.metrics import Objective

DEFAULT_SORT = "harm"
_TARGETS = {
    "bits": "at most {:g} bits per element on average, scales included",
    "min_sqnr": "an SQNR of {:g} dB or more for every tensor",
    "keep_percent": "at most {:g} % of the elements kept",
}
"""By `kind`."""
_TARGET: Schema = {**mapping({"type": "number"}), "minProperties": 1, "maxProperties": 1}


@dataclass(frozen=True, slots=True)
class _Effect:
    """The effect of an option on a tensor or a group, which has `elements`."""

    bits: int
    elements: int
    harm: float
    sqnr_db: float


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of a group, with its place there."""

    choice: GroupChoice
    at: int

    @property
    def info(self) -> TensorInfo:
        return self.choice.group.tensors[self.at]

    @property
    def options(self) -> dict[str, _Effect]:
        effects = ((option.name, option.effects[self.at]) for option in self.choice.options)
        return {name: _Effect(each.bits, self.info.elements, each.harm, each.sqnr_db) for name, each in effects}


def _group_options(choice: GroupChoice) -> dict[str, _Effect]:
    elements = choice.group.elements
    return {each.name: _Effect(each.bits, elements, each.harm, each.sqnr_db) for each in choice.options}


_EFFECT: Fields[_Effect] = Fields(
    Field("bits_per_element", lambda effect: effect.bits / effect.elements, AMOUNT),
    Field("harm", lambda effect: effect.harm, AMOUNT),
    Field("sqnr_db", lambda effect: effect.sqnr_db if math.isfinite(effect.sqnr_db) else None, NUMBER,
          meaning="null: exact"),
)  # fmt: skip
_CHOSEN: Field[GroupChoice] = Field(
    "chosen", lambda choice: choice.option.name, TEXT, "chosen", right=False, meaning="the name of one of the options"
)
_GROUP: Fields[GroupChoice] = Fields(
    Field("name", lambda choice: choice.group.name, TEXT, "tensor or group", right=False),
    Field("tensors", lambda choice: [info.name for info in choice.group.tensors], array(TEXT), "tensors", drop=3,
          cell=lambda choice: f"{len(choice.group.tensors):,}"),
    Field("elements", lambda choice: choice.group.elements, COUNT, "elements", drop=4,
          cell=lambda choice: quantity(choice.group.elements)),
    _CHOSEN,
    records_by_name("options", _group_options, _EFFECT),
)  # fmt: skip
_TENSOR: Fields[_Tensor] = Fields(
    Field("name", lambda tensor: tensor.info.name, TEXT),
    Field("group", lambda tensor: tensor.choice.group.name, TEXT),
    Field("role", lambda tensor: tensor.info.role, TEXT),
    Field("dtype", lambda tensor: tensor.info.dtype, TEXT),
    Field("shape", lambda tensor: list(tensor.info.shape), array(COUNT)),
    Field("elements", lambda tensor: tensor.info.elements, COUNT),
    Fields(_CHOSEN).through(lambda tensor: tensor.choice),
    records_by_name("options", lambda tensor: tensor.options, _EFFECT),
)
_ROW: Fields[tuple[_Tensor, str]] = Fields(
    _TENSOR.without("chosen", "options").through(lambda row: row[0]),
    Field("option", lambda row: row[1], TEXT),
    _EFFECT.through(lambda row: row[0].options[row[1]]),
    _TENSOR.only("chosen").through(lambda row: row[0]),
)
"""A tensor under an option: a row of CSV."""
RECORD_KEYS = tuple(_ROW.names)
"""The columns of CSV."""

_BASELINE: Fields[Baseline] = Fields(
    Field("name", lambda baseline: baseline.name, TEXT),
    attributes(AMOUNT, "bits_per_element", "harm"),
)
_RESULT: Fields[Recommendation] = Fields(
    SOURCE,
    Field("target", lambda result: {result.target.kind: result.target.value}, _TARGET),
    record_of("objective", lambda result: result.objective, attributes(TEXT, "name", "formula")),
    Field("formats", lambda result: list(result.formats), array(TEXT)),
    Field("chosen_for_elements", lambda result: result.elements, COUNT),
    attributes(AMOUNT, "bits_per_element", "harm"),
    Field("harm_lower_bound", lambda result: result.bound, AMOUNT),
    Field("exact", lambda result: result.exact, FLAG, meaning="no other choice within the target does less harm"),
    attributes(AMOUNT, "smallest_harm"),
    records("baselines", lambda result: result.baselines, _BASELINE, meaning="simple choices within the target"),
    Field("kept_elements_percent", lambda result: _kept_percent(result), AMOUNT),
    Field("conclusion", lambda result: conclusion(result), array(TEXT)),
    NOTES,
    nested(
        "predicted_totals",
        lambda result: None if result.report is None else result.report.sum,
        Fields(TENSORS, METRIC),
    ),
    Field("recipe", lambda result: _options_record(result.recipe), OPTIONS),
    records("groups", lambda result: result.choices, _GROUP),
    records("tensors", lambda result: _tensors(result), _TENSOR),
)
RECOMMENDATION: Fields[tuple[Recommendation, Sequence[str]]] = Fields(
    _RESULT.through(lambda output: output[0]),
    Field("written", lambda output: list(output[1]), array(TEXT), meaning="files"),
)
"""The JSON of `mxcli recommend`: the recommendation, and the files written."""


@dataclass(frozen=True, slots=True)
class Sort:
    """An order of groups: the sort key, and the order in words."""

    key: Callable[[GroupChoice], float | str]
    words: str


SORTS: dict[str, Sort] = {
    # Per tensor: three fused layers of ordinary harm are as good as each of them.
    "harm": Sort(lambda choice: -_worst(choice) / len(choice.group.tensors), "most harm per tensor first"),
    "sqnr_db": Sort(lambda choice: choice.option.sqnr_db, "lowest SQNR first"),
    "bits_per_element": Sort(lambda choice: -choice.option.bits / choice.group.elements, "most bits first"),
    "elements": Sort(lambda choice: -choice.group.elements, "largest first"),
    "name": Sort(lambda choice: choice.group.name, "in order of name"),
}
"""By the keys of the JSON records."""


def recommendation_text(
    result: Recommendation, screen: Screen, sort: str = DEFAULT_SORT, top: int | None = None
) -> str:
    """Return the target, the groups in the order of `sort`, and the conclusion; `top` limits the groups shown."""
    ranked = sorted(result.choices, key=SORTS[sort].key)
    shown = ranked if top is None else ranked[:top]
    head = [
        source_line(result.source, result.total, result.by_dtype),
        target_line(result.target, [choice.group for choice in result.choices]),
        objective_line(result.objective),
    ]
    lines = [line for text in head for line in folded_lines(text, screen)]
    lines = [bold(lines[0], screen), *lines[1:], ""]
    fields = _table(result)
    rows: list[Row] = [*map(fields.cells, shown), None, _total(result)]
    lines += aligned(fields.columns(), rows, screen)
    lines.append("")
    if len(shown) < len(ranked):
        lines += folded_lines(f"{len(shown):,} of {counted(len(ranked), 'group')} shown, {SORTS[sort].words}", screen)
    return "\n".join([*lines, *bold_lines(conclusion(result), screen)])


def target_line(target: Target, groups: Sequence[Group]) -> str:
    """Return the target, and the number of elements it applies to."""
    tensors = sum(len(group.tensors) for group in groups)
    return (
        f"target: {_TARGETS[target.kind].format(target.value)}; chosen for "
        f"{quantity(sum(group.elements for group in groups))} elements in {counted(tensors, 'tensor')}"
    )


def objective_line(objective: Objective) -> str:
    """Return the definition of harm."""
    return f"harm: error of {objective.of} ({objective.name}), {objective.formula}"


def recommendation_json(result: Recommendation, *, written: Sequence[str] = ()) -> str:
    """Return the recommendation as JSON, with the files written."""
    return json_text("recommend", RECOMMENDATION.record((result, written)))


def recommendation_csv(result: Recommendation) -> str:
    """Return a row per tensor and option, under the names of the JSON records; `option` is the key there."""
    rows = ((tensor, name) for tensor in _tensors(result) for name in tensor.options)
    return csv_text(map(_ROW.record, rows), RECORD_KEYS)


def tensor_records(result: Recommendation) -> Iterator[dict[str, object]]:
    """Return the tensors for JSON lines, in the order of the groups."""
    return map(_TENSOR.record, _tensors(result))


def _tensors(result: Recommendation) -> Iterator[_Tensor]:
    return (_Tensor(choice, at) for choice in result.choices for at in range(len(choice.group.tensors)))


def _options_record(options: Options) -> dict[str, object]:
    from mxcli.flows.write.records import options_record

    return options_record(options)


def conclusion(result: Recommendation) -> list[str]:
    """Return the outcome in words."""
    from mxcli.flows.recommend.candidates import KEEP_PERCENT, MIN_SQNR

    kept, groups = len(result.kept), len(result.choices)
    bits = f"{result.bits_per_element:.4g} bits per element on average"
    first = f"Recommended: {bits}, {_formats(result)}; {kept:,} of {counted(groups, 'group')} kept"
    if result.target.kind == KEEP_PERCENT:
        first += f", {trimmed(_kept_percent(result))} % of the elements"
    sentences = [f"{first}."]
    if kept == groups:
        return [*sentences, "None of the formats is good enough for any group; nothing is quantized."]
    smallest = _smallest(result)
    if result.smallest_harm > 0:
        removed = 100 * (1 - result.harm / result.smallest_harm)
        sentences.append(
            f"That removes {trimmed(removed)} % of the harm that {smallest} throughout would do "
            f"({significant(result.harm)} of {significant(result.smallest_harm)})."
        )
    if result.baselines:
        listed = ", ".join(f"{each.name} {significant(each.harm)}" for each in result.baselines)
        sentences.append(f"Harm of simple choices within the target: {listed}.")
    if result.objective.name == "weight-error":
        sentences.append(
            "The error of weights does not predict the loss: a --text, or --captures with gradients, estimates that."
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
    """Return formats with the number of groups that get them, most used first."""
    count = {name: sum(choice.option.name == name for choice in result.choices) for name in result.formats}
    used = sorted((name for name in count if count[name]), key=lambda name: -count[name])
    return ", ".join(f"{name} for {count[name]:,}" for name in used) or "no format for any"


def _kept_percent(result: Recommendation) -> float:
    return 100 * sum(choice.group.elements for choice in result.kept) / result.elements


def _worst(choice: GroupChoice) -> float:
    return min(choice.options, key=lambda option: option.bits).harm


def _harm(name: str, choice: GroupChoice) -> float | None:
    option = choice.of(name)
    return None if option is None else option.harm


def _table(result: Recommendation) -> Fields[GroupChoice]:
    return Fields(
        _GROUP.only("name", "tensors", "elements"),
        *(Field(name, partial(_harm, name), title="harm", group=name, drop=1) for name in result.formats),
        _CHOSEN,
        Field("bits_per_element", lambda choice: f"{choice.option.bits / choice.group.elements:.4g}",
              title="bits per\nelement", drop=5),
        Field("sqnr_db", lambda choice: _lowest(choice.option.sqnr_db), title="lowest\nSQNR dB", drop=2),
    )  # fmt: skip


def _lowest(sqnr_db: float) -> str:
    return significant(sqnr_db) if math.isfinite(sqnr_db) else EXACT


def _total(result: Recommendation) -> Row:
    """Return the row of totals: the harm of each format that all groups can have, and that of the choice."""
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
