"""Groups of options: dataclasses whose fields become options of a verb, and the help that lists them by group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer.models import OptionInfo

_ARGUMENTS, _UNGROUPED = "Arguments", "Options"


@dataclass(frozen=True, slots=True)
class Vary:
    """Differences of a group in one verb: the fields that it offers (None: all), defaults and help texts by field."""

    only: Collection[str] | None
    without: Collection[str]
    defaults: Mapping[str, Any]
    help: Mapping[str, str]

    @property
    def names(self) -> set[str]:
        """The fields that it mentions."""
        return {*(self.only or ()), *self.without, *self.defaults, *self.help}

    def offers(self, name: str) -> bool:
        """Return whether the verb has the field as an option."""
        return name not in self.without and (self.only is None or name in self.only)


def vary(
    *,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    help: Mapping[str, str] | None = None,
    **defaults: Any,
) -> Vary:
    """Return the differences of a group in one verb, for `Annotated[Group, vary(...)]`."""
    return Vary(only, without, defaults, help or {})


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as typer needs it: a parameter whose type is a group becomes an option for each of its fields.

    A group is a dataclass with a `heading`, its fields annotated with their typer.Option. The function gets the groups
    built from what was typed. Called from Python it takes groups too.
    """
    flat: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        group, *more = get_args(parameter.annotation) if _is_annotated(parameter) else (parameter.annotation,)
        if not (is_dataclass(group) and hasattr(group, "heading")):
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(group, type)
        options = list(_options(group, more[0] if more else vary()))
        groups[parameter.name] = group, [option.name for option in options]
        flat += options

    @wraps(function)
    def flattened(**values: Any) -> None:
        for name, (group, names) in groups.items():
            if name not in values:
                values[name] = group(**{each: values.pop(each) for each in names})
        function(**values)

    taken = [name for name in groups if any(option.name == name for option in flat)]
    assert not taken, f"{function.__name__}: {taken} are groups and options"
    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in flat}
    return flattened


def typed(context: typer.Context) -> frozenset[str]:
    """Return the names of the parameters that were given on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


class GroupedHelp(TyperCommand):
    """A verb whose help has a heading for every group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of the verb alone, and those of each group in the order of the signature."""
        sections: dict[str, list[tuple[str, str]]] = {_ARGUMENTS: [], _UNGROUPED: []}
        own_help: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                sections[_ARGUMENTS].append(record)
            elif parameter.name == "help":
                own_help.append(record)
            else:
                heading = getattr(parameter, "rich_help_panel", None) or _UNGROUPED
                sections.setdefault(heading, []).append(record)
        sections[list(sections)[-1]] += own_help
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _is_annotated(parameter: inspect.Parameter) -> bool:
    return get_origin(parameter.annotation) is Annotated


def _options(group: type, variation: Vary) -> Iterator[inspect.Parameter]:
    """Yield the options of a group that a verb offers."""
    known = {field.name: field for field in fields(group)}
    assert variation.names <= known.keys(), f"{group.__name__} has no {variation.names - known.keys()}"
    changed = {*variation.defaults, *variation.help}
    assert all(map(variation.offers, changed)), f"{group.__name__}: only options that are offered can vary: {changed}"
    for name, field in known.items():
        if variation.offers(name):
            kind, declared = _hints(group)[name]
            option = copy(declared)
            option.rich_help_panel = option.rich_help_panel or _heading(group, name)
            option.help = variation.help.get(name, option.help)
            default = variation.defaults.get(name, _default(field))
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )


def _heading(group: type, name: str) -> str:
    """Return the heading of the class that declares the field."""
    declaring = next(each for each in group.__mro__ if name in inspect.get_annotations(each))
    return str(declaring.heading)  # type: ignore[attr-defined]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


@cache
def _hints(group: type) -> dict[str, tuple[Any, OptionInfo]]:
    hints = get_type_hints(group, include_extras=True)
    return {field.name: get_args(hints[field.name]) for field in fields(group)}
