"""The recorder that a training loop steps: rows from hooks that change nothing, and one file per optimizer step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import printable
from mxcli.files.capture_writer import CapturedTensor, CaptureFile, StepName, refuse_existing_steps
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import Array
from mxcli.flows.capture.arguments import json_value
from mxcli.flows.capture.budget import Growth, Limits, StepsThere, check_size, expected
from mxcli.flows.capture.layer_step import LayerStep, RowSampling
from mxcli.flows.capture.layers import DTYPES, Layer

if TYPE_CHECKING:
    import torch


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Recording:
    """What to record: of each layer which roles, how many rows at most (None: all), chosen by the seed, and of which
    steps (None: all; a number: that many, from the first on)."""

    roles: tuple[str, ...] = CAPTURED_ROLES
    sample_rows: int | None = None
    steps: int | Collection[int] | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """Where files go: a directory, under the names of a rank (`alone`: there is no other), within limits, to which
    what is `there` already counts."""

    folder: Path
    rank: int = 0
    alone: bool = True
    limits: Limits = field(default_factory=Limits)
    there: StepsThere = field(default_factory=StepsThere)
    force: bool = False
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFile:
    """A file that was written: its step, bytes, layers, and the most rows that a layer has in it and had seen."""

    path: Path
    step: int
    nbytes: int
    layers: int
    tokens: int
    tokens_seen: int


class Recorder:
    """Records the layers' rows of the current step, `number`, until `step` writes them; `files` were written, and
    `notes` say what a reader should know of them."""

    def __init__(self, layers: Sequence[Layer], asked: Recording, target: CaptureTarget) -> None:
        self.number = 0
        self.files: list[StepFile] = []
        self._layers, self._asked, self._target = tuple(layers), asked, target
        self._noted: dict[str, list[int]] = {}
        self._calls: dict[str, LayerStep] = {}
        self._file: CaptureFile | None = None
        self._weighed = set[str]()
        self._nonfinite: dict[str, int] = {}
        self._growth = self._empty()
        self._lock = threading.RLock()  # threads may call the model at the same time

    @property
    def notes(self) -> list[str]:
        """What was noted, each once, with the steps it was noted at."""
        return [f"{text}{_steps_words(steps)}" for text, steps in self._noted.items()]

    @property
    def is_recording(self) -> bool:
        """Whether the current step is one that was asked for."""
        steps = self._asked.steps
        if isinstance(steps, int):
            return len(self.files) < steps
        return steps is None or self.number in steps

    def at(self, number: int) -> None:
        """The current step is this one, such as in a training that goes on from a checkpoint; what was recorded of the
        step before is dropped."""
        self._drop()
        self.number = number

    def step(self, **about: object) -> StepFile | None:
        """End the step, after the optimizer's: write its file, with what there is to say `about` it in values that JSON
        holds (a tensor of one element is a number; NaN and infinities become null), and go on with the next. None where
        the step was not asked for, or no layer was called."""
        made = None
        about = {key: json_value(value) for key, value in about.items()}
        with self._lock:
            if self._file is not None:
                try:
                    made = self._written(self._file, about)
                finally:
                    self._drop()
                self.files.append(made)
            elif self.is_recording:
                self.note("no layer was called, so that there is no file")
            self.number += 1
        return made

    def note(self, text: str) -> None:
        """Remember what a reader should know of the current step."""
        self._noted.setdefault(text, []).append(self.number)

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Takes what a layer was handed and, when it comes, the gradient of what it returned."""
        import torch

        with_grad, repeated = torch.is_grad_enabled(), _in_backward()
        with self._lock:
            if not self.is_recording:
                return
            if layer.name not in self._calls:
                choice = RowSampling(self._asked.sample_rows, self._asked.seed, self.number)
                on_rows = partial(self._foresee, layer)
                self._calls[layer.name] = LayerStep(layer, choice, self._asked.roles, on_rows, self._lock)
            x = args[0] if args else next(iter(kwargs.values()))
            self._calls[layer.name].called(x, output, with_grad=with_grad, repeated=repeated)

    def close(self) -> bool:
        """End all; whether there were rows that no step had written."""
        with self._lock:
            pending = self._file is not None
            self._drop()
        return pending

    def _foresee(self, layer: Layer, seen: int, waiting: int) -> None:
        """Before a layer's rows are taken: there is room for them beside those of others, and its weight is written.

        Not as many of every layer: experts see few of the tokens that other layers see.
        """
        target = self._target
        begun = 0 if self._file is None else self._file.data_bytes
        check_size(self._growth.came(layer, seen, waiting), target.limits, target.folder, self._there(begun))
        if self._file is None:
            name = StepName(self.number, target.rank, target.alone)
            if not target.force:
                refuse_existing_steps(target.folder, [name])
            self._file = CaptureFile(target.folder, name, expected(self._layers, self._asked.roles, 0), target.about)
        if WEIGHT in self._asked.roles and layer.name not in self._weighed:
            # Now: the optimizer changes it before the step ends.
            self._weighed.add(layer.name)
            self._add(self._file, layer, WEIGHT, layer.weight(), None)

    def _there(self, begun: int) -> StepsThere:
        before = self._target.there
        nbytes = before.nbytes + sum(file.nbytes for file in self.files)
        return replace(before, steps=before.steps + len(self.files), nbytes=nbytes, begun=begun)

    def _empty(self) -> Growth:
        return Growth(self._layers, self._asked.roles, self._asked.sample_rows)

    def _written(self, file: CaptureFile, about: Mapping[str, object]) -> StepFile:
        tokens = []
        for layer in self._layers:
            call = self._calls.get(layer.name)
            if call is None or not call.seen:
                continue
            call.close()
            for role, rows in zip((ACTIVATION, GRADIENT), call.kept(), strict=True):
                if rows is not None and role in self._asked.roles:
                    tokens.append((len(rows), call.seen))
                    self._add(file, layer, role, rows, call.seen)
        self._note_oddities()
        size = file.finish(about, force=self._target.force)
        kept, seen = (max(counts, default=0) for counts in zip(*tokens, strict=True)) if tokens else (0, 0)
        called = sum(call.seen > 0 for call in self._calls.values())
        return StepFile(file.path, self.number, size, called, kept, seen)

    def _add(self, file: CaptureFile, layer: Layer, role: str, x: torch.Tensor, seen: int | None) -> None:
        kept = None if seen is None else len(x)
        file.add(CapturedTensor(layer.name, role, DTYPES[str(x.dtype)], tuple(x.shape), kept, seen), _array(x))
        if nonfinite := _nonfinite(x):
            self._nonfinite[f"{layer.name}.{role}"] = nonfinite

    def _note_oddities(self) -> None:
        if self._nonfinite:
            count = sum(self._nonfinite.values())
            elements = "1 element is" if count == 1 else f"{count:,} elements are"
            self.note(f"{elements} NaN or infinite, and recorded as such, in {listed(list(self._nonfinite))}")
        calls = [call for call in self._calls.values() if call.seen]
        called = {call.layer.name for call in calls}
        self._note_layers(
            "were not called as modules, so that nothing of them is recorded",
            [layer.name for layer in self._layers if layer.name not in called],
        )
        if GRADIENT in self._asked.roles:
            self._note_layers("got no gradient", [call.layer.name for call in calls if not call.got_gradients])
            self._note_layers(
                "got gradients of some of their tokens only, and have the rows of those",
                [call.layer.name for call in calls if call.lacking > 0],
            )
            self._note_layers(
                "got gradients of several backward passes through one call, and have those of the last",
                [call.layer.name for call in calls if call.several_passes],
            )
        self._note_layers(
            "were also called without gradients, which is not recorded",
            [call.layer.name for call in calls if call.calls_without_gradient],
        )

    def _note_layers(self, what: str, names: Sequence[str]) -> None:
        if names:
            self.note(f"{len(names):,} of {len(self._layers):,} layers {what}: {listed(names)}")

    def _drop(self) -> None:
        for call in self._calls.values():
            call.close()
        self._calls, self._nonfinite, self._growth = {}, {}, self._empty()
        self._weighed = set()
        if self._file is not None:
            self._file.discard()
        self._file = None


