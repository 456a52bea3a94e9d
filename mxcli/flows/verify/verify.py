"""Verification of a quantized checkpoint: every check, and with its source the error and provenance of each weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.backends.backend import Backend
from mxcli.errors import UsageError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import GGUF, INDEX_SUFFIX, KINDS, listing
from mxcli.files.gguf import GGUF_NAMES
from mxcli.files.loaders.verdict import Verdict
from mxcli.files.model_files import RECORD
from mxcli.files.source_watch import watching
from mxcli.flows.measure.inspect import Total, totals_by
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.verify.against.checks import (
    JUDGED_CHECKS,
    ORIGINAL_CHECKS,
    SOURCE_CHECKS,
    AgainstOriginal,
    AgainstSource,
    distance_of,
)
from mxcli.flows.verify.against.judgement import Traced, judged_weights
from mxcli.flows.verify.against.originals import Original, Originals, originals_of
from mxcli.flows.verify.against.provenance import Amaxes, Provenance, Tracer
from mxcli.flows.verify.alone import Coverage, check_alone, summaries_of
from mxcli.flows.verify.checks.accounting import ACCOUNTING_CHECKS
from mxcli.flows.verify.checks.check import PROBLEM, Check, Findings, Result
from mxcli.flows.verify.checks.config import DEVICE_CHECKS, skipped_ignored
from mxcli.flows.verify.checks.fused import FUSED_CHECKS, Summarized, unshared_sets
from mxcli.flows.verify.checks.loaders import LOADER_CHECKS, Judged, by_rules
from mxcli.flows.verify.checks.model_config import MODEL_CONFIG_CHECKS
from mxcli.flows.verify.checks.record import Hashing, threads
from mxcli.flows.verify.checks.rules import RULE_CHECKS, stated_schemes
from mxcli.flows.verify.checks.statistics import STATISTICS_CHECKS, Measured
from mxcli.flows.verify.checks.table import CHECKPOINT_CHECKS, CHECKS
from mxcli.flows.verify.doubts import CERTAIN_CHECKS, Doubts, settle
from mxcli.flows.verify.errors import Distance
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import SLAB_ELEMENTS, TensorSummary, WeightSummary
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.dialects import DEFAULT, DIALECTS

if TYPE_CHECKING:
    from mxcli.flows.verify.repair import Repair
    from mxcli.flows.write.pipeline import Progress

_SLAB_BYTES = 8 * SLAB_ELEMENTS
_IGNORE_CHECKS = ("ignored_but_quantized", "not_ignored", "not_listed", "ignore_entry", "ignore_nothing")


@dataclass(frozen=True, slots=True)
class Verified:
    """A verified weight: its format, its summary, and, with a source, its distance from the original and the provenance
    of its bytes (None: not compared). `places` are the names under which findings report it."""

    name: str
    places: tuple[str, ...]
    format: str
    shape: tuple[int, ...]
    summary: TensorSummary
    distance: Distance | None
    provenance: Provenance | None


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome. `results` has every check, worst severity first; `against` is the user's name of the source;
    `loaders` are the verdicts of engines, `engines` those that must load it; `repaired` are files that were repaired
    before."""

    source: str
    layout: str
    total: Total
    by_dtype: Mapping[str, Total]
    weights: tuple[Verified, ...]
    results: tuple[Result, ...]
    against: str | None
    notes: tuple[str, ...]
    coverage: Coverage
    loaders: tuple[Verdict, ...] = ()
    engines: tuple[str, ...] = ()
    repaired: tuple[Repair, ...] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """Findings by severity."""
        return Counter(result.severity for result in self.results for _ in result.findings)

    @property
    def is_sound(self) -> bool:
        """True if there is no problem and something could be checked."""
        return not self.counts.get(PROBLEM) and not self.coverage.is_empty

    def found(self, severity: str) -> tuple[Result, ...]:
        """Return the checks of a severity that found something."""
        return tuple(result for result in self.results if result.findings and result.severity == severity)

    @property
    def compared(self) -> tuple[Verified, ...]:
        """The weights that were compared with their originals."""
        return tuple(weight for weight in self.weights if weight.distance is not None)

    @property
    def distance(self) -> Distance:
        """The summed distance of all weights compared."""
        return sum((weight.distance for weight in self.weights if weight.distance is not None), Distance())


