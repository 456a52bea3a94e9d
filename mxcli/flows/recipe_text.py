"""A recipe written: options as the TOML that `mxcli.flows.recipes` reads, with all that they leave open resolved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

from mxcli.errors import MxcliError
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.overrides import Override, taken_by
from mxcli.flows.plan import Options, Plan, Step, make_plan
from mxcli.flows.recipes import EXCLUDE, INCLUDE, KEEP, OVERRIDE, SELECT, SELECTION
from mxcli.numerics.formats import FORMATS, find_format

_WIDTH = 100


def recipe_text(options: Options, comments: Iterable[str] = ()) -> str:
    """The recipe of the options, after comments; reading it gives the same options."""
    lines = [f"# {comment}" for comment in comments]
    for key, value in (
        ("format", options.format),
        ("scale_rounding", options.scale_rounding),
        ("rounding", options.rounding),
        ("as", options.dialect),
        ("nonfinite", options.nonfinite),
        ("on_indivisible", options.on_indivisible),
        ("layout", options.layout),
        ("fuse", options.fuse),
        ("axis", options.axis),
    ):
        if value is not None:
            lines.append(f"{key} = {_quoted(value)}")
    hadamard = options.hadamard
    for key, number in (
        ("seed", options.seed),
        ("hadamard", hadamard.size if hadamard else None),
        ("hadamard_seed", hadamard.seed if hadamard else None),
    ):
        if number is not None:
            lines.append(f"{key} = {number}")
    lines += _selection(options.selection)
    for settings, group in groupby(options.overrides, key=_settings):
        selectors = [override.selector for override in group]
        lines += ["", f"[[{OVERRIDE}]]", f"{SELECT} = {_listed(selectors)}"]
        lines += [f"{key} = {'true' if value is True else _quoted(str(value))}" for key, value in settings.items()]
    return "\n".join(lines)


def resolved(checkpoint: Checkpoint, plan: Plan) -> Options:
    """The plan's options with the rules named that its tensors have, wherever naming them changes nothing."""
    options = plan.options
    taken = [frozenset(taken_by(override.selector, checkpoint.tensors)) for override in options.overrides]
    usual = _rules([step for step in plan.quantized if not any(step.tensor.name in names for names in taken)])
    overrides, later = list[Override](), frozenset[str]()
    for override, names in zip(reversed(options.overrides), reversed(taken), strict=True):
        decided = [step for step in plan.quantized if step.tensor.name in names - later]
        rules = _rules(decided) if override.format or override.dialect else {}
        if override.dialect is None:
            inherited = {"dialect", *(key for key in ("rounding",) if rules.get(key) == usual.get(key))}
            rules = {key: value for key, value in rules.items() if key not in inherited}
        if override.format:
            rules["format"] = spelled_format(override.format)
        overrides.insert(0, replace(override, **rules))
        later |= names
    explicit = replace(options, format=spelled_format(options.format), overrides=tuple(overrides), **usual)
    try:
        return explicit if make_plan(checkpoint, explicit).steps == plan.steps else options
    except MxcliError:
        return options


def spelled_format(name: str) -> str:
    """A format by its name, or spelled out where it has none."""
    row = find_format(name)
    return row.name if row.name in FORMATS else row.spelling


def quoted_selector(name: str) -> str:
    """The selector that takes the tensor or module of that name, whatever characters are in it."""
    escaped = "".join(f"[{character}]" if character in "*?[" else character for character in name)
    return f"[{escaped[0]}]{escaped[1:]}" if escaped.startswith(("@", "re:")) else escaped


def _rules(steps: Sequence[Step]) -> dict[str, Any]:
    """The rules that all steps have in common, by the fields of options."""
    found = {}
    recipes = [step.recipe for step in steps if step.recipe is not None]
    for field, names in (
        ("scale_rounding", {recipe.scale_rule.name for recipe in recipes}),
        ("rounding", {recipe.rounding.name for recipe in recipes}),
        ("dialect", {recipe.dialect.name for recipe in recipes}),
    ):
        if len(names) == 1:
            (found[field],) = names
    return found


def _selection(rules: Sequence[Rule]) -> Iterator[str]:
    """`include` and `exclude` where each is said once, else all rules in order."""
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
    """The keys of an override but for what it takes."""
    fields = {**asdict(override), KEEP: override.keep or None}
    fields["as"] = fields.pop("dialect")
    del fields["selector"]
    return {key: value for key, value in fields.items() if value is not None}


def _listed(selectors: Sequence[str]) -> str:
    if len(selectors) == 1:
        return _quoted(selectors[0])
    line = f"[{', '.join(map(_quoted, selectors))}]"
    if len(line) <= _WIDTH:
        return line
    return "\n".join(["[", *(f"    {_quoted(selector)}," for selector in selectors), "]"])


def _quoted(text: str) -> str:
    """A TOML string: as in JSON, but for characters that JSON leaves as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
