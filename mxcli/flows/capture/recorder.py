"""The recorder that a training loop steps: rows from hooks that change nothing, and one file per optimizer step."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import MxcliError, printable
from mxcli.files.capture_writer import (
    CapturedTensor,
    CaptureFile,
    StepName,
    mark_complete,
    mark_incomplete,
    refuse_existing_steps,
)
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.roles import ACTIVATION, GRADIENT, WEIGHT
from mxcli.files.tensors import Array
from mxcli.flows.capture.arguments import WARN, json_value
from mxcli.flows.capture.budget import Growth, Limits, WrittenSteps, check_size, expected
from mxcli.flows.capture.layer_step import LayerStep, RowSampling
from mxcli.flows.capture.layers import DTYPES, Layer
from mxcli.flows.capture.weights import unobserved

if TYPE_CHECKING:
    import torch


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Recording:
    """The extent of a recording: the roles of each layer, the most rows of each (None: all), sampled by the seed, and
    the steps (None: all; a number: that many, from the first on). `on_error`: an error is raised, or ends the recording
    with a warning."""

    roles: tuple[str, ...] = CAPTURED_ROLES
    sample_rows: int | None = None
    steps: int | Collection[int] | None = None
    seed: int = 0
    on_error: str = WARN


@dataclass(frozen=True, slots=True)
class CaptureTarget:
    """The output of a recorder: a directory, file names for a rank (`alone`: there is no other), limits, to which the
    `written` steps count, and the steps whose files are replaced (all with `force`)."""

    folder: Path
    rank: int = 0
    alone: bool = True
    limits: Limits = field(default_factory=Limits)
    written: WrittenSteps = field(default_factory=WrittenSteps)
    force: bool = False
    about: Mapping[str, object] = field(default_factory=dict)
    replaced: frozenset[int] = frozenset()

    def may_replace(self, step: int) -> bool:
        """Return whether a file of a step may be replaced."""
        return self.force or step in self.replaced


@dataclass(frozen=True, slots=True)
class StepFile:
    """A finished file: its step, bytes and layers, and the most rows that a layer kept and saw."""

    path: Path
    step: int
    nbytes: int
    layers: int
    tokens: int
    tokens_seen: int


class Recorder:
    """A recorder of the layers' rows in the current step, `number`, until `step` writes them; `files` are finished, and
    `notes` describe oddities in them. `stopped` is the error that ended the recording, if one did."""

    def __init__(
        self,
        layers: Sequence[Layer],
        request: Recording,
        target: CaptureTarget,
        on_stop: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.number = self._stopped_at = 0
        self._on_stop = on_stop
        self.files: list[StepFile] = []
        self.stopped: str | None = None
        self._layers, self._request, self._target = tuple(layers), request, target
        self._noted: dict[str, list[int]] = {}
        self._calls: dict[str, LayerStep] = {}
        self._file: CaptureFile | None = None
        self._computed: dict[str, torch.Tensor] = {}
        self._weights_written = set[str]()
        self._weights_left_out: list[str] = []
        self._nonfinite: dict[str, int] = {}
        self._growth = self._new_growth()
        self._lock = threading.RLock()  # threads may call the model at the same time

    @property
    def notes(self) -> list[str]:
        """Return each note once, with its steps; the last one says that the recording stopped, if it did."""
        stop = [] if self.stopped is None else [f"recording stopped at step {self._stopped_at}: {self.stopped}"]
        return [*self.oddities, *stop]

    @property
    def oddities(self) -> list[str]:
        """Return the notes on the files."""
        return [f"{text}{_steps_words(steps)}" for text, steps in self._noted.items()]

    @property
    def is_recording(self) -> bool:
        """Return whether the current step is to be recorded."""
        steps = self._request.steps
        if self.stopped is not None:
            return False
        if isinstance(steps, int):
            return len(self.files) < steps
        return steps is None or self.number in steps

    def at(self, number: int) -> None:
        """Set the number of the current step, such as when resuming from a checkpoint; unwritten rows are dropped."""
        with self._guarded():
            self._drop()
        self.number = number

    def step(self, **about: object) -> StepFile | None:
        """End the step, after the optimizer's: write its file with `about`, its metadata in JSON values (a tensor of
        one element is a number; NaN and infinities become null), and continue with the next. Returns None if the step
        is not to be recorded, if no layer was called, and once the recording has stopped."""
        written = None
        with self._guarded(), self._lock:
            if self._file is not None:
                try:
                    written = self._finish_file(self._file, {key: json_value(value) for key, value in about.items()})
                finally:
                    self._drop()
                self.files.append(written)
            elif self.is_recording:
                self.note("no layer was called; no file written")
        self.number += 1
        return written

    def note(self, text: str) -> None:
        """Note something about the current step."""
        self._noted.setdefault(text, []).append(self.number)

    def called(self, layer: Layer, args: Any, kwargs: Any, output: Any) -> None:
        """Take the input of a layer and, when it arrives, the gradient of its output."""
        import torch

        if not self.is_recording:
            return
        with_grad, repeated = torch.is_grad_enabled(), _in_backward()
        with self._guarded(), self._lock:
            if layer.name not in self._calls:
                sampling = RowSampling(self._request.sample_rows, self._request.seed, self.number)
                self._calls[layer.name] = LayerStep(
                    layer,
                    sampling,
                    self._request.roles,
                    partial(self._before_rows, layer),
                    self._lock,
                    self._guarded,
                )
            x = args[0] if args else next(iter(kwargs.values()))
            self._calls[layer.name].called(x, output, with_grad=with_grad, repeated=repeated)

    def computed(self, layer: Layer, weight: torch.Tensor) -> None:
        """Hold the weight that a parametrization computed, for the forward that reads it."""
        if not self.is_recording:
            return
        with self._guarded(), self._lock:
            if WEIGHT in self._request.roles and layer.name not in self._weights_written:
                self._computed[layer.name] = weight.detach()

    def close(self) -> bool:
        """End all recording; return whether there were unwritten rows."""
        pending = False
        with self._guarded(), self._lock:
            pending = self._file is not None
            self._drop()
            if self.files and self.stopped is None:
                mark_complete(self._target.folder, self._target.rank, alone=self._target.alone)
        return pending

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run code that the program does not see; unless errors are raised, one ends the recording with a warning."""
        try:
            with unobserved():
                yield
        except Exception as error:  # of any type: the training must not end
            if self._request.on_error != WARN:
                raise
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Stop recording because of an error: drop the step's rows, mark the files incomplete, and warn once."""
        with self._lock:
            if self.stopped is not None:
                return
            self.stopped = _sentence(error)
            with suppress(Exception):
                self._drop()
            self._stopped_at = self.number
            if self.files:
                target = self._target
                mark_incomplete(target.folder, StepName(self.number, target.rank, target.alone), self.stopped)
        self._on_stop(f"recording stopped at step {self._stopped_at}, the program continues: {self.stopped}")

    def _before_rows(self, layer: Layer, seen: int, waiting: int) -> None:
        """Check that there is room for a layer's rows, open the step's file and write the layer's weight.

        Layers are counted by the tokens they see: experts see few.
        """
        target = self._target
        begun = 0 if self._file is None else self._file.data_bytes
        check_size(self._growth.after(layer, seen, waiting), target.limits, target.folder, self._written_steps(begun))
        if self._file is None:
            name = StepName(self.number, target.rank, target.alone)
            if not target.may_replace(self.number):
                refuse_existing_steps(target.folder, [name])
            self._file = CaptureFile(target.folder, name, expected(self._layers, self._request.roles, 0), target.about)
        if WEIGHT in self._request.roles and layer.name not in self._weights_written:
            # Written now: the optimizer changes it before the step ends.
            self._weights_written.add(layer.name)
            weight = layer.weight(self._computed.pop(layer.name, None))
            if weight is None:
                self._weights_left_out.append(layer.name)
            else:
                self._add(self._file, layer, WEIGHT, weight, None)

    def _written_steps(self, begun: int) -> WrittenSteps:
        before = self._target.written
        nbytes = before.nbytes + sum(file.nbytes for file in self.files)
        return replace(before, steps=before.steps + len(self.files), nbytes=nbytes, begun=begun)

    def _new_growth(self) -> Growth:
        return Growth(self._layers, self._request.roles, self._request.sample_rows)

    def _finish_file(self, file: CaptureFile, about: Mapping[str, object]) -> StepFile:
        tokens = []
        for layer in self._layers:
            call = self._calls.get(layer.name)
            if call is None or not call.seen:
                continue
            call.close()
            for role, rows in zip((ACTIVATION, GRADIENT), call.rows(), strict=True):
                if rows is not None and role in self._request.roles:
                    tokens.append((len(rows), call.seen))
                    self._add(file, layer, role, rows, call.seen)
        self._note_oddities()
        size = file.finish(about, force=self._target.may_replace(self.number))
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
            self.note(f"{elements} NaN or infinite (recorded unchanged) in {listed(list(self._nonfinite))}")
        calls = [call for call in self._calls.values() if call.seen]
        called = {call.layer.name for call in calls}
        self._note_layers(
            "were never called as modules; not recorded",
            [layer.name for layer in self._layers if layer.name not in called],
        )
        self._note_layers(
            "have no whole and plain weight of floats (quantized, sharded, offloaded or computed when read); weights "
            "not recorded",
            self._weights_left_out,
        )
        if GRADIENT in self._request.roles:
            self._note_layers("received no gradient", [call.layer.name for call in calls if not call.got_gradients])
            self._note_layers(
                "received gradients for part of their tokens; only those are recorded",
                [call.layer.name for call in calls if call.tokens_without_gradient > 0],
            )
            self._note_layers(
                "received gradients of several backward passes through one call; the last is recorded",
                [call.layer.name for call in calls if call.several_passes],
            )
        self._note_layers(
            "were also called without gradients; those calls are not recorded",
            [call.layer.name for call in calls if call.calls_without_gradient],
        )

    def _note_layers(self, what: str, names: Sequence[str]) -> None:
        if names:
            self.note(f"{len(names):,} of {len(self._layers):,} layers {what}: {listed(names)}")

    def _drop(self) -> None:
        for call in self._calls.values():
            call.close()
        self._calls, self._nonfinite, self._growth = {}, {}, self._new_growth()
        self._computed, self._weights_written, self._weights_left_out = {}, set(), []
        file, self._file = self._file, None
        if file is not None:
            file.discard()


