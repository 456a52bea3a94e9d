"""The behavior of a layout's loaders: how they read the list of modules to leave plain, and what they get wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mxcli.files.layouts.renamed import names_of
from mxcli.files.patterns import REGEX, stated_expression

_WILD = frozenset("*?[")

_NEVER_TARGETED = frozenset({"lm_head", "embed_out", "proj_out", "gate", "router"})
"""Last name parts of output heads and routers."""

Names = Callable[[str, str], bool]
"""Returns whether an entry of a list names a module. Raises ValueError for an entry that is not a valid pattern."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """The modules that loaders leave as they are.

    `entries` are listed under `key` of the configuration, `names(entry, module)` is how loaders read one, and `reading`
    states that in words. `targeted(module)` returns whether the configuration targets a linear layer at all: other
    layers need no entry. With `strict`, loaders rely on the list; else they skip the usual kinds by themselves.
    `experts_for` names the loader that needs entries for routers and for stacks of experts ("": all do).
    """

    key: str
    entries: tuple[str, ...]
    names: Names
    reading: str
    targeted: Callable[[str], bool] = lambda module: True
    strict: bool = True
    experts_for: str = ""

    def by(self, module: str) -> str | None:
        """Return the entry that names a module, as its file or transformers calls it; None without one."""
        called = names_of(module)
        return next((entry for entry in self.entries if any(self.names(entry, each) for each in called)), None)


@dataclass(frozen=True, slots=True)
class Hazard:
    """A silent error of loaders: where it is, what is stored, what they need, and the fix; `certain` if every loader
    gets it wrong."""

    where: str
    value: str
    need: str
    way_out: str
    certain: bool = True


def is_usual_layer(module: str) -> bool:
    """Return whether a module is neither output head nor router, which loaders do not expect quantized."""
    return module.rpartition(".")[2] not in _NEVER_TARGETED


def listed(value: object) -> tuple[str, ...]:
    """Return the entries of a list in a configuration; none if it is not a list."""
    return tuple(map(str, value)) if isinstance(value, list) else ()


def exactly(entry: str, module: str) -> bool:
    """Return whether the entry is the path of the module."""
    return entry == module


def by_name_or_regex(entry: str, module: str) -> bool:
    """Return whether the entry is the path of the module or, after `re:`, matches its beginning
    (compressed-tensors)."""
    if not entry.startswith(REGEX):
        return entry == module
    return stated_expression(entry).match(module) is not None


def by_glob_or_part(entry: str, module: str) -> bool:
    """Return whether the entry is the path, a glob over all of it, or occurs in it (ModelOpt, as vLLM reads it)."""
    return entry in module or _fits_glob(entry, module)


def by_glob_or_regex(entry: str, module: str) -> bool:
    """Return whether the entry is the path, a glob over all of it or, after `re:`, matches its beginning (Quark)."""
    return by_name_or_regex(entry, module) or (not entry.startswith(REGEX) and _fits_glob(entry, module))


def by_path(entry: str, module: str) -> bool:
    """Return whether the entry is the path of the module or of one that contains it; `*` stands for anything
    (transformers)."""
    if "*" not in entry:
        return module == entry or module.startswith(f"{entry}.")
    return fnmatchcase(module, _only_stars(entry)) or fnmatchcase(module, f"{_only_stars(entry)}.*")


def _only_stars(entry: str) -> str:
    """Return a glob of an entry in which nothing but `*` stands for anything else."""
    return entry.replace("[", "[[]").replace("?", "[?]")


def _fits_glob(entry: str, module: str) -> bool:
    return not _WILD.isdisjoint(entry) and fnmatchcase(module, entry)


def unread(ignored: Ignored) -> dict[str, str]:
    """Return the entries that are not valid patterns, and why."""
    faults = {}
    for entry in ignored.entries:
        try:
            ignored.names(entry, "")
        except ValueError as fault:
            faults[entry] = str(fault)
    return faults


def unmatched(ignored: Ignored, modules: Iterable[str]) -> list[str]:
    """Return the entries that name none of the modules."""
    paths = [name for module in modules for name in names_of(module)]
    return [entry for entry in ignored.entries if not any(ignored.names(entry, path) for path in paths)]
