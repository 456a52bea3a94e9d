"""Outcomes that engines have with an output, before it is written: refusals of those named, and notes on others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mxcli.errors import RefusedError, printable
from mxcli.files.layouts import Layout, Weight
from mxcli.files.loaders.conditions import TORN, UNCUT
from mxcli.files.loaders.engine import ENGINES, listed_engines
from mxcli.files.loaders.rule import AT_A_LOSS, FAULTS, NOT_KNOWN, WRONGLY, Loading
from mxcli.files.loaders.rules import RULES
from mxcli.files.loaders.tensor_parallel import not_known
from mxcli.files.loaders.verdict import Applied, Verdict, verdicts
from mxcli.files.models.fused import fused_sets


def loading_of(
    layout: Layout,
    weights: Sequence[Weight],
    plain: Mapping[str, int],
    config: Mapping[str, object] | None,
    devices: int | None,
) -> Loading:
    """Return an output as a loader is given it; `plain` are the linear layers that stay plain, with their columns."""
    columns = {weight.name: weight.shape[-1] for weight in weights} | dict(plain)
    return Loading(
        layout.name, weights, config or {}, fused_sets(config).among(columns), devices=devices, plain=tuple(plain)
    )


def loader_verdicts(loading: Loading, engines: Sequence[str]) -> tuple[Verdict, ...]:
    """Return the verdict of each engine on an output. Raises RefusedError with every reason why one of `engines` does
    not load it as its weights are, and for a division over devices that no engine can make."""
    found = verdicts(loading, engines)
    problems = [
        f"{each.title} {_VERBS[applied.outcome]} {loading.layout} of this model: {applied.sentence}. "
        f"{applied.way_out}".rstrip()
        for each in found
        if each.engine.name in engines
        for applied in each.applied
        if applied.outcome in FAULTS and not _is_of(applied, UNCUT)
    ]
    cut = _cut_by(loading.layout, engines)
    divided = list(UNCUT.places(loading, loading.weights)) if cut and loading.devices else []
    problems += [
        f"{printable(place.where)}: {place.value}: {listed_engines(cut)} cannot divide it. Use fewer devices (--tp), "
        "or a format with smaller blocks."
        for place in divided
    ]
    if problems:
        raise _refused(problems, listed_engines(engines or cut))
    return found


_VERBS = {"refuses": "refuses", WRONGLY: "loads wrongly"}


def _refused(problems: Sequence[str], engines: str) -> RefusedError:
    if len(problems) == 1:
        return RefusedError(problems[0])
    return RefusedError(f"Not loaded by {engines}: {len(problems):,} problems.", problems)


def _cut_by(layout: str, engines: Sequence[str]) -> tuple[str, ...]:
    """Return the engines, of those named if any are, that divide weights of a layout over devices."""
    dividing = {rule.engine for rule in RULES if rule.when is UNCUT and layout in rule.layouts}
    return tuple(name for name in ENGINES if name in dividing and (not engines or name in engines))


def _is_of(applied: Applied, condition: object) -> bool:
    return applied.rule is not None and applied.rule.when is condition


def loader_notes(loading: Loading, found: Iterable[Verdict], engines: Sequence[str]) -> list[str]:
    """Return notes on engines that load an output at a loss or not as its weights are: of the named ones, else of those
    that load the layout; and on what is not known."""
    notes = [f"{_without_torn(each)}." for each in found if _is_noted(each, engines)]
    return [*notes, *_devices_notes(loading, engines)]


def _is_noted(verdict: Verdict, named: Sequence[str]) -> bool:
    outcomes = {applied.outcome for applied in verdict.applied if not _is_of(applied, TORN)} or {NOT_KNOWN}
    if not (verdict.engine.name in named if named else verdict.usual):
        return not named and WRONGLY in outcomes
    return bool(outcomes & {*FAULTS, AT_A_LOSS}) or (bool(named) and NOT_KNOWN in outcomes)


def _without_torn(verdict: Verdict) -> str:
    """Return the verdict in words, with what to do instead."""
    way = f". {verdict.way_out.rstrip('.')}" if verdict.way_out else ""
    return f"{verdict.sentence}{way}"


def _devices_notes(loading: Loading, engines: Sequence[str]) -> Iterator[str]:
    if loading.devices is None or loading.devices < 2:
        return
    if not _cut_by(loading.layout, engines):
        yield f"--tp {loading.devices}: it is not known how weights of the layout {loading.layout} divide over devices."
        return
    names = not_known(loading.weights)
    if names:
        more = ", …" if len(names) > 1 else ""
        yield (
            f"--tp {loading.devices}: it is not known how engines divide {len(names):,} weights "
            f"('{printable(names[0])}'{more})."
        )
