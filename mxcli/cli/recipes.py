"""Options of a plan from the command line and a recipe file, which the command line overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from mxcli.cli.arguments import INCLUDE
from mxcli.cli.groups import typed
from mxcli.cli.options import SchemeOptions
from mxcli.cli.terminal import Messages, deliver
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.files.selection import Rule
    from mxcli.flows.plan.plan import Options, Plan
    from mxcli.flows.plan.recipe_file import RecipeFile
    from mxcli.numerics.scheme import Rules


@dataclass(frozen=True, slots=True)
class Requested:
    """Options by name: those typed, those that stand for options not typed, and the recipe between them, if any.

    `any_format` says that the verb tries several formats on every tensor.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    recipe: RecipeFile | None
    any_format: bool

    @property
    def rules(self) -> Rules:
        """The rule options for all tensors; raises UsageError for an unknown transform."""
        from mxcli.numerics.scheme import RuleOptions, rules_from

        return rules_from({name: self[name] for name in RuleOptions.__annotations__})

    def __getitem__(self, name: str) -> Any:
        """Return the value of an option for all tensors."""
        if self.recipe is None:
            return {**self.defaults, **self.given}[name]
        from mxcli.flows.plan.recipe_file import merged

        return merged(self.recipe, self.given, self.defaults).get(name)

    def options(self, selectors: Sequence[str] | None, *, analysis: bool = False) -> Options:
        """Return the options of a plan, the selectors after those of the recipe.

        Raises UsageError for an unknown format or rule.
        """
        from mxcli.flows.plan.recipe_file import options_from, options_named
        from mxcli.numerics.scheme import resolve

        rules = selection_rules(selectors)
        if self.recipe is None:
            return options_named({**self.defaults, **self.given}, rules, analysis=analysis)
        options = options_from(self.recipe, self.given, rules, defaults=self.defaults, analysis=analysis)
        if not self.any_format:
            resolve(options.format, options.rules)
        return options

    def check_selectors(self, checkpoint: Checkpoint) -> None:
        """Raise UsageError naming the selectors of the recipe that match nothing in a source."""
        if self.recipe is not None:
            from mxcli.flows.plan.recipe_file import check_selectors

            check_selectors(self.recipe, checkpoint)


def requested_options(context: typer.Context, scheme: SchemeOptions, formats: Sequence[str] = ()) -> Requested:
    """Return the options of the command line and its recipe; `formats` replace the recipe's format.

    Nothing heavy is imported without a recipe. Raises UsageError for a missing format, for an unknown format or rule
    on the command line, and for a recipe that has a format for single tensors where several are tried.
    """
    named = scheme.named | ({"format": formats[0]} if formats else {})
    typed_names = typed(context) | ({"format"} if formats else set())
    given = {name: value for name, value in named.items() if name in typed_names}
    defaults = {name: value for name, value in named.items() if name not in given}
    if scheme.recipe is not None:
        from mxcli.flows.plan.recipe_file import for_any_format, read_recipe

        recipe = read_recipe(scheme.recipe)
        return Requested(given, defaults, for_any_format(recipe) if formats else recipe, bool(formats))
    if named["format"] is None:
        raise UsageError("missing option '--format': name a format, or a --recipe that does.")
    requested = Requested(given, defaults, None, bool(formats))
    if not formats:
        from mxcli.numerics.scheme import resolve

        resolve(named["format"], requested.rules)
    return requested


def selection_rules(selectors: Sequence[str] | None) -> tuple[Rule, ...]:
    """Return the rules of selectors that are marked + or -, in their order."""
    from mxcli.files.selection import Rule

    return tuple(Rule(marked.startswith(INCLUDE), marked[1:]) for marked in selectors or ())


def report_decisions(plans: Sequence[Plan], messages: Messages) -> None:
    """Print why each tensor is quantized or kept, if verbose."""
    from mxcli.flows.measure.report import planned_layers

    for decided in planned_layers(*plans):
        messages.detail(f"{printable(decided.name)}: {decided.reason}")


def save_recipe(file: str | None, checkpoint: Checkpoint, plan: Plan, comment: str) -> None:
    """Write the options of a plan, every rule named, if a file is requested."""
    if file is not None:
        from mxcli.flows.plan.recipe_text import recipe_text, resolved

        deliver(recipe_text(resolved(checkpoint, plan), [comment]), file)
