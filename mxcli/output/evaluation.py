"""An evaluation as a table and sentences, as JSON and as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mxcli.errors import printable
from mxcli.flows.evaluate.measures import MEASURES, Measure, Pair, measures_of
from mxcli.output.export import csv_text, json_text
from mxcli.output.fields import COUNT, NUMBER, TEXT, TEXT_OR_NULL, Field, Fields, array, records
from mxcli.output.numbers import ABSENT, byte_size, counted, quantity, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Row, aligned

if TYPE_CHECKING:
    from mxcli.flows.evaluate.evaluate import Evaluated, Evaluation, EvaluationPlan

_PUBLISHED = "published_change"
CERTAIN = 2.0
"""Standard errors beyond which a change is taken for one."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A row: what was evaluated, and its measures by name."""

    each: Evaluated
    measures: dict[str, float | None]

    def of(self, name: str) -> str | None:
        """Return an attribute of the candidate; None for the original."""
        return None if self.each.candidate is None else str(getattr(self.each.candidate, name))


def _lines(evaluation: Evaluation) -> Iterator[_Line]:
    for each in (evaluation.original, *evaluation.evaluated):
        yield _Line(each, dict(measures_of(Pair(each, evaluation.original))))


def _field(row: Measure) -> Field[_Line]:
    unit = f" [{row.unit}]" if row.unit else ""
    meaning = f"{row.meaning}{unit}" + (f": {row.formula}" if row.formula else "")
    return Field(
        row.name,
        lambda line: line.measures[row.name],
        NUMBER,
        row.heading,
        meaning=meaning,
        cell=lambda line: _cell(row, line.measures),
        drop=row.drop,
    )


def _cell(row: Measure, measures: dict[str, float | None]) -> str:
    value = measures[row.name]
    if value is None:
        return ABSENT
    shown = significant(value) if row.digits is None else f"{value:.{row.digits}f}"
    error = measures.get(f"{row.name.removesuffix('_mean')}_error") if row.heading else None
    return shown if error is None else f"{shown} ±{error:.{row.digits or 2}f}"


_EVALUATED: Fields[_Line] = Fields(
    Field("name", lambda line: line.each.name, TEXT, "model", right=False),
    Field("kind", lambda line: line.of("kind") or "original", TEXT),
    Field("weights", lambda line: line.of("weights"), TEXT_OR_NULL),
    Field("activations", lambda line: line.of("activations"), TEXT_OR_NULL),
    *map(_field, MEASURES.values()),
)
RECORD_NAMES = tuple(_EVALUATED.names)
"""The columns of CSV."""
EVALUATION: Fields[Evaluation] = Fields(
    Field("source", lambda result: result.plan.source, TEXT),
    Field("model", lambda result: type(result.plan.outline.empty).__name__, TEXT),
    Field("task", lambda result: result.plan.task.name, TEXT),
    Field("study", lambda result: None if result.plan.study is None else result.plan.study.name, TEXT_OR_NULL),
    Field("text", lambda result: result.plan.text.name, TEXT),
    Field("text_sha256", lambda result: result.plan.text.sha256, TEXT),
    Field("tokens", lambda result: result.plan.tokens, COUNT, meaning="scored"),
    Field("windows", lambda result: len(result.plan.questions), COUNT),
    Field("context", lambda result: result.plan.context, COUNT),
    Field("dtype", lambda result: result.plan.outline.dtype, TEXT, meaning="in which products are computed"),
    Field("unfinished", lambda result: result.unfinished, COUNT),
    Field("conclusion", lambda result: list(conclusion(result)), array(TEXT)),
    Field("notes", lambda result: [*result.plan.notes, *result.notes], array(TEXT)),
    records("evaluated", lambda result: list(_lines(result)), _EVALUATED),
)
"""The JSON of an evaluation."""


