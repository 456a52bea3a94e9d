"""Which tensors the rules of `--include` and `--exclude` take, and by which rule.

A selector is one of

* `@name`: a role or tag, such as `@router` or `@attn`;
* `re:REGEX`: must match the whole name;
* a glob: `*` stands for any characters, dots included, `?` for one, `[..]` for one of a set. It must match
  the whole name, or all of a module path, so that `lm_head` takes `lm_head.weight` and `*layers.1` or
  `*layers.1.*` take what lies in layer 1, never layer 11. It begins at the start of the name: `q_proj` alone
  takes nothing, `*.q_proj` does.

The last rule that matches a tensor decides. A tensor no rule matches is left out if the first rule is an
include, and otherwise taken if its role is one of the default roles. An include by a pattern or a tag still
keeps the protected kinds (norms, routers, embeddings, …): `*layers.1.*` takes the linear layers of layer 1.
Only the kind's own `@role`, the full name of the tensor or that of its module takes it. Nothing takes
integers or codes of 8 bits or fewer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import UsageError, did_you_mean, printable, together
from mxcli.files.globs import glob_regex, suggest_glob, suggest_regex, suggest_role
from mxcli.files.roles import ACTIVATION, ALIASES, GRADIENT, SELECTABLE, WEIGHT, role_row, tags_of
from mxcli.files.tensors import DTYPES, TensorInfo

DEFAULT_ROLES = frozenset({WEIGHT, ACTIVATION, GRADIENT})
ROLE_MARK, REGEX_MARK = "@", "re:"

Matcher = Callable[[TensorInfo], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One `--include` or `--exclude` as the user gave it."""

    include: bool
    selector: str

    def __str__(self) -> str:
        return f"--{'include' if self.include else 'exclude'} {printable(self.selector)}"

    def names(self, info: TensorInfo) -> bool:
        """Whether it names the tensor outright, by its full name, its module or its role, and not by a
        pattern.
        """
        if self.selector.startswith(ROLE_MARK):
            return self.selector.removeprefix(ROLE_MARK) in (info.role, ALIASES.get(info.role))
        return info.name in (self.selector, f"{self.selector}.weight")


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a tensor is taken, the rule that decided (None: the defaults), and why in words."""

    taken: bool
    rule: Rule | None
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice for every tensor; per rule, in order, how many tensors it matched and how many it decided."""

    choices: Mapping[str, Choice]
    rules: tuple[Rule, ...]
    matched: tuple[int, ...]
    decided: tuple[int, ...]

    @property
    def taken(self) -> tuple[str, ...]:
        """Names of the tensors taken, in file order."""
        return tuple(name for name, choice in self.choices.items() if choice.taken)


def select(
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule] = (),
    default_roles: Collection[str] = DEFAULT_ROLES,
) -> Selection:
    """Apply the rules in order; raises UsageError naming every selector that is invalid or takes nothing."""
    matchers = _compiled(rules)
    matched, decided = [0] * len(rules), [0] * len(rules)
    restricts = bool(rules) and rules[0].include
    choices = {}
    for name, info in tensors.items():
        last = None
        for place, matches in enumerate(matchers):
            if matches(info):
                matched[place] += 1
                last = place
        if last is not None:
            decided[last] += 1
        choices[name] = _choice(info, None if last is None else rules[last], restricts, default_roles)
    problems = [
        f"{rule}: matches no tensor.{suggestion(rule.selector, tensors)}"
        for rule, count in zip(rules, matched, strict=True)
        if not count
    ]
    if problems:
        raise together(UsageError, "Selectors that match nothing", problems)
    return Selection(choices, tuple(rules), tuple(matched), tuple(decided))


def _compiled(rules: Sequence[Rule]) -> list[Matcher]:
    matchers, problems = [], []
    for rule in rules:
        try:
            matchers.append(matcher(rule.selector))
        except ValueError as error:
            problems.append(f"{rule}: {error}")
    if problems:
        raise together(UsageError, "Selectors that are invalid", problems)
    return matchers


def matcher(selector: str) -> Matcher:
    """The test of one selector; raises ValueError saying what is wrong with it."""
    if selector.startswith(ROLE_MARK):
        role = selector.removeprefix(ROLE_MARK)
        if role not in SELECTABLE:
            known = ", ".join(sorted(SELECTABLE))
            raise ValueError(
                f"no role or tag is called {printable(role)}.{did_you_mean(role, SELECTABLE)} Known: {known}."
            )
        return lambda info: role in tags_of(info.name, info.role)
    if selector.startswith(REGEX_MARK):
        try:
            regex = re.compile(selector.removeprefix(REGEX_MARK))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a valid regular expression: {printable(error)}.") from error
        return lambda info: regex.fullmatch(info.name) is not None
    if not selector:
        raise ValueError("the selector is empty.")
    pattern = glob_regex(selector)
    return lambda info: pattern.match(info.name) is not None


def suggestion(selector: str, tensors: Mapping[str, TensorInfo]) -> str:
    """What to say, after a space, of a selector that matches none of the tensors."""
    if selector.startswith(ROLE_MARK):
        return suggest_role(tensors)
    if selector.startswith(REGEX_MARK):
        return suggest_regex(re.compile(selector.removeprefix(REGEX_MARK)), tensors.keys())
    return suggest_glob(selector, tensors.keys())


def _choice(info: TensorInfo, rule: Rule | None, restricts: bool, default_roles: Collection[str]) -> Choice:
    usual = info.role in default_roles
    if rule is None:
        if restricts:
            return Choice(False, None, "no --include takes it")
        return Choice(usual, None, _kind(info) if usual else f"kept: {_kind(info)}")
    if not rule.include or usual:
        return Choice(rule.include, rule, str(rule))
    dtype = DTYPES[info.dtype]
    if not dtype.is_float or dtype.bits <= 8:
        return Choice(False, rule, f"kept: {info.dtype} is no float of more than 8 bits ({rule} matches it)")
    if rule.names(info):
        return Choice(True, rule, str(rule))
    return Choice(False, rule, f"kept: {_kind(info)} ({rule} matches it; only its name or @{info.role} takes it)")


def _kind(info: TensorInfo) -> str:
    """The role, and the table's reason where the table decided it."""
    row = role_row(info.name, info.shape, info.dtype)
    return f"{info.role}, {row.reason}" if row.role == info.role else info.role
