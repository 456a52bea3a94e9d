"""What follows from a comparison, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mxcli.flows.compare import Comparison, sqnr_or_infinity
from mxcli.flows.sums import Metrics, Totals
from mxcli.numerics.metrics import number_of
from mxcli.output.both_axes import axis_sentences
from mxcli.output.comparison_totals import wins
from mxcli.output.conclusion import Standing, conclusion
from mxcli.output.numbers import significant
from mxcli.output.report import estimate_sentences


def concluded(comparison: Comparison) -> list[str]:
    """The comparison in words; nothing was said of nothing."""
    if not comparison.sums:
        return []
    sentences = conclusion(list(_standings(comparison)))
    return [*estimate_sentences(comparison.sample), *sentences, *_of_draws(comparison), *_of_axes(comparison)]


def _standings(comparison: Comparison) -> Iterator[Standing]:
    combinations = comparison.combinations
    for at, (name, recipe, total, won) in enumerate(
        zip(combinations.names, combinations.recipes, comparison.sums, wins(comparison), strict=True)
    ):
        yield Standing(
            format=recipe.format.name,
            rule=name.removeprefix(f"{recipe.format.name} "),
            bits=number_of(total, "bits_per_element") or 0.0,
            saturated_blocks_percent=number_of(total, "saturated_blocks_percent") or 0.0,
            underflowed_percent=number_of(total, "underflowed_percent") or 0.0,
            overall_db=sqnr_or_infinity(total),
            sqnr_db=tuple(sqnr_or_infinity(layer.metrics[at]) for layer in comparison.layers),
            wins=won,
            is_random=recipe.rounding.is_random,
        )


def _of_draws(comparison: Comparison) -> Iterator[str]:
    """The bias of what is rounded by chance, beside that of the same without it."""
    combinations = comparison.combinations
    ways = list(zip(combinations.recipes, combinations.axes, strict=True))
    groups = comparison.groups if comparison.by == "role" else {"everything": comparison.sums}
    pairs = []
    for at, (recipe, axis) in enumerate(ways):
        same = (recipe.format, recipe.scale_rule, recipe.hadamard, axis)
        plain = [
            place
            for place, (other, along) in enumerate(ways)
            if not other.rounding.is_random and (other.format, other.scale_rule, other.hadamard, along) == same
        ]
        # A mean of transformed errors is not that of the values' errors.
        if not (recipe.rounding.is_random and plain) or recipe.hadamard is not None:
            continue
        told = [
            f"{label} {bias} against {other}"
            for label, group in groups.items()
            if (bias := _bias(group[at])) is not None and (other := _bias(group[plain[0]])) is not None
        ]
        if told:
            pairs.append(f"of {combinations.names[at]} against {combinations.names[plain[0]]}: {', '.join(told)}")
    if pairs:
        measured = "Bias (mean error, and how many times RMS error / sqrt(elements), which chance alone has about once)"
        yield f"{measured} {'; '.join(pairs)}."


def _bias(metrics: Metrics) -> str | None:
    """The mean error, and how many times the standard error of a mean of errors that are independent."""
    counted = "sampled_elements" if "sampled_elements" in metrics else "elements"
    bias, rmse, elements = (number_of(metrics, name) for name in ("bias", "rmse", counted))
    if bias is None or not rmse or not elements:
        return None
    return f"{significant(bias)} ({abs(bias) * math.sqrt(elements) / rmse:.1f})"


def _of_axes(comparison: Comparison) -> Iterator[str]:
    """What the axis changes for each role under each recipe; nothing where roles or axes are not told apart."""
    combinations = comparison.combinations
    recipes = list(dict.fromkeys(combinations.recipes))
    if len(set(combinations.axes)) < 2 or comparison.by != "role":
        return
    for recipe in recipes:
        places = [at for at, each in enumerate(combinations.recipes) if each == recipe]
        by_axis = {
            str(combinations.axes[at]): Totals(
                comparison.sums[at], {role: group[at] for role, group in comparison.groups.items()}
            )
            for at in places
        }
        called = combinations.without_axes[places[0]]
        for sentence in axis_sentences(by_axis):
            yield sentence if len(recipes) == 1 else f"{called}: {sentence}"
