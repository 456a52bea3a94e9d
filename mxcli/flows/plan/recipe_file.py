"""Recipe files: TOML with the options of the command line, and overrides for single tensors.

    format = "mxfp4"
    scale_rounding = "rceil"
    exclude = ["*layers.0.*", "@vision"]

    [[override]]
    select = ["*.down_proj", "re:.*\\\\.v_proj\\\\.weight"]
    format = "nvfp4"

    [[override]]
    select = "*layers.3.mlp.down_proj"
    keep = true

Keys are the names of the options, `as` included, and `seed`, `hadamard` and `hadamard_seed`, which are numbers.
`include` and `exclude`, each a selector or a list, apply in the order of the file; `selection = [{exclude =
"..."}, {include = "..."}]` spells out any other order. Of overrides the later ones win.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, UsageError, did_you_mean, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import find_layout
from mxcli.files.models.fused import named_sets
from mxcli.files.plain import read_head
from mxcli.files.selection import Rule
from mxcli.flows.plan.overrides import Override, Request, apply_override, names_matching
from mxcli.flows.plan.plan import AXES, INDIVISIBLE_POLICIES, Options
from mxcli.flows.plan.toml_lines import Path as Place
from mxcli.flows.plan.toml_lines import line_of, toml_lines
from mxcli.numerics.formats import find_format
from mxcli.numerics.scheme import RULE_CHECKS, RULE_NAMES, TENSOR_RULES, RuleOptions, Rules, overlaid, rules_from

SPELLED = {"dialect": "as"}
"""Options that a recipe spells like the command line, not like the field of Rules."""
TRANSFORM = ("hadamard", "hadamard_seed")
NUMBERS = ("seed", *TRANSFORM)
RULE_KEYS = ("format", *(SPELLED.get(name, name) for name in TENSOR_RULES))
VALUES = (
    *RULE_KEYS,
    *(name for name in RULE_NAMES if name not in (*TENSOR_RULES, *NUMBERS)),
    *("on_indivisible", "layout", "axis", "fuse"),
)
INCLUDE, EXCLUDE, SELECTION, OVERRIDE = "include", "exclude", "selection", "override"
SELECT, KEEP = "select", "keep"
TOP_KEYS = (*VALUES, *NUMBERS, INCLUDE, EXCLUDE, SELECTION, OVERRIDE)
OVERRIDE_KEYS = (SELECT, KEEP, *RULE_KEYS)

MAX_BYTES = 1 << 26

Named = Mapping[str, Any]
"""Values by the fields of Options; None is not named."""


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """The content of a recipe, `named` by the fields of Options, and the line of each selector and override."""

    where: str
    named: Mapping[str, Any]
    selection: tuple[Rule, ...] = ()
    overrides: tuple[Override, ...] = ()
    selection_lines: tuple[int, ...] = ()
    override_lines: tuple[int, ...] = ()


def read_recipe(path: str | Path) -> RecipeFile:
    """Return the recipe in a file. Raises UsageError naming everything in it that means nothing, with its line, and
    InputError for a file that cannot be read."""
    _, size = read_head(Path(path))
    if size > MAX_BYTES:
        raise InputError(f"{printable(path)}: {size:,} bytes; a recipe has at most {MAX_BYTES:,}.")
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{printable(path)}: no text in UTF-8 ({error}); a recipe is a TOML file.") from error
    return parse_recipe(text, str(path))


def parse_recipe(text: str, where: str) -> RecipeFile:
    """Return the recipe in a text that is called `where`; raises like `read_recipe`."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib lets through that Python takes no number of 4,301 digits
        raise UsageError(f"{printable(where)}: not valid TOML: {printable(error)}.") from error
    return _Reading(content, toml_lines(text), where).recipe()


def options_from(
    recipe: RecipeFile, named: Named, selection: tuple[Rule, ...], *, defaults: Named, analysis: bool = False
) -> Options:
    """Return the options of a recipe and of the command line, which overrides it; `defaults` stand for what neither
    names.

    Selectors of the command line come after those of the recipe, so the last matching one wins.
    """
    values = merged(recipe, named, defaults)
    if values.get("format") is None:
        raise UsageError(f"missing option '--format': {printable(recipe.where)} names none for all tensors.")
    return options_named(values, (*recipe.selection, *selection), recipe.overrides, analysis=analysis)


def merged(recipe: RecipeFile | None, named: Named, defaults: Named) -> dict[str, Any]:
    """Return option values by name: those `named`, else the recipe's, else the `defaults`."""
    values: dict[str, Any] = {**defaults, **(recipe.named if recipe else {})}
    if any(named.get(key) is not None for key in TRANSFORM):
        values = {key: value for key, value in values.items() if key not in TRANSFORM}
    return values | {key: value for key, value in named.items() if value is not None}


