"""Captures as JSON; plans of captures are in `plans`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mxcli.files.captures import CAPTURED_ROLES
from mxcli.output.export import json_text
from mxcli.output.fields import (
    AMOUNT,
    COUNT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    Field,
    Fields,
    array,
    attributes,
    choice,
    records,
)

if TYPE_CHECKING:
    from mxcli.files.capture_writer import CapturedTensor
    from mxcli.flows.capture.plan import CapturePlan
    from mxcli.flows.capture.run import CaptureRun

REQUEST: Fields[CapturePlan] = Fields(
    Field("source", lambda plan: plan.source, TEXT),
    Field("output", lambda plan: str(plan.output.folder), TEXT),
    Field("text", lambda plan: plan.text.name, TEXT),
    Field("layers", lambda plan: [layer.name for layer in plan.layers], array(TEXT)),
    Field("roles", lambda plan: list(plan.request.recorded), array(choice(CAPTURED_ROLES))),
    Field("dtype", lambda plan: plan.model.dtype, TEXT, meaning="of the model's computation"),
    Field("batch", lambda plan: plan.windows.batch, POSITIVE),
    Field("tokens_per_window", lambda plan: plan.windows.tokens, POSITIVE),
    Field("tokens", lambda plan: plan.windows.steps * plan.windows.step_tokens, COUNT, meaning="read by all steps"),
    Field("sample_rows", lambda plan: plan.request.sample_rows, {"type": ["integer", "null"], "minimum": 1}),
    Field("seed", lambda plan: plan.request.seed, COUNT),
    Field("learning_rate", lambda plan: plan.request.learning_rate, AMOUNT),
)
"""The request of a capture, resolved for the model and the text."""

CAPTURED: Fields[CapturedTensor] = Fields(
    attributes(TEXT, "name", "layer", "role", "dtype"),
    Field("shape", lambda tensor: list(tensor.shape), array(COUNT)),
    Field("bytes", lambda tensor: tensor.nbytes, COUNT),
)
"""A tensor of the file of a step."""


def _losses(run: CaptureRun) -> list[tuple[CaptureRun, int]]:
    return [(run, step) for step in run.losses]


def _file(run: CaptureRun, step: int) -> str:
    from mxcli.files.capture_writer import StepName

    return str(run.plan.output.folder / str(StepName(step)))


_STEP: Fields[tuple[CaptureRun, int]] = Fields(
    Field("step", lambda of: of[1], COUNT),
    Field("file", lambda of: _file(*of), TEXT),
    Field(
        "loss",
        lambda of: of[0].losses[of[1]],
        NUMBER,
        meaning="mean cross-entropy in nats per token; null: not finite",
    ),
    Field("resumed", lambda of: of[1] not in of[0].written, FLAG, meaning="made by an earlier run"),
)
CAPTURE: Fields[CaptureRun] = Fields(
    REQUEST.through(lambda run: run.plan),
    Field("bytes", lambda run: run.nbytes, COUNT, meaning="of all files"),
    Field("seconds", lambda run: run.seconds, AMOUNT, meaning="taken by the steps of this run"),
    records("steps", _losses, _STEP),
    Field("complete", lambda run: run.complete, FLAG, meaning="all steps are written"),
    Field(
        "stopped",
        lambda run: run.stopped,
        {"type": ["string", "null"]},
        meaning="the error that ended the recording; null: none",
    ),
    Field("notes", lambda run: [*run.plan.notes, *run.notes], array(TEXT)),
)
"""The JSON of `mxcli capture`."""


def capture_json(captured: CaptureRun) -> str:
    """Return the recorded steps as JSON."""
    return json_text("capture", CAPTURE.record(captured))
