"""The rules of a recipe in words."""

from __future__ import annotations

from mxcli.numerics.recipe import Recipe


def rules_words(recipe: Recipe) -> str:
    """How scales and elements are rounded, after which transform and as whom: all that its bytes depend on."""
    seed = f" (seed {recipe.seed})" if recipe.rounding.is_random else ""
    after = f" after {recipe.hadamard.name}" if recipe.hadamard is not None else ""
    return (
        f"scale rounding {recipe.scale_rule.name}, element rounding {recipe.rounding.name}{seed}{after}, as "
        f"{recipe.dialect.name}"
    )
