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
    from mxcli.flows.plan.plan import Options, Plan
    from mxcli.flows.plan.recipe_file import RecipeFile

DEFAULTED = ("format", "nonfinite", "on_indivisible")
"""Options that have a value where none is typed, which a recipe overrides."""


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
    """Return the options of a plan, `named` as on the command line, and the recipe they come from in part.

    Raises UsageError for unknown names, on the command line and then in the recipe, before anything heavy is imported.
    """
    if recipe is None and named["format"] is None:
        raise UsageError("missing option '--format': name a format, or a --recipe that does.")
    from mxcli.numerics.scheme import resolve

    if recipe is None:
        check_names(named["format"], named)
    from mxcli.flows.plan.recipe_file import options_from, options_named, read_recipe

    if recipe is None:
        return options_named(named, selection_rules(selectors), analysis=analysis), None
    content = read_recipe(recipe)
    defaults = {key: value for key, value in named.items() if not _wins(context, key)}
    typed = {key: value for key, value in named.items() if key not in defaults}
    options = options_from(content, typed, selection_rules(selectors), defaults=defaults, analysis=analysis)
    resolve(options.format, options.rules)
    return options, content


def check_names(format: str, named: dict[str, Any]) -> None:
    """Raise UsageError for a format or rule option that is unknown."""
    from mxcli.numerics.scheme import RuleOptions, resolve, rules_from

    resolve(format, rules_from({key: value for key, value in named.items() if key in RuleOptions.__annotations__}))


def rules_for_formats(
    context: typer.Context, recipe: str | None, **named: Any
) -> tuple[dict[str, Any], RecipeFile | None]:
    """Return options by name for verbs that try several formats on every tensor, from the command line and the recipe
    but for its format, and the recipe.

    Nothing is looked up yet. Raises UsageError for a recipe that fixes formats of single tensors.
    """
    if recipe is None:
        return dict(named), None
    from mxcli.flows.plan.recipe_file import for_any_format, merged, read_recipe

    content = for_any_format(read_recipe(recipe))
    typed = {key: value for key, value in named.items() if value is not None and _wins(context, key)}
    return merged(content, typed, named), content


def options_for_formats(
    format: str,
    rules: dict[str, Any],
    recipe: RecipeFile | None,
    selectors: list[str] | None,
    *,
    analysis: bool = False,
) -> Options:
    """Return the options of what `rules_for_formats` found, for one of the formats."""
    from mxcli.flows.plan.recipe_file import options_named

    selection, overrides = (recipe.selection, recipe.overrides) if recipe else ((), ())
    values = {"format": format, **rules}
    return options_named(values, (*selection, *selection_rules(selectors)), overrides, analysis=analysis)


def check_recipe(recipe: RecipeFile | None, checkpoint: Checkpoint) -> None:
    """Raises UsageError naming the selectors of a recipe that take nothing of a source."""
    if recipe is not None:
        from mxcli.flows.plan.recipe_file import check_selectors

        check_selectors(recipe, checkpoint)


def save_recipe(file: str | None, checkpoint: Checkpoint, plan: Plan, comment: str) -> None:
    """Writes the plan's options, resolved, where they were asked for."""
    if file is not None:
        from mxcli.flows.plan.recipe_text import recipe_text, resolved

        deliver(recipe_text(resolved(checkpoint, plan), [comment]), file)


def _wins(context: typer.Context, parameter: str) -> bool:
    """Whether a value is above that of a recipe: not where it only stands for one that was not typed."""
    return parameter not in DEFAULTED or _typed(context, parameter)


def _typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was given on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
