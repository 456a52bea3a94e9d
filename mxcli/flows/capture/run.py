"""A model run over a text, step by step, with every step's captures in a file of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mxcli.files.captures import MODEL_KEY
from mxcli.flows.capture.budget import Limits
from mxcli.flows.capture.capture import recording
from mxcli.flows.capture.layers import chosen_layers, linear_layers
from mxcli.flows.capture.model import elsewhere, enough_memory, load
from mxcli.flows.capture.plan import CapturePlan, CaptureRequest
from mxcli.flows.capture.recorder import CaptureTarget, Recorder, Recording

OnStep = Callable[[int, int, str], object]
"""Told the bytes of files that are there, those of all, and what was done."""


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """What is there: whether all of it, the steps that this run made, each step's loss in nats per token, the bytes of
    the files, the seconds that this run's steps took, and notes."""

    plan: CapturePlan
    complete: bool
    made: tuple[int, ...]
    losses: dict[int, float | None]
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()


def capture_model(
    plan: CapturePlan, *, device: str, stop: Callable[[], bool] = lambda: False, on_step: OnStep = lambda *_: None
) -> CaptureRun:
    """Load the model, run it over the text, and write a file per step; ends before the next step when `stop` says so.

    Steps that are there are not run again, except that with a learning rate they are run for the weights after them.
    Files of an earlier capture are replaced one by one, and those that this one lacks go when all of it is there.
    """
    asked, steps, kept = plan.asked, plan.windows.steps, plan.kept
    losses, made, notes = {step: each.loss for step, each in kept.items()}, list[int](), list[str]()
    nbytes, seconds = sum(each.nbytes for each in kept.values()), 0.0
    if len(kept) < steps:
        model, told = load(plan.model, device)
        update = _prepare(model, asked)
        done, total = 0, steps * plan.size.disk
        began = time.monotonic()
        with _recording(model, plan) as recorder:
            for step in range(steps):
                if stop():
                    break
                recorder.at(step)
                if step not in kept or asked.learning_rate:
                    loss = _run_step(model, plan, step, device, update)
                    if file := recorder.step(loss=_loss_record(loss), text=_text_record(plan, step)):
                        losses[step] = loss
                        made.append(step)
                        nbytes += file.nbytes
                done += plan.size.disk
                on_step(done, total, f"step {step}")
        seconds = time.monotonic() - began
        notes = [*told, *recorder.notes]
    is_complete = len(losses) == steps
    if is_complete:
        for name in plan.surplus:
            (plan.place.folder / name).unlink(missing_ok=True)
    return CaptureRun(plan, is_complete, tuple(made), dict(sorted(losses.items())), nbytes, seconds, tuple(notes))


def _recording(model: Any, plan: CapturePlan) -> AbstractContextManager[Recorder]:
    """What records the steps that are not there, within what the plan has left to them."""
    asked, place = plan.asked, plan.place
    every = linear_layers(model)
    rows_memory = None if place.max_memory is None else place.max_memory - plan.other_bytes
    target = CaptureTarget(
        place.folder,
        limits=Limits(plan.windows.steps, place.max_disk, rows_memory),
        there=plan.there,
        force=place.force,
        about={
            "model": plan.model.folder.resolve().name,
            "gradient_scale": 1.0,
            "run": plan.run,
            MODEL_KEY: [layer.name for layer in every],
        },
    )
    steps = frozenset(range(plan.windows.steps)) - plan.kept.keys()
    return recording(
        model,
        chosen_layers(every, asked.layers),
        Recording(asked.recorded, asked.sample_rows, steps, asked.seed),
        target,
    )


def _prepare(model: Any, asked: CaptureRequest) -> Callable[[], None]:
    """Have only those gradients computed that are needed; what changes the weights after a step."""
    import torch

    if asked.learning_rate:
        optimizer = torch.optim.SGD(model.parameters(), asked.learning_rate)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update
    if not asked.forward_only and hasattr(model, "enable_input_require_grads"):
        # Gradients of outputs do not depend on those of weights, which cost a third of the time and as much memory
        # as the weights.
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.enable_input_require_grads()
    return lambda: None


def _run_step(model: Any, plan: CapturePlan, step: int, device: str, update: Callable[[], None]) -> float:
    """The mean cross-entropy of a step's windows, in nats per token."""
    import torch

    windows = torch.from_numpy(plan.windows.of_step(plan.ids, step)).to(device)
    with enough_memory(
        f"{device}: out of memory for a step of {plan.windows.step_tokens:,} tokens; use fewer --tokens or a smaller "
        f"--batch{elsewhere(device)}."
    ):
        with torch.set_grad_enabled(not plan.asked.forward_only):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        if not plan.asked.forward_only:
            loss.backward()
            update()
    return float(loss.detach())


def _loss_record(loss: float) -> dict[str, object]:
    value = loss if math.isfinite(loss) else None
    return {"kind": "mean cross-entropy over the tokens", "unit": "nats", "value": value}


def _text_record(plan: CapturePlan, step: int) -> dict[str, object]:
    """Where in the text a step's tokens begin, counted in tokens."""
    return {"sha256": plan.text.sha256, "offset": step * plan.windows.step_tokens}
