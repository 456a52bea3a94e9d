"""What is asked for single tensors in place of what is asked for all: another format, other rules, or to be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mxcli.errors import UsageError, printable, together
from mxcli.files.selection import Rule, select
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.recipe import resolve, scale_rules

_PATTERN = frozenset("*?[@:")


@dataclass(frozen=True, slots=True)
class Override:
    """What is different for the tensors that a selector takes; of several overrides the later ones win.

    With `keep` they stay as they are. One that names a format starts anew from what is asked for all tensors, whose
    scale rule it has only if that serves the format; one that names a dialect takes its rules where it names no other.
    """

    selector: str
    format: str | None = None
    keep: bool = False
    scale_rounding: str | None = None
    rounding: str | None = None
    dialect: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for a tensor: a format (None: to be kept) and rules; None is the dialect's choice."""

    format: BlockFormat | None
    scale_rounding: str | None = None
    rounding: str | None = None
    dialect: str | None = None

    def check(self) -> None:
        """Raises UsageError for a name that means nothing, or a rule that does not serve the format."""
        if self.format is not None:
            resolve(self.format, scale_rounding=self.scale_rounding, rounding=self.rounding, dialect=self.dialect)


def asked_for(
    tensors: Mapping[str, TensorInfo], usual: Asked, overrides: Sequence[Override]
) -> tuple[dict[str, Asked], list[tuple[str, ...]]]:
    """What is asked for every tensor, and the names that each override takes.

    Raises UsageError naming every override that means nothing or takes nothing.
    """
    found = dict.fromkeys(tensors, usual)
    taken, problems = list[tuple[str, ...]](), list[str]()
    prefixes = _prefixes(tensors) if overrides else frozenset[str]()
    checked: set[Asked] = set()
    for override in overrides:
        try:
            names = taken_by(override.selector, tensors, prefixes)
            changed = {name: overridden(found[name], usual, override) for name in names}
            for asked in set(changed.values()) - checked:
                asked.check()
                checked.add(asked)
        except UsageError as error:
            problems += [f"override {printable(override.selector)}: {reason}" for reason in error.reasons]
        else:
            found |= changed
            taken.append(names)
    if problems:
        raise together(UsageError, "Overrides that mean nothing here", problems)
    return found, taken


def overridden(asked: Asked, usual: Asked, override: Override) -> Asked:
    """What is asked for a tensor after one more override."""
    if override.keep:
        return replace(asked, format=None)
    if override.format is not None:
        row = find_format(override.format)
        asked = replace(usual, format=row, scale_rounding=usual.scale_rounding if serves(usual, row) else None)
    if override.dialect is not None:
        asked = replace(asked, dialect=override.dialect, scale_rounding=None, rounding=None)
    return replace(
        asked,
        scale_rounding=override.scale_rounding or asked.scale_rounding,
        rounding=override.rounding or asked.rounding,
    )


def serves(usual: Asked, row: BlockFormat) -> bool:
    """Whether a format can have the scale rule that is asked for all tensors."""
    if usual.scale_rounding is None or usual.format is None:
        return True
    rule = resolve(usual.format, scale_rounding=usual.scale_rounding, dialect=usual.dialect).scale_rule.name
    return rule in scale_rules(row)


def taken_by(
    selector: str, tensors: Mapping[str, TensorInfo], prefixes: frozenset[str] | None = None
) -> tuple[str, ...]:
    """The names a selector takes, as an `--include` of it alone would; raises UsageError if it is none or takes none.

    A recipe may list thousands of names, so one that is just a name is not held against all others.
    """
    is_name = selector in tensors and _PATTERN.isdisjoint(selector)
    if is_name and selector not in (_prefixes(tensors) if prefixes is None else prefixes):
        tensors = {selector: tensors[selector]}
    try:
        return select(tensors, (Rule(True, selector),)).taken
    except UsageError as error:
        raise UsageError(error.message.removeprefix(f"{Rule(True, selector)}: ")) from None


def _prefixes(names: Iterable[str]) -> frozenset[str]:
    """Every module path that holds something."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)
