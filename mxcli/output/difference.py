"""The difference of two checkpoints as text, as JSON and as CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import Hadamard, signs_text
from mxcli.output.conclusion import bold_lines
from mxcli.output.difference_rules import rule_sentences
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import (
    AMOUNT,
    AXIS,
    COUNT,
    FLAG,
    NUMBER,
    SOURCE,
    TEXT,
    TEXT_OR_NULL,
    Field,
    Fields,
    array,
    mapping,
    nested,
    or_null,
    record_of,
    records,
)
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import aligned

if TYPE_CHECKING:
    from mxcli.flows.verify.diff import Diff, Difference, SideSummary, Treatment
    from mxcli.flows.verify.diff_blocks import BlockDifference, Explanation
    from mxcli.flows.verify.errors import Distance

SHOWN = 20
"""Tensors that the text shows by default."""
MOST_STEPS = 3
"""Distances of scales that are listed; the others are counted."""
_WORDS = {1: "one", 2: "two", 3: "three"}


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def _percent_cell(part: int, whole: int) -> str:
    return significant(_percent(part, whole))


def _tensor_scale(blocks: BlockDifference, at: int) -> float | None:
    return None if blocks.tensor_scales is None else blocks.tensor_scales[at]


def _side_fields(side: str, at: int) -> Fields[Difference]:
    return Fields(
        Field(f"in_{side}", lambda each: each.kinds[at], TEXT_OR_NULL, f"in {side.upper()}", right=False, drop=4,
              cell=lambda each: _kind(each, at)),
        Field(f"shape_{side}", lambda each: _list(each.shapes[at]), or_null(array(COUNT))),
    )  # fmt: skip


def _treatment_fields(side: str, at: int) -> Fields[tuple[Treatment, Treatment]]:
    return Fields(
        Field(f"axis_{side}", lambda pair: pair[at].axis, AXIS),
        Field(f"hadamard_signs_{side}", lambda pair: _signs(pair[at].hadamard), TEXT_OR_NULL),
    )


_BLOCKS: Fields[BlockDifference] = Fields(
    Field("elements", lambda blocks: blocks.elements, COUNT),
    Field("blocks", lambda blocks: blocks.blocks, COUNT),
    Field("codes", lambda blocks: blocks.codes, COUNT),
    Field("codes_percent", lambda blocks: _percent(blocks.codes, blocks.elements), AMOUNT, "codes\n% of elements"),
    Field("codes_sign_of_zero", lambda blocks: blocks.zero_signs, COUNT),
    Field("codes_one_step", lambda blocks: blocks.one_step, COUNT),
    Field("blocks_with_codes", lambda blocks: blocks.blocks_in_codes, COUNT, "blocks\n% with codes", drop=3,
          cell=lambda blocks: _percent_cell(blocks.blocks_in_codes, blocks.blocks)),
    Field("scales", lambda blocks: blocks.scales, COUNT),
    Field("scales_percent", lambda blocks: _percent(blocks.scales, blocks.blocks), AMOUNT, "scales\n% of blocks"),
    Field("scale_steps", lambda blocks: {str(step): count for step, count in blocks.steps.items()}, mapping(COUNT),
          "steps\nfrom A to B", right=False, drop=2,
          meaning="scales by how many steps those of B are above those of A"),
    Field("tensor_scale_a", lambda blocks: _tensor_scale(blocks, 0), NUMBER),
    Field("tensor_scale_b", lambda blocks: _tensor_scale(blocks, 1), NUMBER),
    Field("nan_scales", lambda blocks: blocks.nan_scales, COUNT,
          meaning="scales that differ and of which one is NaN"),
)  # fmt: skip
_OF_BLOCKS: Fields[Difference] = _BLOCKS.optional().through(lambda each: each.blocks)
_DISTANCE: Fields[Distance] = Fields(
    Field("relative_difference", lambda distance: distance.relative_error, NUMBER, "relative\ndifference",
          cell=lambda distance: _relative(distance)),
    Field("max_abs_difference", lambda distance: distance.max_abs_error, NUMBER),
)  # fmt: skip
_TREATMENTS = Fields(_treatment_fields("a", 0), _treatment_fields("b", 1))
_TENSOR: Fields[Difference] = Fields(
    Field("name", lambda each: each.name, TEXT, "tensor", right=False),
    Fields(_side_fields("a", 0), _side_fields("b", 1)).only("in_a", "in_b", "shape_a", "shape_b"),
    Field("differs", lambda each: list(each.differs), array(TEXT), "differs in", right=False, drop=1,
          meaning="in what; empty where nothing differs"),
    _OF_BLOCKS.without("nan_scales", "scale_steps", "tensor_scale_a", "tensor_scale_b"),
    _OF_BLOCKS["scale_steps"].at(cell=lambda each: "" if each.blocks is None else _steps(each.blocks.steps)),
    _OF_BLOCKS.only("tensor_scale_a", "tensor_scale_b"),
    _DISTANCE.optional().through(lambda each: each.distance),
    _OF_BLOCKS["nan_scales"],
    _TREATMENTS.only("axis_a", "axis_b", "hadamard_signs_a", "hadamard_signs_b").optional().through(
        lambda each: each.treatments),
    Field("by_record", lambda each: each.by_record, FLAG,
          meaning="equal by the hashes in both records; its bytes were not read"),
)  # fmt: skip
RECORD_KEYS = tuple(_TENSOR.names)
"""The columns of CSV."""

_SIDE: Fields[SideSummary] = Fields(
    Field("source", lambda side: side.name, TEXT),
    Field("layout", lambda side: side.layout, TEXT_OR_NULL),
    SOURCE.without("source"),
)
_PAIR: Fields[tuple[str, str]] = Fields(
    Field("a", lambda pair: pair[0], TEXT),
    Field("b", lambda pair: pair[1], TEXT),
)
_RULE: Fields[tuple[str, Explanation]] = Fields(
    Field("format", lambda of: of[0], TEXT),
    Field("blocks", lambda of: of[1].blocks, COUNT),
    records("explained_by", lambda of: of[1].pairs, _PAIR, meaning="pairs of rules that explain all scales"),
    nested("nearest", lambda of: of[1].best,
           Fields(_PAIR.through(lambda best: best[0]), Field("blocks", lambda best: best[1], COUNT))),
    Field("contradictory_blocks", lambda of: of[1].contradictory, COUNT),
)  # fmt: skip
DIFFERENCE: Fields[Diff] = Fields(
    record_of("a", lambda result: result.sides[0], _SIDE),
    record_of("b", lambda result: result.sides[1], _SIDE),
    Field("same", lambda result: not result.differing, FLAG),
    Field("counts", lambda result: dict(result.counts), mapping(COUNT)),
    Field("conclusion", lambda result: conclusion(result), array(TEXT)),
    records("rules", lambda result: result.explanations.items(), _RULE),
    records("tensors", lambda result: result.tensors, _TENSOR),
)
"""The JSON of `mxcli diff`."""


def difference_text(result: Diff, screen: Screen, top: int | None = None) -> str:
    """Return both sides, the tensors that differ, the largest difference first, and the conclusion."""
    lines = [bold(line, screen) for at in (0, 1) for line in folded_lines(_headline(result, at), screen)]
    ranked = sorted(result.differing, key=_rank)
    shown = ranked[: SHOWN if top is None else top]
    if ranked:
        rows = [_TENSOR.cells(each) for each in shown]
        lines += ["", *aligned(_TENSOR.columns(), rows, screen)] if shown else [""]
        if len(shown) < len(ranked):
            lines += folded_lines(f"{len(shown):,} of {counted(len(ranked), 'tensor')} shown, the most first", screen)
    return "\n".join([*lines, "", *bold_lines(conclusion(result), screen)])


def difference_json(result: Diff) -> str:
    """Return the difference as JSON, with the tensors that are equal."""
    return json_text("diff", DIFFERENCE.record(result))


def difference_csv(result: Diff) -> str:
    """Return a row per tensor under the names of the JSON records."""
    return csv_text(map(_TENSOR.record, result.tensors), RECORD_KEYS)


def _headline(result: Diff, at: int) -> str:
    side = result.sides[at]
    layout = "not quantized" if side.layout is None else f"quantized ({side.layout})"
    return f"{'AB'[at]}: {source_line(side.name, side.total, side.by_dtype)}; {layout}"


def _rank(each: Difference) -> tuple[bool, float, float]:
    """Return the sort key: tensors that cannot be compared first, then by the difference in values, then in codes."""
    distance, blocks = each.distance, each.blocks
    if distance is None:
        return False, 0.0, 0.0
    error = distance.relative_error
    share = 0.0 if blocks is None else _percent(blocks.codes, blocks.elements)
    return True, -(math.inf if error is None and distance.noise else error or 0.0), -share


def _kind(each: Difference, at: int) -> str:
    """Return the format or dtype on one side, with the axis and the transform if they differ from the other's."""
    from mxcli.flows.verify import diff

    words = [each.kinds[at] or ABSENT]
    if each.treatments is not None:
        treatment = each.treatments[at]
        if diff.AXIS in each.differs:
            words.append(f"by {treatment.axis}")
        if diff.TRANSFORM in each.differs and treatment.hadamard is not None:
            words.append(treatment.hadamard.name)
    return " ".join(words)


