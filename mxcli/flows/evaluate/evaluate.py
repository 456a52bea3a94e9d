"""The evaluation of a model: the original, then every candidate on the same windows, against its predictions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from mxcli.errors import InputError, RefusedError, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.flows.capture.model import ModelOutline, Text
from mxcli.flows.doctor import own_version
from mxcli.flows.emulate.emulate import emulate
from mxcli.flows.evaluate.candidates import CHECKPOINT, Candidate, Size, original_size, size_of
from mxcli.flows.evaluate.log import SUFFIX, ScoreLog
from mxcli.flows.evaluate.model import (
    MASKED,
    Task,
    encoder_of,
    loaded,
    mask_token,
    masked_positions,
    open_model,
    outline_of,
    refuse_other_vocabulary,
    task_of,
)
from mxcli.flows.evaluate.predictions import Predictions, check_space, created, opened, temporary, temporary_folder
from mxcli.flows.evaluate.predictions import size_of as predictions_size
from mxcli.flows.evaluate.scores import Scores, WindowScores
from mxcli.flows.evaluate.scoring import Question, logits_of, scores_of
from mxcli.flows.evaluate.studies import Study
from mxcli.flows.evaluate.windows import Reading, Window, context_of, windows_of
from mxcli.flows.write.records import fingerprint

ORIGINAL = "original"
OnWindow = Callable[[int, int, str], object]
"""Called with the tokens scored so far, those of all, and the name of what is evaluated."""


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """An evaluation before any weight is loaded: the original with its outline and task, the questions of its windows,
    the candidates with their sizes, and the identity of the original's predictions on disk."""

    source: str
    original: Checkpoint
    outline: ModelOutline
    task: Task
    questions: tuple[Question, ...]
    context: int
    text: Text
    candidates: tuple[Candidate, ...]
    sizes: tuple[Size, ...]
    identity: Mapping[str, object]
    notes: tuple[str, ...]
    study: Study | None = None

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return sum(len(question.targets) for question in self.questions)

    @property
    def predictions_bytes(self) -> int:
        """Bytes of the original's predictions on disk."""
        return predictions_size(self.tokens, self.outline.vocabulary)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The scores of the original or of a candidate (None: the original), its size (None: of a part), and the seconds
    that its forward passes took."""

    candidate: Candidate | None
    name: str
    scores: Scores
    size: Size | None
    seconds: float

    @property
    def nonfinite(self) -> int:
        """Tokens whose prediction is not a number."""
        return sum(int(np.count_nonzero(~np.isfinite(window.nll))) for window in self.scores.windows)

    @property
    def tokens_per_second(self) -> float:
        """Scored tokens a second."""
        return self.scores.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result: the original, then the candidates that were evaluated; `unfinished` of them were not."""

    plan: EvaluationPlan
    original: Evaluated
    evaluated: tuple[Evaluated, ...]
    unfinished: int
    notes: tuple[str, ...]

    @property
    def is_by_parts(self) -> bool:
        """True if parts of the model were evaluated one by one."""
        return any(each.size is None for each in self.evaluated)


def plan_evaluation(
    source: str,
    text: Text,
    candidates: Sequence[Candidate],
    reading: Reading,
    dtype: str = "F32",
    study: Study | None = None,
) -> EvaluationPlan:
    """Return the plan of an evaluation, before any weight is loaded.

    Raises what `open_model`, `outline_of` and `windows_of` do, and RefusedError for candidates named twice.
    """
    original = open_model(source)
    task = task_of(original)
    outline = outline_of(original, task, dtype)
    encode, note = encoder_of(outline)
    context = context_of(reading, outline.positions)
    windows = windows_of(text, encode, reading, context, outline.vocabulary)
    keys = [candidate.key for candidate in candidates]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise RefusedError(f"'{printable(twice[0])}' is named twice; name each candidate once.")
    for candidate in candidates:
        if candidate.kind == CHECKPOINT:
            other = open_model(candidate.weights)
            refuse_other_vocabulary(outline, outline_of(other, task, dtype))
    return EvaluationPlan(
        source,
        original,
        outline,
        task,
        tuple(_questions(windows, task, outline)),
        context,
        text,
        tuple(candidates),
        tuple(size_of(candidate, original) for candidate in candidates),
        _identity(original, text, reading, context, dtype, task, windows),
        (*original.notes, *([] if note is None else [note])),
        study,
    )