def memory_to_verify(subject: Subject, originals: Originals | None = None) -> Need:
    """Return the memory of `verify_subject`: a weight's codes and scales with arrays per block, and with a source its
    original, its values, and its requantized codes; and the tensors that are hashed meanwhile."""
    working = [(name, _working_bytes(name, stored, originals)) for name, stored in subject.weights.items()]
    if originals is not None and subject.view is not None:
        # An original, what is stored or decoded, and the marks of where they differ.
        plain = ((info, originals.by_name.get(name)) for name, info in subject.view.tensors.items())
        working += [
            (info.name, 2 * original.info.nbytes + subject.view.working_bytes(info))
            for info, original in plain
            if original is not None and info.name not in subject.weights
        ]
    # Each thread holds a plain tensor while it looks at its values.
    largest = max((info.nbytes for info in subject.checkpoint.tensors.values()), default=0)
    return need_of(working, threads() * largest)


def checked_originals(source: Checkpoint, subject: Subject) -> Originals | None:
    """Return the originals of a checkpoint's tensors; None if its codes cannot be read, so that nothing is comparable.
    Raises UsageError if the source has none of them, or is quantized itself next to codes that were carried over;
    RefusedError if their names in a GGUF file are not known."""
    if subject.view is None:
        return None
    if subject.record.is_converted and source.restored_from is not None:
        raise UsageError(
            f"--against {printable(source.where)}: is quantized itself, and the codes of "
            f"{printable(subject.checkpoint.where)} were carried over by mxcli convert: `mxcli diff` compares them. "
            "--against takes the plain checkpoint that they were made of."
        )
    originals = originals_of(source, subject.view)
    if not originals.by_name.keys() & subject.view.tensors.keys():
        raise UsageError(
            f"--against {printable(source.where)}: has none of the tensors of {printable(subject.checkpoint.where)} "
            f"('{printable(next(iter(subject.view.tensors)))}', …): give the checkpoint that it was made from."
            f"{_naming_hint(source, subject.checkpoint)}"
        )
    return originals


def _naming_hint(source: Checkpoint, checkpoint: Checkpoint) -> str:
    """Return a hint if only the source is GGUF: names are matched the other way round."""
    return f" {GGUF_NAMES}" if source.kind == GGUF and checkpoint.kind != GGUF else ""


def verify_subject(
    name: str,
    subject: Subject,
    *,
    backend: Backend,
    against: str | None = None,
    originals: Originals | None = None,
    deep: bool = False,
    hashing: Hashing | None = None,
    on_progress: Progress | None = None,
) -> Verification:
    """Run every check on a checkpoint that the user calls `name`; `originals` are of the source called `against`. With
    `deep` names and shapes are also compared with those of the model that transformers builds. `hashing` is that of the
    subject, if it runs already."""
    findings = Findings()
    running = Hashing(subject) if hashing is None else nullcontext(hashing)
    with running as hashing, _watching(subject, originals) as hashes:
        hashing.hash_tensors()
        findings.run(CHECKPOINT_CHECKS, subject)
        tracer, weights, doubts = Tracer(backend, _producer(subject), stated=stated_schemes(subject)), [], []
        amaxes = Amaxes(backend, originals, subject)
        total, done = sum(stored.nbytes for stored in subject.weights.values()), 0
        for stored, summary in summaries_of(subject):
            findings.run(CERTAIN_CHECKS, summary)
            doubts.append(Doubts.of(summary))
            findings.run(STATISTICS_CHECKS, Measured.of(summary, subject.recorded_tensors))
            weights.append(_verified(subject, stored, summary, tracer, amaxes, originals))
            done += stored.nbytes
            if on_progress is not None:
                on_progress(done, total, stored.weight.name)
        compared = None if originals is None else AgainstSource.of(subject, originals, hashes)
        recorded = hashing.result()
    exact = {each.name for each in weights if each.provenance is not None and each.provenance.exact}
    settle(doubts, recorded.proven, exact, findings)
    summaries = {each.name: _unproven(each.summary, each.name in exact) for each in weights}
    copies = frozenset[str]() if compared is None else compared.copies
    coverage = check_alone(subject, recorded, summaries, findings, copies=copies, deep=deep)
    weights = _most_frequent(subject, weights, tracer, amaxes, originals)
    summaries = {each.name: each.summary for each in weights}
    judged = by_rules(subject, unshared_sets(subject, summaries))
    if judged is not None:
        findings.run(LOADER_CHECKS, judged)
    findings.run(FUSED_CHECKS, Summarized(subject, summaries, () if judged is None else judged.verdicts))
    if compared is not None:
        findings.run((*SOURCE_CHECKS, *ACCOUNTING_CHECKS, *MODEL_CONFIG_CHECKS), compared)
    if compared is not None and not compared.other_tensors:
        traced = _traced(subject, weights, originals)
        for each in traced.values():
            by_rule = each.provenance.exact and not each.provenance.implied
            findings.run(ORIGINAL_CHECKS, AgainstOriginal(each.stored, each.distance, by_rule))
        for weight in judged_weights(subject, traced, amaxes, backend):
            findings.run(JUDGED_CHECKS, weight)
    _skip(findings, subject, compared, against, judged)
    return Verification(
        source=name,
        layout=subject.layout.name if subject.layout is not None else str(subject.checkpoint.dialect),
        total=Total.of(subject.checkpoint.tensors.values()),
        by_dtype=totals_by(lambda info: info.dtype, subject.checkpoint.tensors.values()),
        weights=tuple(weights),
        results=findings.results(CHECKS),
        against=against,
        notes=_notes(subject, originals),
        coverage=coverage,
        loaders=() if judged is None else judged.verdicts,
        engines=subject.engines,
    )


