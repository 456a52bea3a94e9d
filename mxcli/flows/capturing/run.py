"""A model run over a text, step by step, with every step's captures in a file of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mxcli.errors import EnvironmentFailure
from mxcli.files.capture_writer import StepName, step_files
from mxcli.flows.capturing.capture import capture
from mxcli.flows.capturing.model import load
from mxcli.flows.capturing.plan import Asked, Plan

OnStep = Callable[[int, int, str], object]
"""Told the bytes of files that are there, those of all, and what was done."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What is there: whether all of it, the steps that this run made, each step's loss in nats per token, the seconds
    that this run's steps took, and notes."""

    plan: Plan
    complete: bool
    made: tuple[int, ...]
    losses: dict[int, float | None]
    seconds: float
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        folder = self.plan.place.folder
        return sum((folder / str(StepName(step))).stat().st_size for step in self.losses)


def capture_model(
    plan: Plan, *, device: str, stop: Callable[[], bool] = lambda: False, on_step: OnStep = lambda *_: None
) -> Captured:
    """Load the model, run it over the text, and write a file per step; ends before the next step when `stop` says so.

    Steps that are there are not run again, except that with a learning rate they are run for the weights after them.
    """
    asked, folder, steps = plan.asked, plan.place.folder, plan.windows.steps
    if len(plan.kept) == steps:
        return Captured(plan, True, (), plan.kept, 0.0, ())
    model = load(plan.model, device)
    if plan.place.force and not plan.place.resume:
        for name in step_files(folder):
            (folder / name).unlink()
    update = _prepare(model, asked)
    losses, made = dict(plan.kept), list[int]()
    about = {"model": plan.model.folder.resolve().name, "gradient_scale": 1.0, "run": plan.run}
    done, total = 0, steps * plan.size.disk
    began = time.monotonic()
    with capture(
        model,
        folder,
        layers=asked.layers,
        roles=asked.recorded,
        sample_rows=asked.sample_rows,
        steps=frozenset(range(steps)) - plan.kept.keys(),
        seed=asked.seed,
        rank=0,
        about=about,
    ) as recorder:
        for step in range(steps):
            if stop():
                break
            recorder.at(step)
            if step not in plan.kept or asked.learning_rate:
                loss = _run_step(model, plan, step, device, update)
                if recorder.step(loss=_loss_record(loss), text=_text_record(plan, step)):
                    losses[step] = loss
                    made.append(step)
            done += plan.size.disk
            on_step(done, total, f"step {step}")
    seconds = time.monotonic() - began
    return Captured(
        plan, len(losses) == steps, tuple(made), dict(sorted(losses.items())), seconds, tuple(recorder.notes)
    )


def _prepare(model: Any, asked: Asked) -> Callable[[], None]:
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


def _run_step(model: Any, plan: Plan, step: int, device: str, update: Callable[[], None]) -> float:
    """The mean cross-entropy of a step's windows, in nats per token."""
    import torch

    windows = torch.from_numpy(plan.windows.of_step(plan.ids, step)).to(device)
    try:
        with torch.set_grad_enabled(not plan.asked.forward_only):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
        if not plan.asked.forward_only:
            loss.backward()
            update()
    except torch.OutOfMemoryError as error:
        raise EnvironmentFailure(
            f"{device}: out of memory for a step of {plan.windows.step_tokens:,} tokens; use fewer --tokens or a "
            "smaller --batch, or --device cpu."
        ) from error
    return float(loss.detach())


def _loss_record(loss: float) -> dict[str, object]:
    value = loss if math.isfinite(loss) else None
    return {"kind": "mean cross-entropy over the tokens", "unit": "nats", "value": value}


def _text_record(plan: Plan, step: int) -> dict[str, object]:
    """Where in the text a step's tokens begin, counted in tokens."""
    return {"sha256": plan.text.sha256, "offset": step * plan.windows.step_tokens}
