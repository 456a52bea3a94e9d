"""Targets of config groups: modules by name, by regular expression or by class, as compressed-tensors, vLLM and SGLang
read them, and the modules of a group as few regular expressions.

Expressions match from the beginning of a name, so each starts with `(.*\\.)?`: loaders put other prefixes before the
same layer (`model.layers.0`, `model.language_model.layers.0`, `layers.0`). They end with `$`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Generic, TypeVar

from mxcli.files.layouts.renamed import names_of
from mxcli.files.patterns import REGEX, stated_expression

LINEAR = "Linear"
EXPERTS = ("FusedMoE", "RoutedExperts")
"""The classes in which vLLM (by version) and SGLang hold all experts of a layer. They look experts up by the names
`0.gate_proj`, `0.up_proj`, `0.down_proj`, which not every model has, and then by class."""
_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
_JOINED = (
    ("qkv_proj", frozenset({"q_proj", "k_proj", "v_proj"})),
    ("qkv_proj", frozenset({"query", "key", "value"})),
    ("gate_up_proj", frozenset({"gate_proj", "up_proj"})),
    ("gate_up_proj", frozenset({"w1", "w3"})),
    ("gate_up_proj", frozenset({"w1", "w2"})),
    ("gate_up_proj", frozenset({"c_fc_0", "c_fc_1"})),
)
"""The names of joined layers, and their parts (vLLM 0.32, SGLang 0.5.23)."""
_WRAPPED = ".base_layer"
"""The end of a module's name inside a LoRA layer, which loaders that merge or omit the LoRA leave out."""
_ANYWHERE = r"(.*\.)?"
_ANY_NUMBER = r"\d+"
_GENERAL = frozenset({"model", "module", "base_model", "transformer", "backbone"})
"""Names that loaders put before, or omit from, those of any module."""

Numbers = tuple[int, ...]
Meaning = TypeVar("Meaning")


def is_class(target: str) -> bool:
    """Return whether a target is the name of a class of modules: one word that begins with a capital."""
    return target.isidentifier() and target[0].isupper()


def is_expert(module: str) -> bool:
    """Return whether a module is a layer of one of several experts."""
    return _EXPERT.search(module) is not None


def classes_of(module: str) -> tuple[str, ...]:
    """Return the classes that loaders know a linear layer by, the usual one first."""
    return (LINEAR, *EXPERTS) if is_expert(module) else (LINEAR,)


@dataclass(frozen=True, slots=True)
class Targets(Generic[Meaning]):
    """Meanings of targets, ranked as compressed-tensors ranks them: names, then regular expressions in order of their
    text, then classes."""

    names: Mapping[str, Meaning]
    expressions: Sequence[tuple[re.Pattern[str], Meaning]]
    classes: Mapping[str, Meaning]

    def of(self, module: str) -> Meaning | None:
        """Return what the target of a linear layer means; None if it has none."""
        if module in self.names:
            return self.names[module]
        matching = (meaning for pattern, meaning in self.expressions if pattern.match(module))
        by_class = (self.classes[name] for name in classes_of(module) if name in self.classes)
        return next(chain(matching, by_class), None)


def read_targets(meanings: Iterable[tuple[Iterable[str], Meaning]]) -> Targets[Meaning]:
    """Return the targets of config groups with what each group means; of equal ones the first counts, and one that is
    not a valid regular expression matches nothing."""
    found: dict[str, Meaning] = {}
    for targets, meaning in meanings:
        for target in targets:
            found.setdefault(target, meaning)
    patterns = ((_pattern(target), found[target]) for target in sorted(found) if target.startswith(REGEX))
    return Targets(
        {target: meaning for target, meaning in found.items() if not target.startswith(REGEX)},
        [(pattern, meaning) for pattern, meaning in patterns if isinstance(pattern, re.Pattern)],
        {target: meaning for target, meaning in found.items() if is_class(target)},
    )


def invalid_targets(targets: Iterable[str]) -> list[str]:
    """Return what is wrong with each target that is not a valid regular expression."""
    patterns = (_pattern(target) for target in targets if target.startswith(REGEX))
    return [f"the target {pattern}" for pattern in patterns if isinstance(pattern, str)]