def options_named(
    values: Named, selection: tuple[Rule, ...] = (), overrides: tuple[Override, ...] = (), *, analysis: bool = False
) -> Options:
    """Return Options of values by name, the rule options spelled as in RuleOptions."""
    rules = rules_from({key: value for key, value in values.items() if key in RuleOptions.__annotations__})
    others = {key: value for key, value in values.items() if key not in RuleOptions.__annotations__}
    return Options(**others, rules=rules, selection=selection, overrides=overrides, analysis=analysis)


def for_any_format(recipe: RecipeFile) -> RecipeFile:
    """Return the recipe for a verb that tries formats of its own on every tensor: without the recipe's format.

    Raises UsageError naming every override that is for a format or a rule, with its line: only those that keep tensors
    mean something there.
    """
    problems = [
        f"{printable(recipe.where)}:{line}: the override of {printable(each.selector)} names a format or a rule, and "
        "here formats are tried on every tensor: keep those tensors, or --exclude them."
        for each, line in zip(recipe.overrides, recipe.override_lines, strict=True)
        if not each.keep
    ]
    if problems:
        raise together(UsageError, "Overrides that are for one format", problems)
    return replace(recipe, named={key: value for key, value in recipe.named.items() if key != "format"})


def check_selectors(recipe: RecipeFile, checkpoint: Checkpoint) -> None:
    """Raise UsageError naming every selector of a recipe that takes nothing of a source, with its line."""
    selectors = [
        *((rule.selector, line) for rule, line in zip(recipe.selection, recipe.selection_lines, strict=True)),
        *((each.selector, line) for each, line in zip(recipe.overrides, recipe.override_lines, strict=True)),
    ]
    problems = []
    for selector, line in selectors:
        try:
            names_matching(selector, checkpoint.tensors)
        except UsageError as error:
            problems += [f"{printable(recipe.where)}:{line}: {printable(selector)}: {error.message}"]
    if problems:
        raise together(UsageError, "Selectors that match nothing", problems)