def evaluate_plan(
    plan: EvaluationPlan,
    *,
    device: str = "cpu",
    baseline: Path | None = None,
    resume: bool = False,
    replace: bool = False,
    stop: Callable[[], bool] = lambda: False,
    on_window: OnWindow = lambda *_: None,
) -> Evaluation:
    """Evaluate the original and every candidate; stop before the next window if `stop` returns true.

    `baseline` keeps the original's predictions for later runs, and next to them the scores of every window; a file that
    exists is used if it is of the same model, text and reading. With `resume` windows that an interrupted run has
    scored are not scored again. Raises InputError if a prediction of the original is not finite.
    """
    vocabulary = plan.outline.vocabulary
    is_known = baseline is not None and baseline.exists() and not replace
    if not is_known:
        check_space(temporary_folder() if baseline is None else baseline.parent, plan.predictions_bytes)
    with _log(plan, baseline, resume=resume, replace=replace) as log:
        model, notes = loaded(plan.outline, plan.original, device)
        run = _Run(plan, model, log, stop, on_window, notes)
        if baseline is None:
            with temporary(vocabulary) as predictions:
                return run.result(run.original(predictions), predictions)
        original = None
        if not is_known:
            with created(baseline, plan.identity, vocabulary, replace=replace) as predictions:
                original = run.original(predictions)
        with opened(baseline, plan.identity, plan.tokens, vocabulary) as predictions:
            return run.result(original or run.known_original(predictions), predictions)


def original_of(
    plan: EvaluationPlan, model: Any, predictions: Predictions, stop: Callable[[], bool], on_window: OnWindow
) -> Evaluated:
    """Return the original's scores, and keep its predictions. Raises KeyboardInterrupt if it was stopped."""
    return _Run(plan, model, None, stop, on_window).original(predictions)


def _log(
    plan: EvaluationPlan, baseline: Path | None, *, resume: bool, replace: bool
) -> AbstractContextManager[ScoreLog | None]:
    """Return the log of scores next to the baseline; None without one."""
    if baseline is None:
        return nullcontext()
    return ScoreLog(Path(f"{baseline}{SUFFIX}"), plan.identity, resume=resume, replace=replace or baseline.exists())


