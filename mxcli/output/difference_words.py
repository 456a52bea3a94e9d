"""In what two checkpoints differ, and why, in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mxcli.errors import printable
from mxcli.files.directory import GGUF
from mxcli.files.gguf import GGUF_NAMES
from mxcli.flows.verify.diff import AXIS, EQUAL, TRANSFORM, Diff, Difference, Treatment
from mxcli.flows.verify.diff_blocks import BlockDifference, Explanation, rules_of
from mxcli.numerics.formats import find_format
from mxcli.numerics.hadamard import Hadamard
from mxcli.output.numbers import counted, significant

MOST_STEPS = 3
"""Distances of scales that are told by themselves."""
_WORDS = {1: "one", 2: "two", 3: "three"}
_SURE = "`mxcli verify --against SOURCE` tells which made either."


def conclusion(result: Diff) -> list[str]:
    """In what the two differ, and why, in words."""
    sentences = [*_treatment_sentences(result), *_code_sentences(result), *_scale_sentences(result)]
    sentences += _tensor_scale_sentences(result)
    sentences += [sentence for row, told in result.explanations.items() for sentence in _rule_sentences(row, told)]
    return [*sentences, *_layout_sentences(result), *_name_sentences(result), outcome(result)]


def outcome(result: Diff) -> str:
    """Whether they are the same, in a sentence."""
    a, b = (printable(side.name) for side in result.sides)
    every, differing = len(result.tensors), len(result.differing)
    if not differing:
        return f"{a} and {b} are the same: {counted(every, 'tensor')}."
    words = ", ".join(f"{word} {count:,}" for word, count in result.counts.items() if word != EQUAL)
    return f"{a} and {b} differ in {differing:,} of {counted(every, 'tensor')}: {words}."


def failure_sentence(result: Diff) -> str:
    """What a comparison that found a difference says on stderr."""
    return " ".join([*_name_sentences(result), outcome(result)]).removesuffix(".")


def _blocks(result: Diff) -> list[BlockDifference]:
    return [each.blocks for each in result.tensors if each.blocks is not None]


def _treatment_sentences(result: Diff) -> Iterator[str]:
    """Weights that were quantized along another axis, or after another transform, and how far their values are
    apart."""
    told: dict[tuple[str, str, str], list[Difference]] = {}
    for each in result.tensors:
        if each.treatments is not None:
            for word in (AXIS, TRANSFORM):
                if word in each.differs:
                    told.setdefault((word, *_treatments(word, each.treatments)), []).append(each)
    for (word, one, other), parts in told.items():
        errors = [
            error for each in parts if each.distance is not None and (error := each.distance.relative_error) is not None
        ]
        apart = f"; values differ by up to {significant(max(errors))} (relative)" if errors else ""
        yield (
            f"{word.capitalize()}: {one} in A and {other} in B, of {counted(len(parts), 'weight')}: codes and scales "
            f"are not compared{apart}."
        )


def _treatments(word: str, treatments: tuple[Treatment, Treatment]) -> tuple[str, str]:
    """What both sides do, in words that tell them apart."""
    one, other = treatments
    if word == AXIS:
        return f"blocks along {one.axis}s", f"along {other.axis}s"
    if one.hadamard is not None and other.hadamard is not None and one.hadamard.size == other.hadamard.size:
        return one.hadamard.name, f"{other.hadamard.name} with other signs"
    return _transform(one.hadamard), _transform(other.hadamard)


def _transform(hadamard: Hadamard | None) -> str:
    return "none" if hadamard is None else hadamard.name


def _code_sentences(result: Diff) -> Iterator[str]:
    parts = _blocks(result)
    codes, elements = sum(part.codes for part in parts), sum(part.elements for part in parts)
    if not codes:
        return
    blocks = sum(part.blocks_in_codes for part in parts)
    zeros, steps = sum(part.zero_signs for part in parts), sum(part.one_step for part in parts)
    sentence = (
        f"Codes: {codes:,} of {elements:,} differ ({percent(codes, elements)} %), in {blocks:,} of "
        f"{sum(part.blocks for part in parts):,} blocks; {steps:,} by one step, {zeros:,} in the sign of a zero only."
    )
    if not any(part.scales or part.tensor_scales for part in parts):
        sentence += (
            " The scales are the same: only signs of zeros are treated differently."
            if zeros == codes
            else " The scales are the same, so the elements were rounded or divided in another way."
        )
    yield sentence


def _scale_sentences(result: Diff) -> Iterator[str]:
    """Differing scales by format: how many, and by how many steps."""
    by_format: dict[str, list[BlockDifference]] = {}
    for each in result.tensors:
        if each.blocks is not None and each.blocks.scales and each.kinds[0] is not None:
            by_format.setdefault(each.kinds[0], []).append(each.blocks)
    for name, parts in by_format.items():
        steps = sum((Counter(part.steps) for part in parts), Counter[int]())
        scales, blocks = sum(part.scales for part in parts), sum(part.blocks for part in parts)
        nan = sum(part.nan_scales for part in parts)
        row = find_format(name).scale
        unit = "code" if row.bits == 8 and row.mantissa_bits else "binade" if row.mantissa_bits else "step"
        listed = [_told(step, count, unit) for step, count in steps.most_common(MOST_STEPS)]
        told = ", ".join([*listed, *([f"{nan:,} NaN in one of them"] if nan else [])])
        more = f" and {len(steps) - MOST_STEPS:,} other distances" if len(steps) > MOST_STEPS else ""
        yield f"Scales ({name}): {scales:,} of {blocks:,} differ ({percent(scales, blocks)} %): {told}{more}."


def _told(step: int, count: int, unit: str) -> str:
    if not step:
        return f"{count:,} within a {unit}"
    many = _WORDS.get(abs(step), f"by {abs(step):,}")
    return f"{count:,} {many} {unit}{'' if abs(step) == 1 else 's'} {'lower' if step > 0 else 'higher'} in A"


def _tensor_scale_sentences(result: Diff) -> Iterator[str]:
    scales = [part.tensor_scales for part in _blocks(result) if part.tensor_scales is not None]
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


def _rule_sentences(row: str, told: Explanation) -> Iterator[str]:
    """The rules that explain the scales of a format, as far as that can be told."""
    pairs = told.pairs
    if pairs:
        one, other = (_either(rules_of(pairs, at)) for at in (0, 1))
        unsure = "" if len(pairs) == 1 else f" They do not tell these rules apart; {_SURE}"
        yield f"Rules ({row}): {one} in A and {other} in B explain all {told.blocks:,} scales tried.{unsure}"
        return
    best = told.best
    if best is None:
        return
    (first, second), count = best
    yield (
        f"Rules ({row}): undecided, for no two rules explain all scales tried. {first} in A and {second} in B explain "
        f"{count:,} of {told.blocks:,}; the rest may be of a rule that searches (best), of elements rounded otherwise, "
        f"or of other weights{_contradiction(told)}. {_SURE[0].upper()}{_SURE[1:]}"
    )


def _contradiction(told: Explanation) -> str:
    if not told.contradictory:
        return ""
    return f"; {told.contradictory:,} blocks cannot both be the same weights rounded to nearest"


def _either(rules: Sequence[str]) -> str:
    return rules[0] if len(rules) == 1 else f"{', '.join(rules[:-1])} or {rules[-1]}"


def _layout_sentences(result: Diff) -> Iterator[str]:
    """How far values are apart where the parts are the same and the layouts are not."""
    layouts = [side.layout for side in result.sides]
    if layouts[0] == layouts[1]:
        return
    same = [each for each in result.tensors if each.blocks is not None and each.is_equal and each.distance is not None]
    if not same:
        return
    apart = [error for each in same if each.distance is not None and (error := each.distance.relative_error)]
    values = f"values differ by up to {significant(max(apart))} (relative)" if apart else "so have the values"
    yield (
        f"Layouts: {layouts[0]} and {layouts[1]}; {counted(len(same), 'weight')} have the same codes and scales, "
        f"{values}."
    )


def _name_sentences(result: Diff) -> Iterator[str]:
    """Why nothing is in both, where that is known."""
    gguf = [side.kind == GGUF for side in result.sides]
    if gguf[0] != gguf[1] and not any(each.kinds[0] and each.kinds[1] for each in result.tensors):
        yield GGUF_NAMES


def percent(part: int, whole: int) -> str:
    """A share as tables and sentences show it."""
    return significant(100.0 * part / whole if whole else 0.0)