@contextmanager
def _watching(subject: Subject, originals: Originals | None) -> Iterator[Mapping[str, str]]:
    """Yield the hashes of the tensors that are read of the source, by name, as they are read; none if the record has
    nothing to compare them with."""
    if originals is None or not subject.record.source_hashes:
        yield {}
    else:
        with watching(originals.checkpoint) as watch:
            yield watch.hashes


def _producer(subject: Subject) -> str:
    """Return the dialect with the name of the layout, else the default."""
    return subject.layout.name if subject.layout is not None and subject.layout.name in DIALECTS else DEFAULT.name


def _traced(subject: Subject, weights: list[Verified], originals: Originals | None) -> dict[str, Traced]:
    """Return the weights that were compared with their originals."""
    found = {}
    for each in weights:
        original = _original(subject.weights[each.name], originals)
        if original is not None and each.distance is not None and each.provenance is not None:
            found[each.name] = Traced(subject.weights[each.name], original, each.distance, each.provenance)
    return found


def _verified(
    subject: Subject,
    stored: StoredWeight,
    summary: WeightSummary,
    tracer: Tracer,
    amaxes: Amaxes,
    originals: Originals | None,
) -> Verified:
    checkpoint, weight = subject.checkpoint, stored.weight
    distance = provenance = None
    original = _original(stored, originals)
    if original is not None:
        x = original.read()
        distance = distance_of(checkpoint, stored, original.info.dtype, x, tracer.backend)
        provenance = tracer.trace(checkpoint, stored, x, original.info.dtype, amaxes.of(stored))
    places = (weight.name, weight.name.removesuffix(".weight"), *(part.entry.name for part in stored.contents))
    return Verified(
        weight.name,
        tuple(dict.fromkeys(places)),
        weight.format.name,
        stored.plain.shape,
        summary.tensor_level,
        distance,
        provenance,
    )


def _unproven(summary: TensorSummary, is_exact: bool) -> TensorSummary:
    """Return the summary of a weight, without the profile if its bytes are those that its rule makes of the source."""
    return replace(summary, profile=None) if is_exact else summary


def _original(stored: StoredWeight, originals: Originals | None) -> Original | None:
    """Return the original of a weight, if it has a comparable shape and dtype."""
    original = None if originals is None else originals.by_name.get(stored.weight.name)
    fits = original is not None and original.shape == stored.plain.shape and original.info.dtype in _MEASURED
    return original if fits else None