class _Run:
    """An evaluation in progress, with the loaded original."""

    def __init__(
        self,
        plan: EvaluationPlan,
        model: Any,
        log: ScoreLog | None,
        stop: Callable[[], bool],
        on_window: OnWindow,
        notes: Sequence[str] = (),
    ) -> None:
        self._plan, self._model, self._log, self._stop, self._on_window = plan, model, log, stop, on_window
        self._starts = np.cumsum([0, *(len(question.targets) for question in plan.questions)]).tolist()
        self._done = 0
        self._notes = list(notes)

    def original(self, predictions: Predictions) -> Evaluated:
        """Return the original's scores, and keep its predictions. Raises KeyboardInterrupt if it was stopped."""

        def score(at: int, question: Question) -> WindowScores:
            logits = logits_of(self._model, question)
            return scores_of(
                logits, question, None, lambda first, rows: predictions.write(self._starts[at] + first, rows)
            )

        scores, seconds = self._scored(ORIGINAL, score, logged=False)
        if scores is None:
            raise KeyboardInterrupt
        return self._checked(Evaluated(None, ORIGINAL, scores, original_size(self._plan.original), seconds))

    def known_original(self, predictions: Predictions) -> Evaluated:
        """Return the original's scores by the predictions that an earlier run kept."""
        scores = []
        for at, question in enumerate(self._plan.questions):
            rows = predictions.read(self._starts[at], len(question.targets))
            nll = -np.take_along_axis(rows, question.targets[:, None], 1)[:, 0]
            nothing = np.zeros(len(nll), np.float32)
            scores.append(WindowScores(nll, nothing, np.ones(len(nll), np.bool_), nothing))
            self._advance(question, ORIGINAL)
        size = original_size(self._plan.original)
        return self._checked(Evaluated(None, ORIGINAL, Scores(tuple(scores)), size, 0.0))

    def result(self, original: Evaluated, predictions: Predictions) -> Evaluation:
        """Return the result, every candidate compared with the original's predictions."""
        found: list[Evaluated] = []
        for candidate, size in zip(self._plan.candidates, self._plan.sizes, strict=True):
            each = self._candidate(candidate, size, predictions)
            if each is None:
                break
            found.append(each)
        left = len(self._plan.candidates) - len(found)
        return Evaluation(self._plan, original, tuple(found), left, tuple(dict.fromkeys(self._notes)))

    def _candidate(self, candidate: Candidate, size: Size, predictions: Predictions) -> Evaluated | None:
        """Return the scores of a candidate; None if it was stopped."""
        if self._log is not None and all((candidate.key, at) in self._log.found for at in range(len(self._starts) - 1)):
            scores, seconds = self._scored(candidate.key, _never, logged=True)
        else:
            with self._applied(candidate) as model:

                def score(at: int, question: Question) -> WindowScores:
                    begin, logits = self._starts[at], logits_of(model, question)
                    return scores_of(logits, question, lambda first, count: predictions.read(begin + first, count))

                scores, seconds = self._scored(candidate.key, score, logged=True)
        return None if scores is None else Evaluated(candidate, candidate.name, scores, size, seconds)

    def _scored(
        self, key: str, score: Callable[[int, Question], WindowScores], *, logged: bool
    ) -> tuple[Scores | None, float]:
        """Return the scores of all windows, and the seconds they took; those in the log are not made again."""
        found, seconds = [], 0.0
        for at, question in enumerate(self._plan.questions):
            known = None if self._log is None or not logged else self._log.found.get((key, at))
            if known is not None and len(known.nll) == len(question.targets):
                assert self._log is not None
                found.append(known)
                seconds += self._log.seconds[key, at]
            elif self._stop():
                return None, seconds
            else:
                began = time.monotonic()
                found.append(score(at, question))
                took = time.monotonic() - began
                seconds += took
                if self._log is not None and logged:
                    self._log.add(key, at, found[-1], took)
            self._advance(question, key)
        return Scores(tuple(found)), seconds

    def _advance(self, question: Question, name: str) -> None:
        self._done += len(question.targets)
        self._on_window(self._done, (1 + len(self._plan.candidates)) * self._plan.tokens, name)

    def _checked(self, original: Evaluated) -> Evaluated:
        if original.nonfinite:
            raise InputError(
                f"{printable(self._plan.original.where)}: {original.nonfinite:,} of {original.scores.tokens:,} "
                "predictions of the original are not finite, so nothing can be compared with them; `mxcli report` says "
                "which weights are not, and --compute-dtype f32 has the widest range."
            )
        return original

    @contextmanager
    def _applied(self, candidate: Candidate) -> Iterator[Any]:
        """Yield the model as a candidate computes it."""
        if candidate.kind == CHECKPOINT:
            device = str(next(self._model.parameters()).device)
            model, notes = loaded(self._plan.outline, open_model(candidate.weights), device)
            self._notes += notes
            yield model
            return
        with emulate(self._model, **candidate.emulation) as emulated:
            self._notes += emulated.notes
            yield self._model


def _never(at: int, question: Question) -> WindowScores:
    raise AssertionError(f"window {at} is in the log")


def _questions(windows: Sequence[Window], task: Task, outline: ModelOutline) -> Iterator[Question]:
    if task is not MASKED:
        for window in windows:
            positions = np.arange(window.scored_from - 1, len(window.ids) - 1)
            yield Question(window.ids, positions, window.ids[window.scored_from :])
        return
    mask = mask_token(outline)
    for at, window in enumerate(windows):
        positions = masked_positions(len(window.ids), at)
        ids = window.ids.copy()
        ids[positions] = mask
        yield Question(ids, positions, window.ids[positions])


def _identity(
    original: Checkpoint, text: Text, reading: Reading, context: int, dtype: str, task: Task, windows: Sequence[Window]
) -> Mapping[str, object]:
    """Return what the original's predictions depend on."""
    ids = hashlib.sha256(b"".join(window.ids.tobytes() for window in windows)).hexdigest()
    return {
        "model": fingerprint(original if original.stored is None else original.stored),
        "text": text.sha256,
        "tokens": ids,
        "context": context,
        "stride": reading.stride,
        "task": task.name,
        "dtype": dtype,
        "versions": {"mxcli": own_version(), **{name: version(name) for name in ("torch", "transformers")}},
    }
