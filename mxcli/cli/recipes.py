"""Options that come from the command line and from a recipe, which it overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from mxcli.cli.arguments import INCLUDE
from mxcli.cli.streams import deliver
from mxcli.errors import UsageError

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.files.selection import Rule
    from mxcli.flows.plan import Options, Plan
    from mxcli.flows.recipes import RecipeFile
    from mxcli.numerics.hadamard import Hadamard

DEFAULTED = ("format", "nonfinite", "on_indivisible")
"""Options that have a value where none is typed, which a recipe overrides."""


def plan_options(
    format: str,
    scale_rounding: str | None,
    rounding: str | None,
    dialect: str | None,
    selectors: list[str] | None,
    *,
    nonfinite: str,
    on_indivisible: str,
    layout: str | None = None,
    fuse: str | None = None,
    axis: str | None = None,
    seed: int | None = None,
    hadamard: Hadamard | None = None,
    analysis: bool = False,
) -> Options:
    """The options of a plan as typed; `selectors` are marked + or - and stand in their order.

    Raises UsageError for a name that means nothing, before anything heavy is imported.
    """
    from mxcli.numerics.recipe import resolve

    rules: dict[str, Any] = {
        "scale_rounding": scale_rounding,
        "rounding": rounding,
        "dialect": dialect,
        "nonfinite": nonfinite,
    }
    resolve(format, **rules, seed=seed or 0)
    from mxcli.flows.plan import Options

    return Options(
        format=format,
        scale_rounding=scale_rounding,
        rounding=rounding,
        dialect=dialect,
        nonfinite=nonfinite,
        on_indivisible=on_indivisible,
        selection=selection_rules(selectors),
        layout=layout,
        fuse=fuse,
        axis=axis,
        seed=seed,
        hadamard=hadamard,
        analysis=analysis,
    )


def selection_rules(selectors: list[str] | None) -> tuple[Rule, ...]:
    """The rules as typed, in their order: each is marked + or -."""
    from mxcli.files.selection import Rule

    return tuple(Rule(marked.startswith(INCLUDE), marked[1:]) for marked in selectors or ())


def merged_options(
    context: typer.Context,
    recipe: str | None,
    selectors: list[str] | None,
    *,
    analysis: bool = False,
    **named: Any,
) -> tuple[Options, RecipeFile | None]:
    """The options of a plan, `named` by its fields, and the recipe that they come from in part.

    Raises UsageError for names that mean nothing, on the command line and then in the recipe.
    """
    if recipe is None:
        if named["format"] is None:
            raise UsageError("missing option '--format': name a format, or a --recipe that does.")
        return plan_options(selectors=selectors, analysis=analysis, **named), None
    from mxcli.flows.recipes import options_from, read_recipe
    from mxcli.numerics.recipe import resolve

    content = read_recipe(recipe)
    defaults = {key: value for key, value in named.items() if not _wins(context, key)}
    typed = {key: value for key, value in named.items() if key not in defaults}
    options = options_from(content, typed, selection_rules(selectors), defaults=defaults, analysis=analysis)
    resolve(
        options.format,
        scale_rounding=options.scale_rounding,
        rounding=options.rounding,
        dialect=options.dialect,
        nonfinite=options.nonfinite,
    )
    return options, content


def rules_for_formats(
    context: typer.Context, recipe: str | None, **named: Any
) -> tuple[dict[str, Any], RecipeFile | None]:
    """For verbs that try several formats on every tensor: all that is `named`, by the fields of Options, on the command
    line and in the recipe but for its format, and the recipe.

    Nothing is looked up yet. Raises UsageError for a recipe that fixes formats of single tensors.
    """
    if recipe is None:
        return dict(named), None
    from mxcli.flows.recipes import for_any_format, read_recipe

    content = for_any_format(read_recipe(recipe))
    typed = {key: value for key, value in named.items() if value is not None and _wins(context, key)}
    return {**named, **content.named, **typed}, content


def options_for_formats(
    format: str,
    rules: dict[str, Any],
    recipe: RecipeFile | None,
    selectors: list[str] | None,
    *,
    analysis: bool = False,
) -> Options:
    """The options of what `rules_for_formats` found, for one of the formats."""
    from mxcli.flows.plan import Options

    selection = selection_rules(selectors)
    if recipe is None:
        return Options(format, **rules, selection=selection, analysis=analysis)
    selection, overrides = (*recipe.selection, *selection), recipe.overrides
    return Options(format, **rules, selection=selection, overrides=overrides, analysis=analysis)


def check_recipe(recipe: RecipeFile | None, checkpoint: Checkpoint) -> None:
    """Raises UsageError naming the selectors of a recipe that take nothing of a source."""
    if recipe is not None:
        from mxcli.flows.recipes import check_selectors

        check_selectors(recipe, checkpoint)


def save_recipe(file: str | None, checkpoint: Checkpoint, plan: Plan, comment: str) -> None:
    """Writes the plan's options, resolved, where they were asked for."""
    if file is not None:
        from mxcli.flows.recipe_text import recipe_text, resolved

        deliver(recipe_text(resolved(checkpoint, plan), [comment]), file)


def _wins(context: typer.Context, parameter: str) -> bool:
    """Whether a value is above that of a recipe: not where it only stands for one that was not typed."""
    return parameter not in DEFAULTED or _typed(context, parameter)


def _typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
