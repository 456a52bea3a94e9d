"""What is asked for single tensors in place of what is asked for all: another format, other rules, or to be kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mxcli.errors import UsageError, printable, together
from mxcli.files.selection import Rule, select
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.formats import BlockFormat, find_format
from mxcli.numerics.scheme import Rules, overlaid, resolve, scale_rules, tensor_rules

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
    rules: Rules = Rules()


@dataclass(frozen=True, slots=True)
class Request:
    """The format (None: keep the tensor) and the rules requested for a tensor."""

    format: BlockFormat | None
    rules: Rules = Rules()

    def check(self) -> None:
        """Raise UsageError for a name that means nothing, or a rule that does not serve the format."""
        if self.format is not None:
            resolve(self.format, self.rules)


def requests_for(
    tensors: Mapping[str, TensorInfo], usual: Request, overrides: Sequence[Override]
) -> tuple[dict[str, Request], list[tuple[str, ...]]]:
    """Return what is asked for every tensor, and the names that each override takes.

    Raises UsageError naming every override that means nothing or takes nothing.
    """
    found = dict.fromkeys(tensors, usual)
    taken, problems = list[tuple[str, ...]](), list[str]()
    prefixes = _prefixes(tensors) if overrides else frozenset[str]()
    checked: set[Request] = set()
    for override in overrides:
        try:
            names = names_matching(override.selector, tensors, prefixes)
            changed = {name: apply_override(found[name], usual, override) for name in names}
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


def apply_override(asked: Request, usual: Request, override: Override) -> Request:
    """Return what is asked for a tensor after one more override."""
    if override.keep:
        return replace(asked, format=None)
    if override.format is not None:
        asked = request_in(usual, find_format(override.format))
    rules = asked.rules
    if override.rules.dialect is not None:
        rules = replace(rules, scale_rounding=None, rounding=None)
    return replace(asked, rules=overlaid(rules, tensor_rules(override.rules)))


def request_in(usual: Request, row: BlockFormat) -> Request:
    """Return the request with another format; its scale rule is left to the dialect where it does not serve that."""
    rules = usual.rules if supports_rule(usual, row) else replace(usual.rules, scale_rounding=None)
    return Request(row, rules)


def supports_rule(usual: Request, row: BlockFormat) -> bool:
    """Return whether a format can have the scale rule that is asked for all tensors."""
    if usual.rules.scale_rounding is None or usual.format is None:
        return True
    named = Rules(usual.rules.scale_rounding, dialect=usual.rules.dialect)
    rule = resolve(usual.format, named).scale_rule.name
    return rule in scale_rules(row)


def names_matching(
    selector: str, tensors: Mapping[str, TensorInfo], prefixes: frozenset[str] | None = None
) -> tuple[str, ...]:
    """Return the names a selector takes, as an `--include` of it alone would; raises UsageError if it is none or takes
    none.

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
    """Return every module path that holds something."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)
