"""Checks of what engines do with a checkpoint, by the table of loader rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mxcli.files.loaders.rule import AT_A_LOSS, FAULTS, WRONGLY, Loading, Place
from mxcli.files.loaders.verdict import Applied, Verdict, verdicts, without
from mxcli.files.model_files import CONFIG
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.checks.fused import sets_among
from mxcli.flows.verify.subject import Subject

REPORTED = ("fused_scale", "fused_tensor_scale", "tensor_parallel")
"""Checks that report what some rules are about with more detail."""
_REPORTED_TO_NAMED = tuple(check for check in REPORTED if check != "fused_scale")
"""Those of them that report a problem if an engine is named."""
_REPORTED_TO_SOME = ("fused_in_part",)
"""Checks that report with more detail what some engines refuse."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A checkpoint by the rules of engines: the verdict of each engine with rules for its layout, and the names of
    those that must load it (`named`). `is_model`: the configuration states an architecture, without which no engine
    loads anything."""

    verdicts: tuple[Verdict, ...]
    named: tuple[str, ...]
    is_model: bool

    @property
    def expected(self) -> tuple[Verdict, ...]:
        """The verdicts of the usual engines, without what other checks report."""
        return tuple(without(each, REPORTED) for each in self.verdicts if each.usual)

    @property
    def is_loaded_by_none(self) -> bool:
        """True if every usual engine refuses the model or loads it wrongly."""
        return self.is_model and bool(self.expected) and all(each.is_certain_fault for each in self.expected)


def by_rules(subject: Subject, unshared: Sequence[str] = ()) -> Judged | None:
    """Return a checkpoint by the rules of engines; None if no weight could be read. `unshared` are the fused sets whose
    members have different scales."""
    loading = _loading_of(subject, unshared)
    if loading is None:
        return None
    return Judged(verdicts(loading, subject.engines), subject.engines, bool(loading.config.get("architectures")))


def _loading_of(subject: Subject, unshared: Sequence[str]) -> Loading | None:
    if subject.layout is None or subject.view is None or not subject.weights:
        return None
    plain = {f"{module}.weight" for module in subject.plain_modules}
    known = [name for name in subject.view.tensors if name in subject.weights or name in plain]
    return Loading(
        subject.layout.name,
        [stored.weight for stored in subject.weights.values()],
        subject.checkpoint.config or {},
        sets_among(subject, known),
        unshared,
        devices=subject.tensor_parallel,
        plain=[name for name in known if name not in subject.weights],
    )


def _no_engine(judged: Judged) -> Iterator[Finding]:
    if judged.is_loaded_by_none:
        for verdict in judged.expected:
            yield from _findings(verdict, FAULTS)


def _named_engine(judged: Judged) -> Iterator[Finding]:
    if not judged.is_loaded_by_none:
        for verdict in judged.verdicts:
            if verdict.engine.name in judged.named:
                yield from _findings(without(verdict, _REPORTED_TO_NAMED), FAULTS)


def _some_engine(judged: Judged) -> Iterator[Finding]:
    """Yield what some engines load at a loss, wrongly without an error, or refuse because of shapes."""
    if judged.is_loaded_by_none:
        return
    for verdict in judged.expected:
        outcomes = {AT_A_LOSS} if verdict.engine.name in judged.named else {AT_A_LOSS, *FAULTS}
        yield from _findings(without(verdict, _REPORTED_TO_SOME), outcomes, of_shapes_only=True)


def _findings(verdict: Verdict, outcomes: Iterable[str], *, of_shapes_only: bool = False) -> Iterator[Finding]:
    wanted = set(outcomes)
    for applied in verdict.applied:
        if applied.rule is None or applied.outcome not in wanted:
            continue
        if of_shapes_only and not applied.is_of_shapes and applied.outcome not in (WRONGLY, AT_A_LOSS):
            continue
        for place in applied.places or (Place(CONFIG, f"{', '.join(applied.formats)} in the layout"),):
            yield Finding(place.where, place.value, _need(verdict, applied), applied.way_out)


def _need(verdict: Verdict, applied: Applied) -> str:
    assert applied.rule is not None
    evidence = applied.rule.evidence
    name = f"{verdict.engine.title} {evidence.version}".rstrip()
    verb = "loads it wrongly" if applied.outcome == WRONGLY else f"{applied.outcome.replace('loads', 'loads it')}"
    unless = f", unless {applied.rule.unless}" if applied.rule.unless else ""
    return f"{name} {verb.replace('refuses', 'refuses it')}: {applied.rule.why}{unless} ({evidence})"


LOADER_CHECKS: tuple[Check[Judged], ...] = (
    Check(
        "no_loader",
        PROBLEM,
        "checkpoints that no engine of the layout loads as its weights are",
        "the table of loader rules, for every engine that loads the layout",
        _no_engine,
    ),
    Check(
        "named_loader",
        PROBLEM,
        "checkpoints that an engine named by --for refuses or loads wrongly",
        "the table of loader rules, for the engines named",
        _named_engine,
    ),
    Check(
        "some_loader",
        WARNING,
        "checkpoints that some engine of the layout loads at a loss or wrongly, or refuses because of shapes",
        "the table of loader rules, for every engine that loads the layout",
        _some_engine,
    ),
)
"""Checks of what engines do with a checkpoint."""