def _steps(steps: Mapping[int, int]) -> str:
    most = sorted(steps.items(), key=lambda item: -item[1])
    shown = [f"{step:+d}: {count:,}" for step, count in most[:MOST_STEPS]]
    return ", ".join(shown + (["…"] if len(most) > MOST_STEPS else []))


def _relative(distance: Distance) -> str:
    if not distance.noise:
        return "not finite" if distance.unmatched else "0"
    return significant(distance.relative_error)


def _list(shape: tuple[int, ...] | None) -> list[int] | None:
    return None if shape is None else list(shape)


def _signs(hadamard: Hadamard | None) -> str | None:
    return None if hadamard is None else signs_text(hadamard)


def conclusion(result: Diff) -> list[str]:
    """Return the differences and their reasons in words."""
    blocks = [each.blocks for each in result.tensors if each.blocks is not None]
    return [
        *_treatment_sentences(result),
        *_code_sentences(blocks),
        *_scale_sentences(result),
        *_tensor_scale_sentences(result, blocks),
        *rule_sentences(result),
        *_layout_sentences(result),
        *_name_sentences(result),
        *_record_sentences(result),
        outcome(result),
    ]


def outcome(result: Diff) -> str:
    """Return a sentence on whether they are the same."""
    from mxcli.flows.verify.diff import EQUAL

    a, b = (printable(side.name) for side in result.sides)
    tensors, differing = counted(len(result.tensors), "tensor"), len(result.differing)
    if not differing:
        unread = sum(1 for each in result.tensors if each.by_record)
        how = f", {unread:,} of them by the hashes in both records" if unread else ""
        return f"{a} and {b} are the same{' by their records' if unread else ''}: {tensors}{how}."
    words = ", ".join(f"{word} {count:,}" for word, count in result.counts.items() if word != EQUAL)
    return f"{a} and {b} differ in {differing:,} of {tensors}: {words}."