def _in_backward() -> bool:
    """Whether gradients are being computed, so that a call repeats one that a checkpointed segment made before."""
    from torch.utils.module_tracker import ModuleTracker

    return bool(ModuleTracker().is_bw)


def _nonfinite(x: torch.Tensor) -> int:
    """NaN and infinities, counted only where the extremes, in one pass, say that there are some."""
    if not x.numel() or all(extreme.isfinite() for extreme in x.aminmax()):
        return 0
    return int(x.numel() - x.isfinite().sum())


def _array(x: torch.Tensor) -> Array:
    import torch

    whole = x.contiguous()
    array: Array = (whole.view(torch.uint16) if whole.dtype is torch.bfloat16 else whole).numpy()
    return array


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def _steps_words(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f" (step {steps[0]})"
    return f" ({len(steps):,} steps, the first {steps[0]})"


OnCall = Callable[[Layer, Any, Any, Any], None]
"""Told of a layer's call: its positional and named arguments, and its output."""


class LayerHook:
    """A forward hook that tells of a layer's calls and returns nothing, so that the output stays what it is.

    A copy of the model is another model, and a file of it must not need mxcli: copied or pickled, the hook becomes
    something of the standard library that takes four arguments and does nothing.
    """

    def __init__(self, layer: Layer, on_call: OnCall) -> None:
        self._layer, self._on_call = layer, on_call

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Tells of a call of the layer's."""
        self._on_call(self._layer, args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")
