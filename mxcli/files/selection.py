"""Selection of tensors by `--include` and `--exclude`, with the rule that decided each.

A selector is one of

* `@name`: a role or tag, such as `@router` or `@attn`;
* `re:REGEX`: must match the whole name;
* a glob: `*` stands for any characters, dots included, `?` for one, `[..]` for one of a set. It must match the whole
  name, or all of a module path, so that `lm_head` takes `lm_head.weight` and `*layers.1` or `*layers.1.*` take layer 1,
  never layer 11. It begins at the start of the name: `q_proj` alone takes nothing, `*.q_proj` does.

The last rule that matches a tensor decides. A tensor that no rule matches is left out if the first rule is an include;
otherwise it is taken if its role is one of the default roles. An include by a pattern or a tag still keeps the
protected kinds (norms, routers, embeddings, …): `*layers.1.*` takes the linear layers of layer 1. Only the kind's own
`@role`, the full name of the tensor or that of its module takes it. Nothing takes integers or codes of 8 bits or fewer.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxcli.errors import UsageError, closest, did_you_mean, printable, together
from mxcli.files.roles import ACTIVATION, ALIASES, GRADIENT, SELECTABLE, WEIGHT, reason_of, tags_of
from mxcli.files.tensors import DTYPES, TensorInfo

MOST_CHARACTERS = 4096
"""The longest selector: the time to compile a glob grows with the square of its length."""


def glob_regex(glob: str) -> re.Pattern[str]:
    """Return the regex for a glob, matching from the start: whole names, or whole module paths.

    `*` stands for any characters, dots included, `?` for one character, `[..]` for one of a set.
    """
    whole = fnmatch.translate(glob)
    return re.compile(whole if glob.endswith("*") else f"{whole}|{fnmatch.translate(glob + '.*')}")


def suggest_glob(glob: str, names: Collection[str]) -> str:
    """Return a question, with a leading space, proposing a glob that does match; else an example of the names."""
    candidates = [f"*.{glob}", *_respelled(glob, names)]
    for candidate in candidates:
        pattern = glob_regex(candidate)
        count = sum(pattern.match(name) is not None for name in names)
        if count:
            return f" Did you mean {printable(candidate)} ({_tensors(count)})?"
    return _example(names)


def suggest_regex(regex: re.Pattern[str], names: Collection[str]) -> str:
    """Return a hint if the regex occurs inside names but matches no whole one, else an example of the names."""
    count = sum(regex.search(name) is not None for name in names)
    if count:
        wider = printable(f"re:.*({regex.pattern}).*")
        return f" It must match the whole name; {wider} matches {_tensors(count)}."
    return _example(names)


def suggest_role(tensors: Mapping[str, TensorInfo]) -> str:
    """Return a sentence listing the roles and tags that occur."""
    present = sorted({tag for info in tensors.values() for tag in tags_of(info.name, info.role)})
    return f" Here are {', '.join('@' + tag for tag in present)}."


def _respelled(glob: str, names: Iterable[str]) -> list[str]:
    """Return the glob with each word that no name contains replaced by the closest word of the names."""
    words = {word for name in names for word in name.split(".") if not word.isdigit()}
    respelled = glob
    for word in re.findall(r"[A-Za-z_][A-Za-z0-9_]*", glob):
        if word not in words:
            respelled = respelled.replace(word, next(iter(closest(word, words)), word))
    return [respelled, f"*.{respelled}"] if respelled != glob else []


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def _example(names: Iterable[str]) -> str:
    first = next(iter(names), None)
    return f" Names here look like {printable(first)}." if first is not None else ""


DEFAULT_ROLES = frozenset({WEIGHT, ACTIVATION, GRADIENT})
ROLE_MARK, REGEX_MARK = "@", "re:"

Matcher = Callable[[TensorInfo], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """A single `--include` or `--exclude` as the user gave it."""

    include: bool
    selector: str

    def __str__(self) -> str:
        return f"--{'include' if self.include else 'exclude'} {printable(self.selector)}"

    def names(self, info: TensorInfo) -> bool:
        """Return whether it names the tensor outright, by its full name, its module or its role, and not by a
        pattern."""
        if self.selector.startswith(ROLE_MARK):
            return self.selector.removeprefix(ROLE_MARK) in (info.role, ALIASES.get(info.role))
        return info.name in (self.selector, f"{self.selector}.weight")


@dataclass(frozen=True, slots=True)
class Decision:
    """A tensor's selection: taken or not, the rule that decided (None: the defaults), and why."""

    taken: bool
    rule: Rule | None
    reason: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The decision for every tensor; per rule, in order, how many tensors it matched and how many it decided."""

    decisions: Mapping[str, Decision]
    rules: tuple[Rule, ...]
    matched: tuple[int, ...]
    decided: tuple[int, ...]

    @property
    def taken(self) -> tuple[str, ...]:
        """Return the names of the tensors taken, in file order."""
        return tuple(name for name, decision in self.decisions.items() if decision.taken)


def select(
    tensors: Mapping[str, TensorInfo],
    rules: Sequence[Rule] = (),
    default_roles: Collection[str] = DEFAULT_ROLES,
) -> Selection:
    """Apply the rules in order. Raises UsageError naming every selector that is invalid or takes nothing."""
    matchers = _compiled(rules)
    matched, decided = [0] * len(rules), [0] * len(rules)
    restricts = bool(rules) and rules[0].include
    decisions = {}
    for name, info in tensors.items():
        last = None
        for index, matches in enumerate(matchers):
            if matches(info):
                matched[index] += 1
                last = index
        if last is not None:
            decided[last] += 1
        decisions[name] = _decision(info, None if last is None else rules[last], restricts, default_roles)
    problems = [
        f"{rule}: matches no tensor.{suggestion(rule.selector, tensors)}"
        for rule, count in zip(rules, matched, strict=True)
        if not count
    ]
    if problems:
        raise together(UsageError, "Selectors that match nothing", problems)
    return Selection(decisions, tuple(rules), tuple(matched), tuple(decided))


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
    """Return the test of one selector. Raises ValueError stating what is wrong with it."""
    if len(selector) > MOST_CHARACTERS:
        raise ValueError(f"{len(selector):,} characters; a selector has at most {MOST_CHARACTERS:,}.")
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
    """Return a hint, with a leading space, for a selector that matches none of the tensors."""
    if selector.startswith(ROLE_MARK):
        return suggest_role(tensors)
    if selector.startswith(REGEX_MARK):
        return suggest_regex(re.compile(selector.removeprefix(REGEX_MARK)), tensors.keys())
    return suggest_glob(selector, tensors.keys())


def _decision(info: TensorInfo, rule: Rule | None, restricts: bool, default_roles: Collection[str]) -> Decision:
    by_default = info.role in default_roles
    if rule is None:
        if restricts:
            return Decision(False, None, "no --include takes it")
        return Decision(by_default, None, _kind(info) if by_default else f"kept: {_kind(info)}")
    if not rule.include or by_default:
        return Decision(rule.include, rule, str(rule))
    dtype = DTYPES[info.dtype]
    if not dtype.is_float or dtype.bits <= 8:
        return Decision(False, rule, f"kept: {info.dtype} is not a float of more than 8 bits ({rule} matches it)")
    if rule.names(info):
        return Decision(True, rule, str(rule))
    return Decision(False, rule, f"kept: {_kind(info)} ({rule} matches it; only its name or @{info.role} takes it)")


def _kind(info: TensorInfo) -> str:
    """Return the role and, if known, why it has that role."""
    reason = reason_of(info)
    return f"{info.role}, {reason}" if reason else info.role
