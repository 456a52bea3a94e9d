"""Verification without a source: hashes against the record, values, siblings and the model that config.json states."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mxcli.errors import MxcliError, printable
from mxcli.files.model_files import RECORD
from mxcli.flows.verify.checks.check import Findings
from mxcli.flows.verify.checks.expected import Expected
from mxcli.flows.verify.checks.foreign import FOREIGN_CHECKS, foreign_summaries
from mxcli.flows.verify.checks.layers import LAYER_CHECKS, Layers
from mxcli.flows.verify.checks.model import MODEL_CHECKS
from mxcli.flows.verify.checks.model_rows import USUAL
from mxcli.flows.verify.checks.parameters import PARAMETER_CHECKS, parameters_of
from mxcli.flows.verify.checks.plain import (
    CERTAIN_PLAIN_CHECKS,
    COPIED_CHECKS,
    PLAIN_CHECKS,
    plain_tensors,
    summarize_plain,
)
from mxcli.flows.verify.checks.record import RECORD_CHECKS, Recorded, threads
from mxcli.flows.verify.checks.siblings import PLAIN_SIBLING_CHECKS, SIBLING_CHECKS, PlainSiblings, Profiled
from mxcli.flows.verify.checks.text_model import Model
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import TensorSummary, WeightSummary, summarize
from mxcli.flows.write.restore import StoredWeight

_ENOUGH = 2
"""Weights per thread that are summarized ahead."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Numbers of quantized weights by the way they were checked: `by_record` have the bytes that the record states,
    `by_values` were decoded and looked at, `unchecked` are of a format that is not read. `proof` says what the record
    proves, and `model` what the names and shapes were compared with."""

    by_record: int
    by_values: int
    unchecked: int
    tensors: int
    tensors_by_record: int
    proof: str
    model: str
    unread: str | None = None

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        return self.by_record + self.by_values + self.unchecked

    @property
    def is_empty(self) -> bool:
        """True if no quantized weight could be checked."""
        return not self.by_record + self.by_values


def summaries_of(subject: Subject) -> Iterator[tuple[StoredWeight, WeightSummary]]:
    """Yield each weight with its summary, in order; threads work ahead. Weights without a recorded hash get a
    profile."""
    record = subject.record
    hashed = {name for entries in record.stored.values() for name in entries}
    hashed |= {name for name, info in subject.checkpoint.tensors.items() if info.file.name in record.sha256}
    waiting: deque[tuple[StoredWeight, Future[WeightSummary]]] = deque()
    with ThreadPoolExecutor(threads(), "summary") as pool:
        try:
            for stored in subject.weights.values():
                profiled = not all(content.entry.name in hashed for content in stored.contents)
                waiting.append((stored, pool.submit(summarize, subject.checkpoint, stored, profiled=profiled)))
                if len(waiting) > _ENOUGH * threads():
                    first, summary = waiting.popleft()
                    yield first, summary.result()
            while waiting:
                first, summary = waiting.popleft()
                yield first, summary.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_alone(
    subject: Subject,
    recorded: Recorded,
    summaries: Mapping[str, TensorSummary],
    findings: Findings,
    *,
    copies: frozenset[str] = frozenset(),
    deep: bool = False,
) -> Coverage:
    """Run the checks that need no source and are not of one weight; return what was checked. `copies` are plain tensors
    that were compared with a source and have its values. With `deep` transformers builds the model that config.json
    states, which takes seconds."""
    if subject.record.is_there:
        findings.run(RECORD_CHECKS, recorded)
    else:
        findings.skip(RECORD_CHECKS, f"no {RECORD}")
    expected = Expected(subject, USUAL)
    findings.run(LAYER_CHECKS, Layers(subject, expected))
    profiles = {name: each.profile for name, each in summaries.items() if each.profile is not None}
    if profiles or not subject.weights:
        findings.run(SIBLING_CHECKS, Profiled(subject, profiles))
    else:
        findings.skip(SIBLING_CHECKS, "every weight is proven by the record or the source")
    _check_plain(subject, recorded.proven | copies, findings)
    findings.run(MODEL_CHECKS, Model(subject, expected))
    foreign = _check_foreign(subject, findings)
    return _coverage(subject, recorded, foreign, _check_parameters(subject, findings, deep=deep))


def _check_plain(subject: Subject, proven: frozenset[str], findings: Findings) -> None:
    quantized = frozenset(part.entry.name for stored in subject.weights.values() for part in stored.contents)
    infos = plain_tensors(subject.checkpoint, quantized)
    amax: dict[str, float] = {}
    with ThreadPoolExecutor(threads(), "plain") as pool:
        for at in range(0, len(infos), _PLAIN_AT_ONCE):
            batch = infos[at : at + _PLAIN_AT_ONCE]
            for plain in pool.map(lambda info: summarize_plain(subject.checkpoint, info), batch):
                is_proven = plain.info.name in proven
                findings.run((*CERTAIN_PLAIN_CHECKS, *COPIED_CHECKS) if is_proven else PLAIN_CHECKS, plain)
                amax[plain.info.name] = plain.amax
    findings.run(PLAIN_SIBLING_CHECKS, PlainSiblings(amax, proven))


_PLAIN_AT_ONCE = 64


def _check_foreign(subject: Subject, findings: Findings) -> int:
    """Check weights in third-party formats that a package decodes; return their number."""
    foreign = subject.view.foreign if subject.view is not None else {}
    if not foreign:
        findings.skip(FOREIGN_CHECKS, "no weights in third-party formats")
        return 0
    done = 0
    try:
        for summary in foreign_summaries(subject.checkpoint, foreign):
            findings.run(FOREIGN_CHECKS, summary)
            done += 1
    except MxcliError as error:
        findings.skip(FOREIGN_CHECKS, printable(error.reasons[0]))
    return done


def _check_parameters(subject: Subject, findings: Findings, *, deep: bool) -> str:
    """Compare names and shapes with those of the model that config.json states; return what they were compared with."""
    parameters = parameters_of(subject) if deep else "needs --deep"
    if isinstance(parameters, str):
        findings.skip(PARAMETER_CHECKS, parameters)
        return f"a table of usual models, since {parameters}" if deep else "a table of usual models"
    findings.run(PARAMETER_CHECKS, parameters)
    return f"{parameters.model} of transformers"


def _coverage(subject: Subject, recorded: Recorded, foreign: int, model: str) -> Coverage:
    proven = recorded.proven
    parts = [[content.entry.name for content in stored.contents] for stored in subject.weights.values()]
    by_record = sum(1 for names in parts if all(name in proven for name in names))
    view = subject.view
    unread = len(view.foreign) - foreign if view is not None else 0
    if subject.unread is not None:
        read = {name for names in parts for name in names}
        tensors = subject.checkpoint.tensors.items()
        codes = sum(1 for name, info in tensors if name not in read and (info.block_type or info.role == "codes"))
        unread += max(codes, subject.unread_weights)
    return Coverage(
        by_record=by_record,
        by_values=len(parts) - by_record + foreign,
        unchecked=unread,
        tensors=len(subject.checkpoint.tensors),
        tensors_by_record=len(proven),
        proof=_proof(subject, recorded),
        model=model,
        unread=subject.unread,
    )


def _proof(subject: Subject, recorded: Recorded) -> str:
    record, tensors = subject.record, len(subject.checkpoint.tensors)
    if not record.is_there:
        return f"not proven: there is no {RECORD}"
    if not record.has_hashes:
        return f"not proven: {RECORD} has no hashes"
    if len(recorded.proven) == tensors:
        return f"the bytes of all {tensors:,} tensors are as recorded"
    return f"the bytes of {len(recorded.proven):,} of {tensors:,} tensors are as recorded"
