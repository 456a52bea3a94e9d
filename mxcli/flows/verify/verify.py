"""Whether a quantized checkpoint is sound, and with its source at hand how far its weights are from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxcli.backends.backend import Backend
from mxcli.errors import UsageError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF
from mxcli.files.gguf import GGUF_NAMES
from mxcli.files.model_files import RECORD
from mxcli.flows.measure.amax import SharedAmax, amax_key, largest
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.plan.fused import fused_sets
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.verify.check import PROBLEM, Check, Result
from mxcli.flows.verify.check_against import PAIR_CHECKS, SOURCE_CHECKS, Beside, pair_of
from mxcli.flows.verify.check_config import DEVICE_CHECKS, skipped_ignored
from mxcli.flows.verify.check_files import RECORD_CHECKS, stated_recipes
from mxcli.flows.verify.check_fused import SET_CHECKS, Together
from mxcli.flows.verify.check_values import WEIGHT_CHECKS
from mxcli.flows.verify.checks import CHECKPOINT_CHECKS, CHECKS, Findings
from mxcli.flows.verify.errors import Distance
from mxcli.flows.verify.provenance import Provenance, Tracer
from mxcli.flows.verify.subject import Original, Originals, Subject, originals_of
from mxcli.flows.verify.weight_summary import SLAB_ELEMENTS, Summary, facts_of, summary_of
from mxcli.flows.write.pipeline import Progress
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.dialects import DEFAULT, DIALECTS

_SLAB_BYTES = 8 * SLAB_ELEMENTS
_IGNORE_CHECKS = ("ignored_but_quantized", "not_ignored", "not_listed", "ignore_entry", "ignore_nothing")


@dataclass(frozen=True, slots=True)
class Verified:
    """A quantized weight that was looked at: its format, what its codes and scales say, and, with a source, how far it
    is from it and whose bytes it has (None: not compared). `places` are the names that findings of it may bear."""

    name: str
    places: tuple[str, ...]
    format: str
    shape: tuple[int, ...]
    summary: Summary
    distance: Distance | None
    origin: Provenance | None


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. `results` has every check, worst first; `against` is what the user called the source."""

    source: str
    layout: str
    total: Total
    by_dtype: Mapping[str, Total]
    weights: tuple[Verified, ...]
    results: tuple[Result, ...]
    against: str | None
    notes: tuple[str, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Findings by severity."""
        return Counter(result.severity for result in self.results for _ in result.findings)

    @property
    def is_sound(self) -> bool:
        """True if there is no problem."""
        return not self.counts.get(PROBLEM)

    def found(self, severity: str) -> tuple[Result, ...]:
        """Return the checks of a severity that found something."""
        return tuple(result for result in self.results if result.findings and result.severity == severity)

    @property
    def compared(self) -> tuple[Verified, ...]:
        """The weights that were held against their originals."""
        return tuple(weight for weight in self.weights if weight.distance is not None)

    @property
    def distance(self) -> Distance:
        """That of all weights compared."""
        return sum((weight.distance for weight in self.weights if weight.distance is not None), Distance())


def memory_to_verify(subject: Subject, originals: Originals | None = None) -> Need:
    """Return what `verify_subject` needs: a weight's codes and scales with numbers of its blocks, and with a source its
    original, its values, and its codes made again."""
    return need_of(((name, _working_bytes(name, stored, originals)) for name, stored in subject.weights.items()))


def checked_originals(source: Checkpoint, subject: Subject) -> Originals:
    """Return the originals of a checkpoint's tensors. Raises UsageError for a source without any of them."""
    if subject.seen is None:
        raise UsageError(
            f"--against {printable(source.where)}: {printable(subject.checkpoint.where)} has no scales, so that its "
            "values cannot be told: verify it without --against."
        )
    originals = originals_of(source, subject.seen)
    if not originals.by_name.keys() & subject.seen.tensors.keys():
        raise UsageError(
            f"--against {printable(source.where)}: has none of the tensors of {printable(subject.checkpoint.where)} "
            f"('{printable(next(iter(subject.seen.tensors)))}', …): give the checkpoint that it was made from."
            f"{_names_apart(source, subject.checkpoint)}"
        )
    return originals


def _names_apart(source: Checkpoint, checkpoint: Checkpoint) -> str:
    """Return a hint where that cannot help, since GGUF files have names of their own."""
    if (source.kind == GGUF) == (checkpoint.kind == GGUF):
        return ""
    return f" {GGUF_NAMES}"


def verify_subject(
    name: str,
    subject: Subject,
    *,
    backend: Backend,
    against: str | None = None,
    originals: Originals | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Make every check on a checkpoint that the user calls `name`; `originals` are of the source called `against`."""
    findings = Findings()
    findings.look(CHECKPOINT_CHECKS, subject)
    tracer, weights = Tracer(backend, _producer(subject), stated=stated_recipes(subject)), []
    amaxes = _Amaxes(backend, originals, subject.weights)
    total, done = sum(stored.nbytes for stored in subject.weights.values()), 0
    for stored in subject.weights.values():
        weights.append(_verified(subject, stored, findings, tracer, amaxes, originals))
        done += stored.nbytes
        if on_progress is not None:
            on_progress(done, total, stored.weight.name)
    weights = _retraced(subject, weights, tracer, amaxes, originals)
    findings.look(SET_CHECKS, Together(subject, {each.name: each.summary for each in weights}))
    if originals is not None:
        findings.look(SOURCE_CHECKS, Beside(subject, originals))
    _skip(findings, subject, originals)
    return Verification(
        source=name,
        layout=subject.layout.name if subject.layout is not None else str(subject.checkpoint.dialect),
        total=Total.of(subject.checkpoint.tensors.values()),
        by_dtype=totals_by(lambda info: info.dtype, subject.checkpoint.tensors.values()),
        weights=tuple(weights),
        results=findings.results(),
        against=against,
        notes=_notes(subject, originals),
    )


def _producer(subject: Subject) -> str:
    """Return the dialect that the layout is named after, else the default."""
    return subject.layout.name if subject.layout is not None and subject.layout.name in DIALECTS else DEFAULT.name


class _Amaxes:
    """The amax of originals: of a weight, and of the set it is fused with."""

    def __init__(self, backend: Backend, originals: Originals | None, weights: Mapping[str, StoredWeight]) -> None:
        self._backend, self._originals, self._weights = backend, originals, weights
        self._amax = SharedAmax(fused_sets(weights).values(), self._find)

    def of(self, stored: StoredWeight, decode: float) -> list[float]:
        """Return the magnitudes that a tensor scale may have been chosen by: of the weight, of its set, and what the
        scale itself says; [0.0] for a format without a tensor scale."""
        fmt, name = stored.weight.format, stored.weight.name
        if fmt.tensor_scale is None:
            return [0.0]
        known = [self._amax.own(name), self._amax.of(name), decode * fmt.element.max * fmt.scale.max]
        return list(dict.fromkeys(known))

    def _find(self, name: str) -> float:
        original = None if self._originals is None else self._originals.by_name.get(name)
        if original is None:
            return 0.0
        weight = self._weights[name].weight
        key = amax_key(weight.axis, weight.scheme.hadamard)
        return largest(self._backend, [(original.info.dtype, original.read())], key)


def _verified(
    subject: Subject,
    stored: StoredWeight,
    findings: Findings,
    tracer: Tracer,
    amaxes: _Amaxes,
    originals: Originals | None,
) -> Verified:
    checkpoint, weight = subject.checkpoint, stored.weight
    facts = facts_of(checkpoint, stored)
    findings.look(WEIGHT_CHECKS, facts)
    distance = origin = None
    original = _original(stored, originals)
    if original is not None:
        x = original.read()
        pair = pair_of(checkpoint, stored, original, x, tracer.backend)
        findings.look(PAIR_CHECKS, pair)
        distance = pair.distance
        origin = tracer.origin(checkpoint, stored, x, original.info.dtype, amaxes.of(stored, facts.decode))
    places = (weight.name, weight.name.removesuffix(".weight"), *(part.entry.name for part in stored.contents))
    return Verified(
        weight.name,
        tuple(dict.fromkeys(places)),
        weight.format.name,
        stored.plain.shape,
        summary_of(facts),
        distance,
        origin,
    )


def _original(stored: StoredWeight, originals: Originals | None) -> Original | None:
    """Return the original that a weight can be held against."""
    original = None if originals is None else originals.by_name.get(stored.weight.name)
    fits = original is not None and original.shape == stored.plain.shape and original.info.dtype in _MEASURED
    return original if fits else None


def _retraced(
    subject: Subject, weights: list[Verified], tracer: Tracer, amaxes: _Amaxes, originals: Originals | None
) -> list[Verified]:
    """Return the weights, each with the rule that made its bytes; where several did, the one that made those of
    most."""
    known = {each.name: {each.origin.scheme: each.origin} for each in weights if each.origin and each.origin.exact}
    for each in weights:
        stored = subject.weights[each.name]
        original = _original(stored, originals)
        others = [scheme for scheme in tracer.found if scheme.format == stored.weight.format]
        if each.name not in known or original is None or len(others) < 2:
            continue
        x, scales = original.read(), amaxes.of(stored, each.summary.scale)
        for scheme in others:
            if scheme not in known[each.name]:
                one = Tracer(tracer.backend, tracer.first, [scheme], only_found=True)
                origin = one.origin(subject.checkpoint, stored, x, original.info.dtype, scales)
                if origin is not None and origin.exact:
                    known[each.name][scheme] = origin
    made = Counter(scheme for origins in known.values() for scheme in origins)
    ranked = [scheme for scheme, _ in made.most_common()]
    return [
        replace(each, origin=next(known[each.name][scheme] for scheme in ranked if scheme in known[each.name]))
        if each.name in known
        else each
        for each in weights
    ]


_MEASURED = frozenset({"F64", "F32", "F16", "BF16"})


def _skip(findings: Findings, subject: Subject, originals: Originals | None) -> None:
    """Say of every check that could not be made why."""
    if originals is None:
        findings.skip((*SOURCE_CHECKS, *PAIR_CHECKS), "needs --against SOURCE")
    if subject.tensor_parallel is None:
        findings.skip(DEVICE_CHECKS, "needs --tp N")
    why = skipped_ignored(subject)
    if why is not None:
        findings.skip(_named(*_IGNORE_CHECKS), why)
    if not subject.recorded_files:
        findings.skip(_named("recorded_file"), f"no {RECORD} beside it names files")
    if not subject.recorded_tensors:
        findings.skip(RECORD_CHECKS, f"no {RECORD} beside it names tensors")
    if subject.checkpoint.index is None:
        findings.skip(_named("weight_map", "total_size"), "it has no index")


def _named(*names: str) -> list[Check[Any]]:
    return [check for check in CHECKS if check.name in names]


def _notes(subject: Subject, originals: Originals | None) -> tuple[str, ...]:
    notes = list(subject.checkpoint.notes)
    if originals is not None and originals.checkpoint.restored_from is not None:
        notes.append("The source is quantized itself: errors are measured against the values its codes stand for.")
    foreign = subject.seen.foreign if subject.seen is not None else {}
    if foreign:
        notes.append(f"{len(foreign):,} weights are in formats of others, whose values were not looked at.")
    return tuple(notes)


def _working_bytes(name: str, stored: StoredWeight, originals: Originals | None) -> int:
    own = stored.nbytes + _SLAB_BYTES
    original = None if originals is None else originals.by_name.get(name)
    if original is None:
        return own
    elements = stored.plain.nbytes // max(1, {"BF16": 2, "F16": 2, "F64": 8}.get(stored.plain.dtype, 4))
    return own + original.info.nbytes + 4 * elements + stored.nbytes
