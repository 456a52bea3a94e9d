"""The run of a model over a text, step by step, with the captures of each step in a file of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mxcli.files.capture_writer import refuse_other_files
from mxcli.files.captures import MODEL_KEY
from mxcli.flows.capture.budget import Limits
from mxcli.flows.capture.capture import recording
from mxcli.flows.capture.layers import chosen_layers, linear_layers
from mxcli.flows.capture.model import cpu_hint, load_model, memory_errors
from mxcli.flows.capture.plan import CapturePlan, CaptureRequest
from mxcli.flows.capture.recorder import CaptureTarget, Recorder, Recording

OnStep = Callable[[int, int, str], object]
"""Called with the bytes of finished files, the bytes of all, and what was done."""


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """The result of a run: whether it is complete, the steps that this run wrote, each step's loss in nats per token,
    the bytes of the files, the seconds that this run's steps took, notes, and the error that `stopped` the recording,
    if one did."""

    plan: CapturePlan
    complete: bool
    written: tuple[int, ...]
    losses: dict[int, float | None]
    nbytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    stopped: str | None = None


def capture_model(
    plan: CapturePlan, *, device: str, stop: Callable[[], bool] = lambda: False, on_step: OnStep = lambda *_: None
) -> CaptureRun:
    """Load the model, run it over the text, and write a file per step; stop before the next step if `stop` returns
    true.

    An error of the recording is raised, or ends the run, as the request says. Finished steps are not run again, unless
    a learning rate needs them for the weights after them. Files of an earlier capture are replaced one by one; surplus
    ones are removed once all steps are complete.
    """
    request, steps, earlier = plan.request, plan.windows.steps, plan.earlier
    losses, written, notes = {step: each.loss for step, each in earlier.items()}, list[int](), list[str]()
    stopped = None
    nbytes, seconds = sum(each.nbytes for each in earlier.values()), 0.0
    if len(earlier) < steps:
        model, load_notes = load_model(plan.model, device)
        update = _prepare(model, request)
        done, total = 0, steps * plan.size.disk
        began = time.monotonic()
        with _recording(model, plan) as recorder:
            for step in range(steps):
                if stop():
                    break
                recorder.at(step)
                if step not in earlier or request.learning_rate:
                    loss = _run_step(model, plan, step, device, update)
                    if file := recorder.step(loss=_loss_record(loss), text=_text_record(plan, step)):
                        losses[step] = loss
                        written.append(step)
                        nbytes += file.nbytes
                    if recorder.stopped is not None:
                        break
                done += plan.size.disk
                on_step(done, total, f"step {step}")
        seconds = time.monotonic() - began
        notes, stopped = [*load_notes, *recorder.oddities], recorder.stopped
    is_complete = len(losses) == steps
    if is_complete:
        refuse_other_files(plan.output.folder, plan.surplus)
        for name in plan.surplus:
            (plan.output.folder / name).unlink(missing_ok=True)
    in_order = dict(sorted(losses.items()))
    return CaptureRun(plan, is_complete, tuple(written), in_order, nbytes, seconds, tuple(notes), stopped)


def _recording(model: Any, plan: CapturePlan) -> AbstractContextManager[Recorder]:
    """Record the missing steps, within the limits the plan leaves to them."""
    request, output = plan.request, plan.output
    every = linear_layers(model)
    rows_memory = None if output.max_memory is None else output.max_memory - plan.other_bytes
    target = CaptureTarget(
        output.folder,
        limits=Limits(plan.windows.steps, output.max_disk, rows_memory),
        written=plan.written,
        force=output.force,
        replaced=plan.damaged,
        about={
            "model": plan.model.folder.resolve().name,
            "gradient_scale": 1.0,
            "run": plan.run,
            MODEL_KEY: [layer.name for layer in every],
        },
    )
    steps = frozenset(range(plan.windows.steps)) - plan.earlier.keys()
    return recording(
        model,
        chosen_layers(every, request.layers),
        Recording(request.recorded, request.sample_rows, steps, request.seed, request.on_error),
        target,
    )


def _prepare(model: Any, request: CaptureRequest) -> Callable[[], None]:
    """Restrict backpropagation to the gradients needed, and return the function that updates the weights after a
    step."""
    import torch

    if request.learning_rate:
        optimizer = torch.optim.SGD(model.parameters(), request.learning_rate)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update
    if not request.forward_only and hasattr(model, "enable_input_require_grads"):
        # Output gradients do not depend on weight gradients, which take a third of the time and as much memory as the
        # weights.
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.enable_input_require_grads()
    return lambda: None


def _run_step(model: Any, plan: CapturePlan, step: int, device: str, update: Callable[[], None]) -> float:
    """Run a step, update the weights, and return its mean cross-entropy in nats per token."""
    import torch

    windows = torch.from_numpy(plan.windows.of_step(plan.ids, step)).to(device)
    with memory_errors(
        f"{device}: out of memory for a step of {plan.windows.step_tokens:,} tokens; use fewer --tokens or a smaller "
        f"--batch{cpu_hint(device)}."
    ):
        with torch.set_grad_enabled(not plan.request.forward_only):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        if not plan.request.forward_only:
            loss.backward()
            update()
    return float(loss.detach())


def _loss_record(loss: float) -> dict[str, object]:
    value = loss if math.isfinite(loss) else None
    return {"kind": "mean cross-entropy over the tokens", "unit": "nats", "value": value}


def _text_record(plan: CapturePlan, step: int) -> dict[str, object]:
    """Return the position of a step in the text, in tokens."""
    return {"sha256": plan.text.sha256, "offset": step * plan.windows.step_tokens}
