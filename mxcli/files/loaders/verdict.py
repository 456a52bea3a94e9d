"""The verdict of each engine on a checkpoint, by the table of loader rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mxcli.errors import printable
from mxcli.files.loaders.conditions import CLASS_NAME
from mxcli.files.loaders.engine import ENGINES, Engine
from mxcli.files.loaders.rule import (
    AT_A_LOSS,
    FAULTS,
    LOADS,
    NOT_KNOWN,
    OUTCOMES,
    REFUSES,
    WRONGLY,
    Evidence,
    LoaderRule,
    Loading,
    Place,
)
from mxcli.files.loaders.rules import RULES


@dataclass(frozen=True, slots=True)
class Applied:
    """A rule that applies to a checkpoint (None: there is none for these formats), the formats, and the places where
    its condition holds."""

    rule: LoaderRule | None
    formats: tuple[str, ...]
    places: tuple[Place, ...] = ()

    @property
    def outcome(self) -> str:
        """The outcome of the rule."""
        return NOT_KNOWN if self.rule is None else self.rule.outcome

    @property
    def is_of_shapes(self) -> bool:
        """True if the rule depends on more than layout and format."""
        return self.rule is not None and self.rule.when is not None and self.rule.when.of_shapes

    @property
    def sentence(self) -> str:
        """The reason, with the first place and the number of others."""
        if self.rule is None:
            return f"{', '.join(self.formats)}: no rule is known"
        why, count = f"{self.rule.why}{f', unless {self.rule.unless}' if self.rule.unless else ''}", len(self.places)
        if not self.places:
            return f"{', '.join(self.formats)}: {why}" if why else ""
        more = f", and {count - 1:,} more" if count > 1 else ""
        return f"{why} ('{printable(self.places[0].where)}': {printable(self.places[0].value)}{more})"

    @property
    def way_out(self) -> str:
        """The advice on what to do instead."""
        return "" if self.rule is None else self.rule.way_out


_WORDS = {
    REFUSES: "refuses this",
    WRONGLY: "loads this wrongly",
    NOT_KNOWN: "may or may not load this, which is not known",
    AT_A_LOSS: "loads this at a loss",
    LOADS: "loads this",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome with an engine, and the rules that apply, worst first. `usual`: the engine loads such models from the
    layout, in some format at least."""

    engine: Engine
    outcome: str
    applied: tuple[Applied, ...]
    usual: bool = False

    @property
    def reason(self) -> str:
        """The reasons for the outcome."""
        return "; ".join(dict.fromkeys(each.sentence for each in self.worst if each.sentence))

    @property
    def worst(self) -> tuple[Applied, ...]:
        """The rules with this outcome."""
        return tuple(each for each in self.applied if each.outcome == self.outcome)

    @property
    def way_out(self) -> str:
        """The advice on what to do instead, each once."""
        return " ".join(dict.fromkeys(each.way_out for each in self.worst if each.way_out))

    @property
    def evidence(self) -> Evidence | None:
        """The way the outcome is known: as the weakest of its rules; None if it is not known."""
        known = [each.rule.evidence for each in self.worst if each.rule is not None]
        return next((each for each in known if not each.date), known[0] if known else None)

    @property
    def version(self) -> str:
        """The version of the engine that the rules are of."""
        return self.engine.version if self.evidence is None else self.evidence.version

    @property
    def is_fault(self) -> bool:
        """True if the engine refuses the checkpoint or computes something else than its weights are."""
        return self.outcome in FAULTS

    @property
    def is_certain_fault(self) -> bool:
        """True if it does so everywhere and with any setting."""
        return any(each.outcome in FAULTS and each.rule is not None and not each.rule.unless for each in self.applied)

    @property
    def title(self) -> str:
        """The engine with the version that the outcome is of."""
        return f"{self.engine.title} {self.version}".rstrip()

    @property
    def sentence(self) -> str:
        """The outcome in words, with its evidence and reason and without a full stop."""
        known = "" if self.evidence is None else f" ({self.evidence})"
        return f"{self.title} {_WORDS[self.outcome]}{known}" + (f": {self.reason}" if self.reason else "")


def engines_with_rules(layout: str) -> tuple[str, ...]:
    """Return the names of engines that the table has rules of for a layout."""
    named = {rule.engine for rule in RULES if layout in rule.layouts}
    return tuple(name for name in ENGINES if name in named)


def engines_loading(layout: str) -> tuple[str, ...]:
    """Return the names of the engines that load a layout, in some format at least."""
    loading = {rule.engine for rule in _unconditional(layout) if rule.outcome in (LOADS, AT_A_LOSS)}
    return tuple(name for name in ENGINES if name in loading)


def verdicts(loading: Loading, named: Sequence[str] = (), *, only_named: bool = False) -> tuple[Verdict, ...]:
    """Return the verdict of every engine with rules for the layout, and of those `named`, in the order of the table;
    with `only_named` of these alone."""
    wanted = {*named, *(() if only_named else engines_with_rules(loading.layout))}
    return tuple(_verdict(ENGINES[name], loading) for name in ENGINES if name in wanted)


def _unconditional(layout: str) -> list[LoaderRule]:
    return [rule for rule in RULES if layout in rule.layouts and rule.when is None]


def _verdict(engine: Engine, loading: Loading) -> Verdict:
    rules = [rule for rule in RULES if rule.engine == engine.name and loading.layout in rule.layouts]
    by_rule: dict[LoaderRule | None, list[str]] = {}
    for format in dict.fromkeys(weight.format.name for weight in loading.weights):
        rule = next((rule for rule in rules if rule.when is None and rule.covers(format)), None)
        by_rule.setdefault(rule, []).append(format)
    applied = [Applied(rule, tuple(formats)) for rule, formats in by_rule.items()]
    for rule in rules:
        own = [weight for weight in loading.weights if rule.covers(weight.format.name)]
        places = tuple(rule.when.places(loading, own)) if rule.when is not None and own else ()
        if places:
            applied.append(Applied(rule, tuple(dict.fromkeys(weight.format.name for weight in own)), places))
    applied.sort(key=lambda each: OUTCOMES.index(each.outcome))
    is_usual = engine.name in engines_loading(loading.layout) and engine.of_diffusion in (
        None,
        CLASS_NAME in loading.config,
    )
    return Verdict(engine, applied[0].outcome if applied else NOT_KNOWN, tuple(applied), is_usual)


def without(verdict: Verdict, checks: Iterable[str]) -> Verdict:
    """Return a verdict without the rules that some checks of `verify` report."""
    omitted = set(checks)
    kept = tuple(each for each in verdict.applied if each.rule is None or each.rule.checked_by not in omitted)
    return replace(verdict, applied=kept, outcome=kept[0].outcome if kept else NOT_KNOWN)