def evaluation_text(evaluation: Evaluation, screen: Screen) -> str:
    """Return what was read, a row for the original and each candidate, and what follows."""
    lines = [line for text in _head(evaluation.plan) for line in folded_lines(text, screen)]
    fields = _EVALUATED if evaluation.plan.study is not None else _EVALUATED.without(_PUBLISHED)
    rows: list[Row] = [fields.cells(line) for line in _lines(evaluation)]
    lines = [bold(lines[0], screen), *lines[1:], "", *aligned(fields.columns(), rows, screen)]
    if ending := list(conclusion(evaluation)):
        lines += ["", *(line for text in ending for line in folded_lines(text, screen))]
    return "\n".join(lines)


def _head(plan: EvaluationPlan) -> Iterator[str]:
    model = type(plan.outline.empty).__name__
    yield f"{plan.source}: {model}, computed in {plan.outline.dtype}"
    if plan.study is not None:
        yield f"study {plan.study.name}: {plan.study.meaning}; published for {plan.study.model} ({plan.study.source})"
    yield (
        f"{plan.text.name}: {plan.tokens:,} {'masked ' if plan.task.name == 'masked' else ''}tokens scored in "
        f"{counted(len(plan.questions), 'window')} of {plan.context:,}"
    )


def conclusion(evaluation: Evaluation) -> Iterator[str]:
    """Yield what follows from the changes of the loss and their errors."""
    found = [line for line in _lines(evaluation) if line.each.candidate is not None]
    for line in found:
        if line.each.nonfinite:
            yield (
                f"{line.each.name}: {line.each.nonfinite:,} predictions are not finite, so it has no loss; `mxcli "
                "verify` or `mxcli report` says which weights are damaged."
            )
    if evaluation.is_by_parts:
        return
    changes = {line.each.name: (line.measures["loss_change"], line.measures["loss_change_error"]) for line in found}
    known = {name: (change, error) for name, (change, error) in changes.items() if change is not None}
    unsure = [name for name, (change, error) in known.items() if error is not None and abs(change) <= CERTAIN * error]
    if unsure:
        yield (
            f"Within two standard errors of the original: {'; '.join(map(printable, unsure))}. More --tokens show a "
            "smaller change."
        )
    if any(error is None for _, error in known.values()):
        yield "Too few tokens for standard errors: a window of more than 257 tokens, or two windows, are needed."


def evaluation_json(evaluation: Evaluation) -> str:
    """Return the evaluation as JSON."""
    return json_text("evaluate", EVALUATION.record(evaluation))


def evaluation_csv(evaluation: Evaluation) -> str:
    """Return a row for the original and each candidate."""
    return csv_text(map(_EVALUATED.record, _lines(evaluation)), RECORD_NAMES)


def plan_record(plan: EvaluationPlan) -> dict[str, Any]:
    """Return what would be evaluated, for JSON."""
    return {
        "source": plan.source,
        "model": type(plan.outline.empty).__name__,
        "task": plan.task.name,
        "tokens": plan.tokens,
        "windows": len(plan.questions),
        "context": plan.context,
        "candidates": [candidate.name for candidate in plan.candidates],
        "bits_per_weight": [size.bits for size in plan.sizes],
        "model_bytes": plan.outline.nbytes,
        "predictions_bytes": plan.predictions_bytes,
        "notes": list(plan.notes),
    }


def evaluation_plan_json(plan: EvaluationPlan) -> str:
    """Return the plan as JSON."""
    return json_text("evaluate.plan", plan_record(plan))


def evaluation_plan_text(plan: EvaluationPlan, screen: Screen) -> str:
    """Return the text of what would be evaluated."""
    lines = [
        *_head(plan),
        f"would score the original and {counted(len(plan.candidates), 'candidate')}: "
        + ", ".join(
            f"{printable(candidate.name)} ({size.bits:.2f} bits per weight)"
            for candidate, size in zip(plan.candidates, plan.sizes, strict=True)
        ),
        f"memory: {byte_size(plan.outline.nbytes)} of weights in {plan.outline.dtype}, as much again while a candidate "
        f"is computed; disk: {byte_size(plan.predictions_bytes)} for the original's predictions "
        f"({quantity(plan.outline.vocabulary)} log-probabilities a token)",
    ]
    return "\n".join(line for each in lines for line in folded_lines(each, screen))