def _most_frequent(
    subject: Subject, weights: list[Verified], tracer: Tracer, amaxes: Amaxes, originals: Originals | None
) -> list[Verified]:
    """Return the weights with the scheme that reproduces their bytes; of several, the one that fits most weights."""
    known = {
        each.name: {each.provenance.scheme: each.provenance}
        for each in weights
        if each.provenance and each.provenance.exact
    }
    for each in weights:
        stored = subject.weights[each.name]
        original = _original(stored, originals)
        others = [scheme for scheme in tracer.found if scheme.format == stored.weight.format]
        named = each.provenance is not None and each.provenance.named
        if each.name not in known or original is None or len(others) < 2 or named:
            continue
        x, scales = original.read(), amaxes.of(stored)
        for scheme in others:
            if scheme not in known[each.name]:
                one = Tracer(tracer.backend, tracer.first, [scheme], only_found=True)
                provenance = one.trace(subject.checkpoint, stored, x, original.info.dtype, scales)
                if provenance is not None and provenance.exact:
                    known[each.name][scheme] = provenance
    counts = Counter(scheme for schemes in known.values() for scheme in schemes)
    ranked = [scheme for scheme, _ in counts.most_common()]
    return [
        replace(each, provenance=next(known[each.name][scheme] for scheme in ranked if scheme in known[each.name]))
        if each.name in known
        else each
        for each in weights
    ]


_MEASURED = frozenset({"F64", "F32", "F16", "BF16"})


def _skip(
    findings: Findings,
    subject: Subject,
    compared: AgainstSource | None,
    against: str | None,
    judged: Judged | None,
) -> None:
    """Record the reason for every check that is skipped."""
    if compared is None:
        why = "needs --against SOURCE" if against is None else "the codes are not read"
        findings.skip((*SOURCE_CHECKS, *ACCOUNTING_CHECKS, *MODEL_CONFIG_CHECKS, *ORIGINAL_CHECKS, *JUDGED_CHECKS), why)
    elif compared.other_tensors:
        findings.skip((*ORIGINAL_CHECKS, *JUDGED_CHECKS), "SOURCE is another one than the record names")
    if subject.tensor_parallel is None:
        findings.skip(DEVICE_CHECKS, "needs --tp N")
    if judged is None:
        findings.skip(LOADER_CHECKS, "no weight could be read")
    elif not subject.engines:
        findings.skip(_named("named_loader"), "needs --for ENGINE")
    reason = skipped_ignored(subject)
    if reason is not None:
        findings.skip(_named(*_IGNORE_CHECKS), reason)
    if not subject.recorded_tensors:
        findings.skip((*RULE_CHECKS, *STATISTICS_CHECKS), f"no {RECORD} with tensors")
    if subject.checkpoint.index is None:
        findings.skip(_named("weight_map", "total_size"), "no index")


def _named(*names: str) -> list[Check[Any]]:
    return [check for check in CHECKS if check.name in names]


_SHOWN = 5


def _notes(subject: Subject, originals: Originals | None) -> tuple[str, ...]:
    notes = [*subject.checkpoint.notes, *_unrecorded_weights(subject)]
    transforms = subject.transforms
    if transforms.refusal is not None:
        notes.append(f"mxcli dequantize refuses this checkpoint: {transforms.refusal}.")
    notes += [transforms.note] if transforms.note is not None else []
    if originals is not None and originals.checkpoint.restored_from is not None:
        notes.append("The source is quantized itself: errors are measured against its dequantized values.")
    return tuple(notes)


def _unrecorded_weights(subject: Subject) -> Iterator[str]:
    """Yield a note on weights next to a recorded output that are not part of it."""
    record, root = subject.record, subject.checkpoint.root
    weights = [name for name in listing(root) if Path(name).suffix in KINDS or name.endswith(INDEX_SUFFIX)]
    others = [name for name in weights if name not in record.files] if record.files else []
    if others:
        more = f" and {len(others) - _SHOWN:,} more" if others[_SHOWN:] else ""
        listed = ", ".join(map(printable, others[:_SHOWN]))
        yield f"Not part of the output that {RECORD} records, and not checked: {listed}{more}."


def _working_bytes(name: str, stored: StoredWeight, originals: Originals | None) -> int:
    """Return the memory to verify a weight: as stored, and with a source the original and a copy of it, its values and
    those of the rule in binary32, and both in codes."""
    own = stored.nbytes + _SLAB_BYTES
    original = None if originals is None else originals.by_name.get(name)
    if original is None:
        return own
    elements = math.prod(stored.plain.shape)
    return own + 2 * original.info.nbytes + 2 * 4 * elements + 2 * stored.nbytes