class _Reading:
    """A reader of a parsed recipe, which collects problems and raises them together."""

    def __init__(self, content: Mapping[str, object], lines: dict[Place, int], where: str) -> None:
        self.content, self.lines, self.where = content, lines, where
        self.problems: list[tuple[int, str]] = []

    def recipe(self) -> RecipeFile:
        self.known((), self.content, TOP_KEYS)
        field = {spelled: name for name, spelled in SPELLED.items()}
        named: dict[str, Any] = {
            field.get(key, key): value for key in VALUES if (value := self.text((key,), self.content)) is not None
        }
        for key, value in named.items():
            self.checked((SPELLED.get(key, key),), _CHECKS[key], value)
        usual = self.usual(named)
        named |= self.numbers()
        selection = list(self.selection())
        overrides = list(self.overrides(usual))
        if self.problems:
            problems = [f"{printable(self.where)}:{line}: {problem}" for line, problem in sorted(self.problems)]
            raise together(UsageError, printable(self.where), problems)
        return RecipeFile(
            where=self.where,
            named=named,
            selection=tuple(rule for rule, _ in selection),
            overrides=tuple(override for override, _ in overrides),
            selection_lines=tuple(line for _, line in selection),
            override_lines=tuple(line for _, line in overrides),
        )

    def numbers(self) -> dict[str, int]:
        """Return the seed and the transform that are named."""
        found: dict[str, int] = {}
        for key in NUMBERS:
            value = self.content.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                found[key] = value
            elif value is not None:
                self.problem((key,), f"'{key}' takes a whole number from 0 on, not {_spelled(value)}.")
        transform = {key: found[key] for key in TRANSFORM if key in found}
        self.checked(tuple(transform)[:1], rules_from, transform)
        return found

    def usual(self, named: Mapping[str, str]) -> Request:
        """Return the request for all tensors, if nothing is wrong so far."""
        usual = Request(None)
        if not self.problems:
            fmt = find_format(named["format"]) if "format" in named else None
            usual = Request(fmt, overlaid(Rules(), named))
            self.checked(("scale_rounding",) if "scale_rounding" in named else ("format",), Request.check, usual)
        return usual

    def selection(self) -> Iterator[tuple[Rule, int]]:
        spelled_out = self.content.get(SELECTION)
        plain = [key for key in self.content if key in (INCLUDE, EXCLUDE)]
        if spelled_out is not None and plain:
            self.problem((SELECTION,), f"'{SELECTION}' holds all rules in order: leave out {' and '.join(plain)}.")
        for key in plain:
            for selector, line in self.selectors((key,), self.content[key]):
                yield Rule(key == INCLUDE, selector), line
        if spelled_out is None:
            return
        if not isinstance(spelled_out, list):
            self.problem((SELECTION,), f"'{SELECTION}' is a list of tables such as {{exclude = \"*.q_proj\"}}.")
            return
        for place, each in enumerate(spelled_out):
            path: Place = (SELECTION, place)
            if not isinstance(each, dict) or len(each) != 1 or not set(each) <= {INCLUDE, EXCLUDE}:
                self.problem(path, f"each of '{SELECTION}' has one key, {INCLUDE} or {EXCLUDE}.")
                continue
            ((key, value),) = each.items()
            for selector, line in self.selectors((*path, key), value):
                yield Rule(key == INCLUDE, selector), line

    def overrides(self, usual: Request) -> Iterator[tuple[Override, int]]:
        tables = self.content.get(OVERRIDE, [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.problem((OVERRIDE,), f"'{OVERRIDE}' is written [[{OVERRIDE}]], once for each.")
            return
        for place, table in enumerate(tables):
            path: Place = (OVERRIDE, place)
            before = len(self.problems)
            self.known(path, table, OVERRIDE_KEYS)
            values = {key: self.text((*path, key), table) for key in RULE_KEYS}
            for name in ("format", *TENSOR_RULES):
                key = SPELLED.get(name, name)
                if values[key] is not None:
                    self.checked((*path, key), _CHECKS[name], values[key])
            keep = table.get(KEEP, False)
            if keep is not True and KEEP in table:
                self.problem((*path, KEEP), f"'{KEEP}' is true or left out, not {_spelled(keep)}.")
            set_keys = [key for key, value in values.items() if value is not None]
            if keep and set_keys:
                self.problem((*path, KEEP), f"tensors that are kept have no {', '.join(set_keys)}: remove one of them.")
            if KEEP not in table and not set_keys:
                self.problem(path, f"an override names at least one of {KEEP}, {', '.join(RULE_KEYS)}.")
            if SELECT not in table:
                self.problem(path, f"an override needs '{SELECT}': a selector or a list of them.")
                continue
            rules = overlaid(Rules(), {name: values[SPELLED.get(name, name)] for name in TENSOR_RULES})
            override = Override("", values["format"], keep is True, rules)
            # Without a format it depends on earlier overrides, tensor by tensor, which format the rules are for.
            if len(self.problems) == before and override.format is not None:
                rule = (*path, "scale_rounding" if values["scale_rounding"] else "format")
                self.checked(rule, lambda o: apply_override(usual, usual, o).check(), override)
            for selector, line in self.selectors((*path, SELECT), table[SELECT]):
                yield replace(override, selector=selector), line

    def selectors(self, path: Place, value: object) -> Iterator[tuple[str, int]]:
        """Yield a selector, or each of a list, with its line."""
        listed = value if isinstance(value, list) else [value]
        for place, each in enumerate(listed):
            if isinstance(each, str):
                yield each, line_of((*path, place), self.lines)
            else:
                self.problem((*path, place), f"'{path[-1]}' takes selectors in quotes, not {_spelled(each)}.")

    def known(self, path: Place, table: Mapping[str, object], keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                close = did_you_mean(key.replace("-", "_"), keys)
                self.problem((*path, key), f"unknown key '{printable(key)}'; known are {', '.join(keys)}.{close}")

    def text(self, path: Place, table: Mapping[str, object]) -> str | None:
        value = table.get(str(path[-1]))
        if value is None or isinstance(value, str):
            return value
        self.problem(path, f"'{path[-1]}' takes a name in quotes, not {_spelled(value)}.")
        return None

    def checked(self, path: Place, check: Callable[..., object], value: object) -> None:
        try:
            check(value)
        except UsageError as error:
            self.problem(path, str(error))

    def problem(self, path: Place, words: str) -> None:
        self.problems.append((line_of(path, self.lines), words))


def _spelled(value: object) -> str:
    """Return a value about as the recipe spells it: text in quotes, true and false in lower case."""
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def _one_of(key: str, known: tuple[str, ...]) -> Callable[[str], None]:
    def check(value: str) -> None:
        if value not in known:
            raise UsageError(
                f"unknown value '{printable(value)}': {key} takes {', '.join(known)}.{did_you_mean(value, known)}"
            )

    return check


_CHECKS: Mapping[str, Callable[[str], object]] = {
    **RULE_CHECKS,
    "format": find_format,
    "on_indivisible": _one_of("on_indivisible", INDIVISIBLE_POLICIES),
    "layout": find_layout,
    "axis": _one_of("axis", AXES),
    "fuse": named_sets,
}
