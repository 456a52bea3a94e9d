"""The blocks of a model, as the names of its layers number them, and which of them a training recipe keeps high."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import printable
from mxcli.numerics.training import TrainingRecipe, high_blocks

Block = tuple[str, int]
"""A stack of blocks, which is what stands before the number in the names of its layers, and the number of one."""
High = Mapping[str, frozenset[Block]]
"""The blocks that stay high, by the name of the recipe."""

# Dumps may have made `_` of every dot, so where no name has a number between dots, one between those counts.
_NUMBERED = (re.compile(r"(^|.*?\.)(\d+)\."), re.compile(r"(^|.*?[._])(\d+)[._]"))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The block of each layer that is in one, and the numbers of the blocks of each stack, in order; `is_whole` says
    that all layers of the model were asked, and not captured ones alone."""

    of: Mapping[str, Block]
    stacks: Mapping[str, tuple[int, ...]]
    is_whole: bool = True

    @property
    def count(self) -> int:
        """Blocks of all stacks."""
        return sum(map(len, self.stacks.values()))

    def high(self, recipe: TrainingRecipe) -> frozenset[Block]:
        """The blocks that stay high under a recipe, in every stack."""
        return frozenset(
            (stack, numbers[at])
            for stack, numbers in self.stacks.items()
            for at in high_blocks(recipe.high, len(numbers))
        )


def blocks_of(layers: Iterable[str], *, is_whole: bool = True) -> Blocks:
    """The blocks that the names of layers tell: their first number between dots; where none has one, between dots or
    underscores."""
    names = list(layers)
    found: dict[str, Block] = {}
    for pattern in _NUMBERED:
        found = {name: (match[1], int(match[2])) for name in names if (match := pattern.match(name))}
        if found:
            break
    stacks: dict[str, set[int]] = {}
    for stack, number in found.values():
        stacks.setdefault(stack, set()).add(number)
    return Blocks(found, {stack: tuple(sorted(numbers)) for stack, numbers in stacks.items()}, is_whole)


def shown(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Blocks as their layers' names begin."""
    return tuple(f"{stack}{number}" for stack, number in sorted(blocks))


def high_notes(recipes: Sequence[TrainingRecipe], blocks: Blocks, layers: Sequence[str]) -> list[str]:
    """What is to be said about blocks that recipes keep high, `layers` being those whose products are computed: a
    sentence about each set of them, or that none can be told, or that others may be the model's last."""
    asking: dict[tuple[frozenset[Block], str], list[str]] = {}
    for recipe in recipes:
        if recipe.high.is_any:
            asking.setdefault((blocks.high(recipe), recipe.high.words), []).append(recipe.name)
    notes = []
    for (kept, words), names in asking.items():
        recipe_names = ", ".join(names)
        if not kept:
            notes.append(
                f"{recipe_names}: no block stays high, though {words} should: names of layers, such as "
                f"'{printable(layers[0])}', have no number of a block."
            )
            continue
        there = sum(blocks.of.get(layer) in kept for layer in layers)
        first = ", ".join(shown(kept)[:3])
        notes.append(
            f"{recipe_names}: {len(kept):,} of {blocks.count:,} blocks stay high ({words}: {printable(first)}"
            f"{', …' if len(kept) > 3 else ''}); the products of {there:,} layer{'' if there == 1 else 's'} there are "
            "exact."
        )
    if asking and blocks.count and not blocks.is_whole:
        notes.append(
            "Blocks were counted among the captured layers, as the captures do not say which others the model has: its "
            "first and last may be others."
        )
    return notes
