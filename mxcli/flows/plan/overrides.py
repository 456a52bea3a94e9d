"""Overrides for single tensors: another format, other rules, or to be kept."""

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
    """Changes for the tensors that a selector matches; of several overrides the later ones win.

    `keep` leaves the tensors as they are. An override with a format starts from the request for all tensors, and keeps
    its scale rule only if that serves the format; one with a dialect takes the dialect's rules unless it names others.
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
        """Raise UsageError for an unknown name, or a rule that does not serve the format."""
        if self.format is not None:
            resolve(self.format, self.rules)


def requests_for(
    tensors: Mapping[str, TensorInfo], default: Request, overrides: Sequence[Override]
) -> tuple[dict[str, Request], list[tuple[str, ...]]]:
    """Return the request for every tensor, and the names that each override selects.

    Raises UsageError naming every override that is invalid or selects nothing.
    """
    found = dict.fromkeys(tensors, default)
    taken, problems = list[tuple[str, ...]](), list[str]()
    prefixes = _prefixes(tensors) if overrides else frozenset[str]()
    checked: set[Request] = set()
    for override in overrides:
        try:
            names = names_matching(override.selector, tensors, prefixes)
            changed = {name: apply_override(found[name], default, override) for name in names}
            for request in set(changed.values()) - checked:
                request.check()
                checked.add(request)
        except UsageError as error:
            problems += [f"override {printable(override.selector)}: {reason}" for reason in error.reasons]
        else:
            found |= changed
            taken.append(names)
    if problems:
        raise together(UsageError, "Overrides that mean nothing here", problems)
    return found, taken


def apply_override(request: Request, default: Request, override: Override) -> Request:
    """Return the request for a tensor after one more override."""
    if override.keep:
        return replace(request, format=None)
    if override.format is not None:
        request = request_in(default, find_format(override.format))
    rules = request.rules
    if override.rules.dialect is not None:
        rules = replace(rules, scale_rounding=None, rounding=None)
    return replace(request, rules=overlaid(rules, tensor_rules(override.rules)))


def request_in(default: Request, fmt: BlockFormat) -> Request:
    """Return the request with another format; its scale rule is left to the dialect where it does not serve that."""
    rules = default.rules if supports_rule(default, fmt) else replace(default.rules, scale_rounding=None)
    return Request(fmt, rules)


def supports_rule(default: Request, fmt: BlockFormat) -> bool:
    """Return whether the requested scale rule serves a format."""
    if default.rules.scale_rounding is None or default.format is None:
        return True
    named = Rules(default.rules.scale_rounding, dialect=default.rules.dialect)
    rule = resolve(default.format, named).scale_rule.name
    return rule in scale_rules(fmt)


def names_matching(
    selector: str, tensors: Mapping[str, TensorInfo], prefixes: frozenset[str] | None = None
) -> tuple[str, ...]:
    """Return the names that a selector matches, as `--include` would; raises UsageError if it is invalid or matches
    none.

    A recipe may list thousands of names, so a plain name is looked up, not compared with all others.
    """
    is_name = selector in tensors and _PATTERN.isdisjoint(selector)
    if is_name and selector not in (_prefixes(tensors) if prefixes is None else prefixes):
        tensors = {selector: tensors[selector]}
    try:
        return select(tensors, (Rule(True, selector),)).taken
    except UsageError as error:
        raise UsageError(error.message.removeprefix(f"{Rule(True, selector)}: ")) from None


def _prefixes(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of all modules."""
    found: set[str] = set()
    for name in names:
        path = name.rpartition(".")[0]
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return frozenset(found)
