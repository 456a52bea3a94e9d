"""Sentences of `mxcli diff` that name scale rules, element roundings and recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxcli.flows.verify.diff import Diff
    from mxcli.flows.verify.diff_blocks import Explanation

_IDENTIFY = "`mxcli verify --against SOURCE` identifies the rule of each."


def rule_sentences(result: Diff) -> Iterator[str]:
    """Yield the rules and recipes that explain the differences."""
    for name, explained in result.explanations.items():
        yield from _scale_rule_sentences(name, explained)
    yield from _rounding_sentences(result)
    yield from _recipe_sentences(result)


def _rounding_sentences(result: Diff) -> Iterator[str]:
    """Yield the element roundings that explain how codes differ where scales are equal."""
    for name, steps in result.code_steps.items():
        if not steps.pairs:
            continue
        pairs = " or ".join(f"{one} in A and {other} in B" for one, other in steps.pairs)
        yield (
            f"Roundings ({name}): {steps.differing:,} of {steps.elements:,} codes under equal scales are one step "
            f"apart, as {pairs} would make them."
        )


def _recipe_sentences(result: Diff) -> Iterator[str]:
    """Yield the recipes for scales with a mantissa that explain the ratio of the tensor scales."""
    from mxcli.flows.verify.diff_rules import recipes_of

    by_format: dict[str, list[tuple[float, float]]] = {}
    for each in result.tensors:
        if each.blocks is not None and each.blocks.tensor_scales is not None and each.kinds[0] is not None:
            by_format.setdefault(each.kinds[0], []).append(each.blocks.tensor_scales)
    for name, scales in by_format.items():
        for one, other in recipes_of(name, scales):
            rules = f"{_either(one)} in A and {_either(other)} in B"
            yield f"Recipes ({name}): the tensor scales have the ratio of {rules}."


def _scale_rule_sentences(name: str, explained: Explanation) -> Iterator[str]:
    """Yield the rules that explain the scales of a format, or the pair that explains most of them."""
    from mxcli.flows.verify.diff_blocks import rules_of

    pairs, best = explained.pairs, explained.best
    if pairs:
        one, other = (_either(rules_of(pairs, at)) for at in (0, 1))
        unsure = "" if len(pairs) == 1 else f" The scales do not distinguish these rules; {_IDENTIFY}"
        yield f"Rules ({name}): {one} in A and {other} in B explain all {explained.blocks:,} scales tried.{unsure}"
    elif best is not None:
        (first, second), count = best
        blocks = explained.contradictory
        yield (
            f"Rules ({name}): undecided, since no two rules explain all scales tried. {first} in A and {second} in B "
            f"explain {count:,} of {explained.blocks:,}; the rest may come from a rule that searches (best), from "
            "another element rounding, or from other weights"
            + (f"; {blocks:,} blocks cannot both be the same weights rounded to nearest" if blocks else "")
            + f". {_IDENTIFY}"
        )


def _either(rules: Sequence[str]) -> str:
    return rules[0] if len(rules) == 1 else f"{', '.join(rules[:-1])} or {rules[-1]}"