def _in_backward() -> bool:
    """Return whether a backward pass is running, in which checkpointed segments repeat their calls."""
    from torch.utils.module_tracker import ModuleTracker

    return bool(ModuleTracker().is_bw)


def _nonfinite(x: torch.Tensor) -> int:
    """Return the number of NaN and infinities; they are counted only if the extremes, found in one pass, show some."""
    if not x.numel() or all(extreme.isfinite() for extreme in x.aminmax()):
        return 0
    return int(x.numel() - x.isfinite().sum())


def _array(x: torch.Tensor) -> Array:
    import torch

    whole = x.contiguous()
    array: Array = (whole.view(torch.uint16) if whole.dtype is torch.bfloat16 else whole).numpy()
    return array


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def _steps_words(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f" (step {steps[0]})"
    return f" ({len(steps):,} steps, the first {steps[0]})"


def _sentence(error: Exception) -> str:
    """Return what an error says, in one line without a final dot."""
    if isinstance(error, MxcliError):
        return error.message.rstrip(".")
    first = (str(error).strip().splitlines() or [""])[0]
    return printable(f"{type(error).__name__}: {first}").rstrip(".: ")


def warn(text: str, stacklevel: int = 2) -> None:
    """Warn of something about the recording; where warnings are errors, write it, since the program must continue."""
    try:
        warnings.warn(f"capture: {text}.", stacklevel=stacklevel + 1)
    except Warning:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"capture: {text}.\n")


class Watch:
    """A hook on all modules of the process that reports the calls of some and returns nothing, so that outputs are
    unchanged.

    The modules themselves have no hook: torch chooses other code for a module with one, and copies of the model would
    be recorded. A module is known by its dict of hooks, which the replicas of DataParallel share and copies do not.
    """

    def __init__(self) -> None:
        self._on_call: dict[int, Callable[[Any, Any, Any], None]] = {}

    def add(self, module: Any, on_call: Callable[[Any, Any, Any], None]) -> None:
        """Report calls of a module with its positional and named arguments and its output."""
        self._on_call[id(module._forward_hooks)] = on_call

    def __call__(self, module: Any, args: Any, *kwargs_and_output: Any) -> None:
        """Report a call of a module; a thread that is calling one while the hook is removed gives no named
        arguments."""
        on_call = self._on_call.get(id(module._forward_hooks))
        if on_call is not None:
            on_call(args, kwargs_and_output[0] if len(kwargs_and_output) > 1 else {}, kwargs_and_output[-1])