def _pattern(target: str) -> re.Pattern[str] | str:
    """Return the regular expression of a target that has one, or what is wrong with it."""
    try:
        return stated_expression(target)
    except ValueError as error:
        return str(error)


def targets_of(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return targets that match all the modules, under any prefix, and none of the others.

    The classes of experts follow if all experts are among the modules.
    """
    modules, others = list(modules), list(others)
    plain = {*others, *_joined(others, whole=False)}
    names = [name for module in modules for name in names_of(module) if name == module or name not in plain]
    names += [name for name in _joined(modules, whole=True) if name not in plain]
    rest = plain.union(*map(names_of, others)).difference(names)
    experts = any(map(is_expert, modules)) and not any(map(is_expert, others))
    return [*fold(names, rest), *(EXPERTS if experts else ())]


def _joined(modules: Iterable[str], *, whole: bool) -> Iterator[str]:
    """Yield the names that engines give the layers which they join from parts, of which all (`whole`) or some are here:
    SGLang does not know the parts of the joined layers of every model, Llama's among them."""
    by_parent: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        parent, _, part = module.rpartition(".")
        by_parent[parent].add(part)
    for parent, parts in by_parent.items():
        here = [name for name, members in _JOINED if (members <= parts if whole else members & parts)]
        names = set() if is_expert(f"{parent}.") else set(here)
        yield from (f"{parent}.{name}" for name in sorted(names - parts))


@dataclass(frozen=True, slots=True)
class _Path:
    """A module's name in two parts: `lead`, the names before the first list of modules, and `parts`, all from the name
    of that list on; numbers are None in `parts` and follow as `numbers`. A `wrapped` module is inside a LoRA layer."""

    name: str
    lead: tuple[str, ...]
    parts: tuple[str | None, ...]
    numbers: Numbers
    wrapped: bool


@dataclass(frozen=True, slots=True)
class _Expression:
    """A regular expression in parts: what precedes the last name, and that name."""

    beginning: str
    end: str


def fold(modules: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return regular expressions after `re:` that match all the modules and none of the others; names where no
    expression is exact. Numbers of layers and experts are folded."""
    by_end: dict[str, list[str]] = defaultdict(list)
    for name in others:
        by_end[_last(name)].append(name)
    alike: dict[object, list[_Path]] = defaultdict(list)
    for name in dict.fromkeys(modules):
        path = _path(name)
        alike[path.parts, path.wrapped].append(path)
    expressions: dict[str, set[str]] = defaultdict(set)
    names: list[str] = []
    for paths in alike.values():
        for found in _exact(paths, by_end.get(_last(paths[0].name), [])):
            if isinstance(found, _Expression):
                expressions[found.beginning].add(found.end)
            else:
                names.append(found)
    joined = [f"{REGEX}{beginning}{_any_of(sorted(ends))}$" for beginning, ends in expressions.items()]
    return [*sorted(joined), *sorted(names)]


def _last(name: str) -> str:
    """Return the last part of a name, the same for all numbers."""
    last = name.removesuffix(_WRAPPED).rpartition(".")[2]
    return "0" if last.isdecimal() else last


def _path(name: str) -> _Path:
    parts = name.removesuffix(_WRAPPED).split(".")
    first = next((at for at, part in enumerate(parts) if at and part.isdecimal()), None)
    # Without a list, the module and its parent: what contains them has other names in other loaders.
    start = max(0, len(parts) - 2) if first is None else first - 1
    spelled = tuple(None if part.isdecimal() and str(int(part)) == part else part for part in parts[start:])
    numbers = tuple(int(part) for part, kept in zip(parts[start:], spelled, strict=True) if kept is None)
    return _Path(name, tuple(parts[:start]), spelled, numbers, name.endswith(_WRAPPED))


def _exact(paths: Sequence[_Path], rivals: Sequence[str]) -> Iterator[_Expression | str]:
    """Yield expressions for paths that differ in lead and numbers only, the shortest that match no rival: for all of
    them, else by their first number, else by their lead."""
    for numbers in _spellings(paths):
        for beginning in (_ANYWHERE, *_without(paths, rivals)):
            expression = _expression(beginning, paths, numbers)
            if not _matches_any(expression, rivals):
                yield expression
                return
    groups = _by_first_number(paths)
    leads = sorted({path.lead for path in paths})
    if len(groups) > 1:
        for group in groups:
            yield from _exact(group, rivals)
    elif len(leads) > 1:
        for lead in leads:
            yield from _exact([path for path in paths if path.lead == lead], rivals)
    else:
        yield from _under_lead(paths, rivals)


def _without(paths: Sequence[_Path], rivals: Sequence[str]) -> Iterator[str]:
    """Yield a beginning that refuses the names which only rivals are inside of, such as that of a vision tower."""
    own = {part for path in paths for part in (*path.lead, *path.parts)}
    matched = re.compile(_whole(_expression(_ANYWHERE, paths, _spellings(paths)[0])))
    foreign = set()
    for rival in filter(matched.match, rivals):
        inside = (part for part in rival.split(".") if part not in own and not part.isdecimal())
        foreign.add(next((part for part in inside if part not in _GENERAL), ""))
    if foreign and "" not in foreign:
        yield rf"(?!{_ANYWHERE}{_any_of(sorted(map(re.escape, foreign)))}\.){_ANYWHERE}"


def _by_first_number(paths: Sequence[_Path]) -> list[list[_Path]]:
    """Return the paths by first number, those together whose further numbers are the same."""
    further: dict[int, set[Numbers]] = defaultdict(set)
    for path in paths:
        if path.numbers:
            further[path.numbers[0]].add(path.numbers[1:])
    groups: dict[object, list[_Path]] = defaultdict(list)
    for path in paths:
        groups[frozenset(further[path.numbers[0]]) if path.numbers else None].append(path)
    return list(groups.values())


def _under_lead(paths: Sequence[_Path], rivals: Sequence[str]) -> Iterator[_Expression | str]:
    """Yield one expression for paths of one lead, with the last name of it that keeps rivals out, or all of it; the
    names themselves if rivals match even so."""
    lead = paths[0].lead
    whole = "".join(rf"{re.escape(part)}\." for part in lead)
    for beginning in (*(rf"{_ANYWHERE}{re.escape(part)}\.{_ANYWHERE}" for part in reversed(lead)), whole):
        expression = _expression(beginning, paths, _spellings(paths)[-1])
        if not _matches_any(expression, rivals):
            yield expression
            return
    yield from (path.name for path in paths)


def _expression(beginning: str, paths: Sequence[_Path], numbers: Sequence[str]) -> _Expression:
    spelled = iter(numbers)
    *parts, last = [next(spelled) if part is None else _escaped(part) for part in paths[0].parts]
    end = f"{last}({re.escape(_WRAPPED)})?" if paths[0].wrapped else last
    return _Expression(beginning + "".join(rf"{part}\." for part in parts), end)


def _escaped(part: str) -> str:
    """Return the expression of a part of a name; that of shared experts without the word "experts", since transformers
    takes a group with that word for the one of the routed experts."""
    escaped = re.escape(part)
    return escaped if part == "experts" else escaped.replace("experts", "expert[s]")


def _whole(expression: _Expression) -> str:
    return f"{expression.beginning}{expression.end}$"


def _spellings(paths: Sequence[_Path]) -> list[Sequence[str]]:
    """Return the ways to write the numbers, each a list of expressions: any number where they have no gap, else all of
    them; those with the fewest numbers listed first."""
    ways = [_ways(set(column)) for column in zip(*(path.numbers for path in paths), strict=True)]
    return sorted(product(*ways), key=lambda numbers: sum(number != _ANY_NUMBER for number in numbers))


def _ways(numbers: set[int]) -> list[str]:
    has_gap = len(numbers) < 2 or len(numbers) <= max(numbers) - min(numbers)
    listed = _any_of(sorted(numbers))
    return [listed] if has_gap else [_ANY_NUMBER, listed]


def _any_of(choices: Sequence[object]) -> str:
    return str(choices[0]) if len(choices) == 1 else f"({'|'.join(map(str, choices))})"


def _matches_any(expression: _Expression, names: Sequence[str]) -> bool:
    pattern = re.compile(_whole(expression))
    return any(pattern.match(name) for name in names)