def failure_sentence(result: Diff) -> str:
    """Return the error of a comparison that found a difference."""
    return " ".join([*_name_sentences(result), outcome(result)]).removesuffix(".")


def _treatment_sentences(result: Diff) -> Iterator[str]:
    """Yield the weights quantized along another axis, or after another transform, and the distance of their values."""
    from mxcli.flows.verify.diff import AXIS, TRANSFORM

    apart: dict[tuple[str, str, str], list[Difference]] = {}
    for each in result.tensors:
        if each.treatments is not None:
            if AXIS in each.differs:
                one, other = (treatment.axis for treatment in each.treatments)
                apart.setdefault((AXIS, f"blocks along {one}s", f"along {other}s"), []).append(each)
            if TRANSFORM in each.differs:
                apart.setdefault((TRANSFORM, *_transforms(each.treatments)), []).append(each)
    for (word, in_a, in_b), parts in apart.items():
        errors = [
            error for each in parts if each.distance is not None and (error := each.distance.relative_error) is not None
        ]
        by = f"; values differ by up to {significant(max(errors))} (relative)" if errors else ""
        yield (
            f"{word.capitalize()}: {in_a} in A and {in_b} in B, of {counted(len(parts), 'weight')}: codes and scales "
            f"are not compared{by}."
        )


def _transforms(treatments: tuple[Treatment, Treatment]) -> tuple[str, str]:
    one, other = (treatment.hadamard for treatment in treatments)
    if one is not None and other is not None and one.size == other.size:
        return one.name, f"{other.name} with other signs"
    return "none" if one is None else one.name, "none" if other is None else other.name


