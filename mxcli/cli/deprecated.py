"""Deprecated options of `mxcli report`, which run the verbs that replaced them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import typer

from mxcli.cli.groups import typed
from mxcli.cli.machine import Machine
from mxcli.cli.options import Measuring, SchemeOptions, Selection
from mxcli.cli.outputs import Results
from mxcli.cli.terminal import Messages
from mxcli.errors import UsageError

_MEASURING = ("sample", "fail_on", "per_block", "dry_run", "jsonl", "markdown", "html", "plots")
_REFUSED_WITH_PRODUCTS = frozenset(("axis", *_MEASURING))


@dataclass(frozen=True, slots=True)
class DeprecatedOptions(Measuring):
    """The extent of a report, and hidden options that are verbs now."""

    training: Annotated[
        str | None, typer.Option("--training", hidden=True, help="Former spelling of `mxcli training`.")
    ] = None
    draws: Annotated[
        int | None,
        typer.Option("--draws", min=1, max=64, hidden=True, help="Former spelling of `mxcli training --draws`."),
    ] = None
    products: Annotated[
        str | None, typer.Option("--products", hidden=True, help="Former spelling of `mxcli products`.")
    ] = None
    activation_format: Annotated[
        str | None,
        typer.Option(
            "--activation-format", hidden=True, help="Former spelling of `mxcli products --activation-format`."
        ),
    ] = None
    gradient_format: Annotated[
        str | None,
        typer.Option("--gradient-format", hidden=True, help="Former spelling of `mxcli products --gradient-format`."),
    ] = None


def ran_as_other_verb(
    context: typer.Context,
    source: str,
    scheme: SchemeOptions,
    selection: Selection,
    former: DeprecatedOptions,
    output: tuple[Results, Machine, Messages],
) -> bool:
    """Run `mxcli training` or `mxcli products` if the former options of report request it, and return whether one ran.

    Raises UsageError for options that the verb does not have.
    """
    results, machine, messages = output
    shared = {"selection": selection, "results": results, "machine": machine, "messages": messages}
    if former.training is None and former.draws is not None:
        raise UsageError("--draws needs --training: it repeats stochastic rounding.")
    if former.products is None and (former.activation_format or former.gradient_format):
        raise UsageError("--activation-format and --gradient-format need --products CAPTURES.")
    if former.training is not None:
        from mxcli.cli.training import TrainingOptions, training

        _refuse(context, _refused_with_training(), "--training", "training recipes set all formats and rules")
        _announce("training", messages)
        options = TrainingOptions(former.products, former.training, former.draws or 1, scheme.seed)
        training(context=context, source=source, options=options, **shared)
        return True
    if former.products is not None:
        from mxcli.cli.products import ProductScheme, products

        _refuse(context, _REFUSED_WITH_PRODUCTS, "--products", "`mxcli products` has other outputs")
        _announce("products", messages)
        named = {field.name: getattr(scheme, field.name) for field in fields(SchemeOptions)}
        formats = ProductScheme(
            **named, activation_format=former.activation_format, gradient_format=former.gradient_format
        )
        products(context=context, model=source, captures=former.products, scheme=formats, **shared)
        return True
    return False


def _refused_with_training() -> frozenset[str]:
    """Return the options of formats and rules except the seed, and those of measuring."""
    from mxcli.numerics.scheme import RuleOptions

    rules = {"axis", "on_indivisible", *RuleOptions.__annotations__} - {"seed"}
    return frozenset(("format", "recipe", "activation_format", "gradient_format", *rules, *_MEASURING))


def _refuse(context: typer.Context, names: frozenset[str], flag: str, why: str) -> None:
    given = typed(context)
    refused = [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name in names and parameter.name in given
    ]
    if refused:
        raise UsageError(f"{', '.join(refused)} cannot be combined with {flag}: {why}.")


def _announce(name: str, messages: Messages) -> None:
    messages.notes([f"report --{name} is now `mxcli {name}`; the old spelling goes away in the next release."])
