"""The recipe of a recommendation: the options that carry its choices out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.plan.overrides import Override, names_matching
from mxcli.flows.plan.plan import Options, Plan, make_plan
from mxcli.flows.plan.recipe_text import quoted_selector, resolved
from mxcli.flows.recommend.candidates import KEEP, Group
from mxcli.flows.write.arrange import arrange
from mxcli.numerics.scheme import Rules


def recipe_of(
    checkpoint: Checkpoint, formats: Mapping[str, Plan], choices: Sequence[tuple[Group, str]]
) -> tuple[Options, Plan]:
    """Return the options that carry choices out (a format with its plan, or KEEP, for each group), and the plan they
    make: the format of most elements is that of all, and overrides name the others."""
    elements: Counter[str] = Counter()
    for group, name in choices:
        elements[name] += group.elements
    usual = max(formats, key=lambda name: elements[name])
    overrides = [
        Override(selector, keep=True)
        if name == KEEP
        else Override(selector, name, rules=Rules(formats[name].options.rules.scale_rounding))
        for name in (*formats, KEEP)
        if name != usual
        for group, chosen in choices
        if chosen == name
        for selector in _selectors(checkpoint, group)
    ]
    base = formats[usual].options
    options = replace(base, overrides=(*base.overrides, *overrides))
    if not any(elements[name] for name in formats):
        plan = next(iter(formats.values()))
        kept = tuple(replace(s, scheme=None, reason="kept: recommended") if s.scheme else s for s in plan.tensors)
        return options, replace(plan, options=options, tensors=kept, notes=())
    plan = make_plan(checkpoint, options)
    arrangement = arrange(checkpoint, plan)
    return resolved(checkpoint, plan), replace(plan, tensors=arrangement.tensors, notes=arrangement.notes)


def _selectors(checkpoint: Checkpoint, group: Group) -> list[str]:
    """Return the selectors of a group: its module where that holds nothing else that is quantized, else each tensor."""
    names = [info.name for info in group.tensors]
    if group.name.endswith(".experts"):
        selector = quoted_selector(group.name)
        if set(names_matching(selector, checkpoint.tensors)) == set(names):
            return [selector]
    return [quoted_selector(name) for name in names]
