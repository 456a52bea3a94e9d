"""Recipes as TOML text that `recipe_file` reads, with every option resolved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from mxcli.errors import MxcliError
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.overrides import Override, names_matching
from mxcli.flows.plan.plan import Options, Plan, TensorPlan, make_plan
from mxcli.flows.plan.recipe_file import EXCLUDE, INCLUDE, KEEP, NUMBERS, OVERRIDE, SELECT, SELECTION, SPELLED
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.scheme import RULE_NAMES, tensor_rules

_WIDTH = 100


def recipe_text(options: Options, comments: Iterable[str] = ()) -> str:
    """Return the recipe of the options, after comments; reading it gives the same options."""
    lines = [f"# {comment}" for comment in comments]
    rules, hadamard = options.rules, options.rules.hadamard
    texts = {"format": options.format, **{name: getattr(rules, name) for name in RULE_NAMES if name not in NUMBERS}}
    texts |= {name: getattr(options, name) for name in ("on_indivisible", "layout", "fuse", "axis")}
    lines += [f"{SPELLED.get(key, key)} = {_quoted(value)}" for key, value in texts.items() if value is not None]
    transform = (hadamard.size, hadamard.seed) if hadamard else (None, None)
    numbers = zip(NUMBERS, (rules.seed, *transform), strict=True)
    lines += [f"{key} = {number}" for key, number in numbers if number is not None]
    lines += _selection(options.selection)
    for settings, group in groupby(options.overrides, key=_settings):
        selectors = [override.selector for override in group]
        lines += ["", f"[[{OVERRIDE}]]", f"{SELECT} = {_listed(selectors)}"]
        lines += [f"{key} = {'true' if value is True else _quoted(str(value))}" for key, value in settings.items()]
    return "\n".join(lines)


def resolved(checkpoint: Checkpoint, plan: Plan) -> Options:
    """Return the plan's options with the rules named that its tensors have, wherever naming them changes nothing."""
    options = plan.options
    taken = [frozenset(names_matching(override.selector, checkpoint.tensors)) for override in options.overrides]
    usual = _rules([step for step in plan.quantized if not any(step.tensor.name in names for names in taken)])
    overrides, later = list[Override](), frozenset[str]()
    for override, names in zip(reversed(options.overrides), reversed(taken), strict=True):
        decided = [step for step in plan.quantized if step.tensor.name in names - later]
        rules = _rules(decided) if override.format or override.rules.dialect else {}
        if override.rules.dialect is None:
            inherited = {"dialect", *(key for key in ("rounding",) if rules.get(key) == usual.get(key))}
            rules = {key: value for key, value in rules.items() if key not in inherited}
        format = spelled_format(override.format) if override.format else None
        overrides.insert(0, replace(override, format=format, rules=replace(override.rules, **rules)))
        later |= names
    rules_named = replace(options.rules, **usual)
    explicit = replace(options, format=spelled_format(options.format), overrides=tuple(overrides), rules=rules_named)
    try:
        return explicit if make_plan(checkpoint, explicit).tensors == plan.tensors else options
    except MxcliError:
        return options


def spelled_format(name: str) -> str:
    """Return a format by its name, or spelled out where it has none."""
    row = find_format(name)
    return row.name if row.name in FORMATS else row.spelling


def quoted_selector(name: str) -> str:
    """Return the selector that matches the tensor or module of that name, with any characters in it."""
    escaped = "".join(f"[{character}]" if character in "*?[" else character for character in name)
    return f"[{escaped[0]}]{escaped[1:]}" if escaped.startswith(("@", "re:")) else escaped


def _rules(steps: Sequence[TensorPlan]) -> dict[str, Any]:
    """Return the rules that all steps have in common, by the fields of options."""
    found = {}
    recipes = [step.scheme for step in steps if step.scheme is not None]
    for field, names in (
        ("scale_rounding", {recipe.scale_rule.name for recipe in recipes}),
        ("rounding", {recipe.rounding.name for recipe in recipes}),
        ("dialect", {recipe.dialect.name for recipe in recipes}),
    ):
        if len(names) == 1:
            (found[field],) = names
    return found


def _selection(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield `include` and `exclude` where each is said once, else all rules in order."""
    runs = [(include, [rule.selector for rule in run]) for include, run in groupby(rules, key=lambda r: r.include)]
    if len(runs) <= 2:
        for include, selectors in runs:
            yield f"{INCLUDE if include else EXCLUDE} = {_listed(selectors)}"
        return
    yield f"{SELECTION} = ["
    for rule in rules:
        yield f"    {{ {INCLUDE if rule.include else EXCLUDE} = {_quoted(rule.selector)} }},"
    yield "]"


def _settings(override: Override) -> dict[str, object]:
    """Return the keys of an override but for its selector."""
    rules = {SPELLED.get(name, name): value for name, value in tensor_rules(override.rules).items()}
    fields: dict[str, object] = {"format": override.format, KEEP: override.keep or None, **rules}
    return {key: value for key, value in fields.items() if value is not None}


def _listed(selectors: Sequence[str]) -> str:
    if len(selectors) == 1:
        return _quoted(selectors[0])
    line = f"[{', '.join(map(_quoted, selectors))}]"
    if len(line) <= _WIDTH:
        return line
    return "\n".join(["[", *(f"    {_quoted(selector)}," for selector in selectors), "]"])


def _quoted(text: str) -> str:
    """Return a TOML string: as in JSON, but for characters that JSON leaves as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
