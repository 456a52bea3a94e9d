"""The layout that all named engines load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mxcli.errors import MxcliError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import LAYOUTS, Layout
from mxcli.files.loaders.engine import listed_engines
from mxcli.files.loaders.rule import AT_A_LOSS, LOADS
from mxcli.files.loaders.verdict import Verdict
from mxcli.flows.plan.plan import Plan
from mxcli.flows.write.arrange import Arrangement, arrange


def layout_for(checkpoint: Checkpoint, plan: Plan, engines: Sequence[str]) -> Layout:
    """Return the first layout in which all `engines` load a plan; else the first in which some do so at a loss, else
    the first in which they do if single layers stay plain for them, else the first of those that hold less than half.

    Raises RefusedError with the reason in every layout that can hold some of the plan, if they load none.
    """
    tried: dict[str, tuple[Verdict, ...]] = {}
    refused: dict[str, str] = {}
    most: set[str] = set()
    for layout in (each for each in LAYOUTS.values() if each.is_chosen):
        try:
            arrangement = arrange(checkpoint, plan, layout.name)
        except MxcliError as error:
            refused[layout.name] = error.reasons[0]
            continue
        tried[layout.name] = tuple(each for each in arrangement.loaders if each.engine.name in engines)
        most |= {layout.name} if _holds_most(arrangement, plan) else set()
    chosen = (
        _first(tried, most, {LOADS}, engines)
        or _first(tried, most, _TAKEN, engines)
        or next((name for name in tried if name in most and _is_taken_in_part(checkpoint, plan, name, engines)), None)
        or _first(tried, tried.keys(), _TAKEN, engines)
    )
    if chosen is not None:
        return LAYOUTS[chosen]
    details = [f"{name}: {_reasons(found, engines)}" for name, found in tried.items() if name in most or not most]
    details += [f"{name}: {reason}" for name, reason in refused.items() if not tried]
    raise RefusedError(
        f"{printable(checkpoint.where)}: no layout of {_formats(plan)} is loaded by {listed_engines(engines)}, as far "
        "as is known. Use another --format, leave layers plain with --exclude (such as '*.experts.*'), write one "
        "output for each engine, or name a --layout to see what speaks against it.",
        details,
    )


_TAKEN = {LOADS, AT_A_LOSS}


def _first(
    tried: Mapping[str, Sequence[Verdict]], names: Collection[str], taken: Collection[str], engines: Sequence[str]
) -> str | None:
    """Return the first of some layouts that every engine loads with one of these outcomes; None without one."""
    return next(
        (
            name
            for name, found in tried.items()
            if name in names and len(found) == len(engines) and all(each.outcome in taken for each in found)
        ),
        None,
    )


def _is_taken_in_part(checkpoint: Checkpoint, plan: Plan, layout: str, engines: Sequence[str]) -> bool:
    """Return whether engines load a plan in a layout if single layers stay plain for them."""
    try:
        arrangement = arrange(checkpoint, plan, layout, engines=engines)
    except MxcliError:
        return False
    found = [each for each in arrangement.loaders if each.engine.name in engines]
    return len(found) == len(engines) and all(each.outcome in _TAKEN for each in found)


def _holds_most(arrangement: Arrangement, plan: Plan) -> bool:
    """Return whether a layout holds at least half of the elements that are to be quantized."""
    held = sum(task.planned.tensor.elements for task in arrangement.tasks if task.pieces)
    return 2 * held >= sum(each.tensor.elements for each in plan.quantized)


def _reasons(found: Sequence[Verdict], engines: Sequence[str]) -> str:
    """Return why engines do not load a plan in a layout."""
    known = {each.engine.name for each in found}
    reasons = [each.sentence for each in found if each.outcome not in (LOADS, AT_A_LOSS)]
    unknown = [name for name in engines if name not in known]
    return "; ".join(reasons + ([f"it is not known whether {listed_engines(unknown)} loads it"] if unknown else []))


def _formats(plan: Plan) -> str:
    return ", ".join(sorted({each.scheme.format.name for each in plan.quantized if each.scheme is not None}))
