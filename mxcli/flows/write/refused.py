"""Single layers that an engine named by --for would refuse or load wrongly, and that stay plain for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from mxcli.errors import printable
from mxcli.files.layouts import Weight
from mxcli.files.loaders.rule import FAULTS, WRONGLY, Loading, Place
from mxcli.files.loaders.verdict import Applied, Verdict, verdicts
from mxcli.files.models.names import is_expert


def refused_weights(loading: Loading, engines: Sequence[str], together: Iterable[Collection[str]]) -> dict[str, str]:
    """Return the weights of an output that stay plain for `engines`, each with the reason: those that a rule of single
    weights is about, with the rest of their fused sets and experts, and those that are quantized `together` with them.

    There are none if the engines do not load the others either, or if less than half of the values would be left.
    """
    sets = [*map(frozenset, together), *map(frozenset, loading.fused.values()), *_experts(loading.weights)]
    found: dict[str, str] = {}
    left = loading
    while more := dict(_single(left, engines)):
        first = next(iter(more))
        wider = {name for each in sets if not each.isdisjoint(more) for name in each}
        names = [weight.name for weight in left.weights if weight.name in more or weight.name in wider]
        found |= {name: more.get(name, f"joined with '{printable(first)}': {more[first]}") for name in names}
        left = replace(
            left,
            weights=[weight for weight in left.weights if weight.name not in found],
            plain=[*left.plain, *names],
        )
    is_loaded = not any(applied.outcome in FAULTS for _, applied in _applied(left, engines))
    return found if found and is_loaded and 2 * _values(left.weights) >= _values(loading.weights) else {}


def _experts(weights: Iterable[Weight]) -> Iterator[frozenset[str]]:
    """Yield the names of all experts of each layer, which loaders stack."""
    by_layer: dict[str, set[str]] = {}
    for weight in weights:
        if is_expert(weight.name):
            by_layer.setdefault(weight.name.partition(".experts.")[0], set()).add(weight.name)
    yield from map(frozenset, by_layer.values())


def _single(loading: Loading, engines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the weights that rules of single weights are about, with the reasons."""
    own = {weight.name for weight in loading.weights}
    for verdict, applied in _applied(loading, engines):
        condition = None if applied.rule is None else applied.rule.when
        if condition is None or not condition.of_weights or applied.outcome not in FAULTS:
            continue
        for place in applied.places:
            if place.where in own:
                yield place.where, _reason(verdict, applied, place, loading.layout)


def _applied(loading: Loading, engines: Sequence[str]) -> Iterator[tuple[Verdict, Applied]]:
    for verdict in verdicts(loading, engines, only_named=True):
        for applied in verdict.applied:
            yield verdict, applied


def _reason(verdict: Verdict, applied: Applied, place: Place, layout: str) -> str:
    assert applied.rule is not None
    verb = "loads it wrongly" if applied.outcome == WRONGLY else "refuses it"
    unless = f", unless {applied.rule.unless}" if applied.rule.unless else ""
    return f"{verdict.title} {verb} in {layout}: {applied.rule.why}{unless} ({printable(place.value)})"


def _values(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)