def _code_sentences(parts: Sequence[BlockDifference]) -> Iterator[str]:
    codes, elements = sum(part.codes for part in parts), sum(part.elements for part in parts)
    if not codes:
        return
    blocks, zeros = sum(part.blocks_in_codes for part in parts), sum(part.zero_signs for part in parts)
    sentence = (
        f"Codes: {codes:,} of {elements:,} differ ({_percent_cell(codes, elements)} %), in {blocks:,} of "
        f"{sum(part.blocks for part in parts):,} blocks; {sum(part.one_step for part in parts):,} by one step, "
        f"{zeros:,} in the sign of a zero only."
    )
    if not any(part.scales or part.tensor_scales for part in parts):
        sentence += (
            " The scales are the same: only signs of zeros are treated differently."
            if zeros == codes
            else " The scales are the same, so the elements were rounded or divided in another way."
        )
    yield sentence


def _scale_sentences(result: Diff) -> Iterator[str]:
    """Yield the scales that differ by format: how many, and by how many steps."""
    by_format: dict[str, list[BlockDifference]] = {}
    for each in result.tensors:
        if each.blocks is not None and each.blocks.scales and each.kinds[0] is not None:
            by_format.setdefault(each.kinds[0], []).append(each.blocks)
    for name, parts in by_format.items():
        steps = sum((Counter(part.steps) for part in parts), Counter[int]())
        scales, blocks = sum(part.scales for part in parts), sum(part.blocks for part in parts)
        nan, scale = sum(part.nan_scales for part in parts), find_format(name).scale
        unit = "code" if scale.bits == 8 and scale.mantissa_bits else "binade" if scale.mantissa_bits else "step"
        listed = [_step_words(step, count, unit) for step, count in steps.most_common(MOST_STEPS)]
        listed += [f"{nan:,} NaN in one of them"] if nan else []
        more = f" and {len(steps) - MOST_STEPS:,} other distances" if len(steps) > MOST_STEPS else ""
        share = _percent_cell(scales, blocks)
        yield f"Scales ({name}): {scales:,} of {blocks:,} differ ({share} %): {', '.join(listed)}{more}."


def _step_words(step: int, count: int, unit: str) -> str:
    if not step:
        return f"{count:,} within a {unit}"
    many = _WORDS.get(abs(step), f"by {abs(step):,}")
    return f"{count:,} {many} {unit}{'' if abs(step) == 1 else 's'} {'lower' if step > 0 else 'higher'} in A"


def _tensor_scale_sentences(result: Diff, parts: Sequence[BlockDifference]) -> Iterator[str]:
    scales = [part.tensor_scales for part in parts if part.tensor_scales is not None]
    ratios = [two / one for one, two in scales if 0 < one < math.inf and 0 < two < math.inf]
    if ratios:
        low, high = min(ratios), max(ratios)
        times = f"{low:.4g}" if math.isclose(low, high, rel_tol=1e-6) else f"{low:.4g} to {high:.4g}"
        yield f"Tensor scales: {counted(len(ratios), 'weight')} differ; B's are {times} times A's."
    for at, count in enumerate(result.fused):
        if count:
            one, other = "AB"[at], "BA"[at]
            sets = "a fused set shares its" if count == 1 else f"{count:,} fused sets (q, k, v; gate, up) share their"
            yield f"Tensor scales: in {one} {sets} tensor scale, in {other} not."


def _layout_sentences(result: Diff) -> Iterator[str]:
    """Yield the distance of values where the parts are the same and the layouts are not."""
    one, other = (side.layout for side in result.sides)
    same = [each for each in result.tensors if each.blocks is not None and each.is_equal and each.distance is not None]
    if one != other and same:
        apart = [error for each in same if each.distance is not None and (error := each.distance.relative_error)]
        values = f"values differ by up to {significant(max(apart))} (relative)" if apart else "so have the values"
        yield f"Layouts: {one} and {other}; {counted(len(same), 'weight')} have the same codes and scales, {values}."


def _record_sentences(result: Diff) -> Iterator[str]:
    """Yield the number of tensors that were not read."""
    if unread := sum(1 for each in result.tensors if each.by_record):
        yield (
            f"Records: {counted(unread, 'tensor')} {'has' if unread == 1 else 'have'} the same hash in both; "
            f"{'it was' if unread == 1 else 'they were'} not read."
        )


def _name_sentences(result: Diff) -> Iterator[str]:
    """Yield the reason why no tensor is in both, where that is known."""
    from mxcli.files.directory import GGUF
    from mxcli.files.gguf import GGUF_NAMES

    gguf = [side.kind == GGUF for side in result.sides]
    if gguf[0] != gguf[1] and not any(each.kinds[0] and each.kinds[1] for each in result.tensors):
        yield GGUF_NAMES
