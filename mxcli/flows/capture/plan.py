"""The plan of a capture over a text: what it records and needs, before the weights are loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import EnvironmentFailure, InputError, RefusedError, printable
from mxcli.files.capture_writer import (
    CapturedTensor,
    StepName,
    capture_metadata,
    is_as_written,
    refuse_other_files,
    step_files,
    step_of,
)
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.output_folder import check_output_folder
from mxcli.files.roles import GRADIENT, WEIGHT
from mxcli.files.tensors import DTYPES
from mxcli.flows.capture.arguments import WARN
from mxcli.flows.capture.budget import Limits, Size, WrittenSteps, check_size, expected, size_of
from mxcli.flows.capture.layers import Layer, chosen_layers, linear_layers
from mxcli.flows.capture.model import ModelOutline, Text, Windows, encoder, model_outline, tokens_of
from mxcli.flows.capture.recorder import listed
from mxcli.flows.doctor import own_version
from mxcli.flows.write.records import fingerprint


@dataclass(frozen=True, slots=True)
class EarlierStep:
    """A step that an earlier run finished: its loss, in nats per token, and its bytes."""

    loss: float | None
    nbytes: int


def earlier_steps(
    folder: Path, run: Mapping[str, object], *, force: bool
) -> tuple[dict[int, EarlierStep], dict[int, str]]:
    """Return the steps whose files an earlier part of this run wrote, which a resumed run keeps, and the files of those
    that are not as it wrote them.

    Raises RefusedError if another run wrote one, of any step; with `force` such files are skipped.
    """
    found, damaged = dict[int, EarlierStep](), dict[int, str]()
    for name in step_files(folder):
        path = folder / name
        step = single_rank_step(name)
        try:
            metadata = capture_metadata(path)
            _check_run(path, None if step is None else metadata.get("run"), run)
        except (InputError, RefusedError):
            if force:
                continue
            raise
        assert step is not None
        if not is_as_written(path):
            damaged[step] = name
            continue
        loss = metadata.get("loss")
        value = loss.get("value") if isinstance(loss, dict) else None
        found[step] = EarlierStep(value if isinstance(value, float) else None, path.stat().st_size)
    return found, damaged


def single_rank_step(name: str) -> int | None:
    """Return the step of a file name that this command writes; None for others, such as a rank's."""
    step = step_of(name)
    return step if str(StepName(step)) == name else None


def written_steps(folder: Path, files: Mapping[int, str], earlier: Mapping[int, EarlierStep]) -> WrittenSteps:
    """Return the steps that count as written: those of an earlier run, and the files that are replaced one by one,
    except the last of them. `files` are the existing files of steps to record, in the order of steps."""
    replaced = [
        (folder / name).lstat().st_size
        for step, name in files.items()
        if step not in earlier and (folder / name).is_file()
    ]
    return WrittenSteps(len(earlier), sum(step.nbytes for step in earlier.values()), replaced=sum(replaced[:-1]))


def other_files_note(folder: Path, existing: Sequence[str]) -> str | None:
    """Return a note on capture files that this command neither replaces nor removes."""
    others = [name for name in existing if single_rank_step(name) is None]
    if not others:
        return None
    return f"{printable(folder)} holds captures of other commands, which stay: {listed(others)}."


def _damage_note(folder: Path, names: Sequence[str]) -> str | None:
    """Return a note on files that are not as they were written."""
    if not names:
        return None
    return f"Not as they were written, and written again: {listed([str(folder / name) for name in names])}."


def _check_run(path: Path, before: object, run: Mapping[str, object]) -> None:
    """Raise RefusedError, with the differences, for a file of another run."""
    if not isinstance(before, dict):
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: this command did not write it; move it away, or --force to replace "
            "it."
        )
    changes = [
        f"{key} was {printable(before.get(key))} and is {printable(value)}"
        for key, value in run.items()
        if before.get(key) != value
    ]
    if changes:
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: {'; '.join(changes)}. Give the same options, --force to replace "
            "the files, or another -o/--output."
        )


DEFAULT_TOKENS = 256
LIBRARY_BYTES = 1 << 29
"""Memory of the interpreter with torch and transformers, about."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A capture as requested: `tokens` per window (None: the default), the layers by selectors (None: all), and the
    roles. With `forward_only` there are no gradients. With a learning rate every step updates the weights. `dtype` is
    the compute dtype (None: the model's). `on_error` is as in `Recording`."""

    steps: int = 1
    batch: int = 1
    tokens: int | None = None
    layers: Sequence[str] | None = None
    roles: tuple[str, ...] = CAPTURED_ROLES
    forward_only: bool = False
    sample_rows: int | None = None
    seed: int = 0
    learning_rate: float = 0.0
    dtype: str | None = None
    on_error: str = WARN

    @property
    def recorded(self) -> tuple[str, ...]:
        """Return the roles that are recorded."""
        return tuple(role for role in self.roles if role != GRADIENT or not self.forward_only)


@dataclass(frozen=True, slots=True)
class CaptureFolder:
    """The directory for captures, its limits, whether files in it may be replaced or continued, and the files that the
    run reads besides the model."""

    folder: Path
    force: bool = False
    resume: bool = False
    max_disk: int | None = None
    max_memory: int | None = None
    inputs: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A run before the weights are loaded: its layers, the tensors of a step's file and their size at most, an
    estimate of the other memory, the `earlier` steps that a resumed run keeps, those that are `damaged` and written
    again, and `surplus` files of earlier runs that are removed at the end. `written` is what counts as written."""

    source: str
    model: ModelOutline
    text: Text
    request: CaptureRequest
    output: CaptureFolder
    windows: Windows
    ids: NDArray[np.int64]
    layers: tuple[Layer, ...]
    tensors: tuple[CapturedTensor, ...]
    size: Size
    other_bytes: int
    run: dict[str, object]
    earlier: dict[int, EarlierStep]
    damaged: frozenset[int]
    surplus: tuple[str, ...]
    written: WrittenSteps
    notes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the files of all steps."""
        return tuple(str(StepName(step)) for step in range(self.request.steps))

    @property
    def memory_bytes(self) -> int:
        """Estimate the memory of the whole run."""
        return self.other_bytes + self.size.memory


def plan_capture(
    source: str, checkpoint: Checkpoint, text: Text, request: CaptureRequest, output: CaptureFolder
) -> CapturePlan:
    """Plan a capture; no weights are loaded.

    Raises what `model_outline`, `chosen_layers`, `tokens_of` and `check_size` raise; RefusedError for an output that is
    in use, or that other options wrote; EnvironmentFailure if it needs more memory than is allowed.
    """
    existing = step_files(output.folder)
    replacing = output.force or output.resume
    check_output_folder(output.folder, checkpoint, existing, force=replacing, inputs=output.inputs)
    files = dict(sorted((step, name) for name in existing if (step := single_rank_step(name)) is not None))
    refuse_other_files(output.folder, files.values())
    model = model_outline(checkpoint, request.dtype)
    every = linear_layers(model.empty)
    layers = chosen_layers(every, request.layers)
    windows = Windows(request.steps, request.batch, _window_tokens(request.tokens, model))
    rows = min(windows.step_tokens, request.sample_rows or windows.step_tokens)
    tensors = expected(layers, request.recorded, rows)
    encode, note = encoder(model)
    run = _run_record(checkpoint, model, text, request, windows, is_bytes=note is not None)
    found, damaged = earlier_steps(output.folder, run, force=output.force) if output.resume else ({}, {})
    earlier = {step: each for step, each in sorted(found.items()) if step < request.steps}
    recorded = {step: name for step, name in files.items() if step < request.steps}
    written = written_steps(output.folder, recorded, earlier)
    size = _certain_size(layers, tensors)
    check_size(size, Limits(request.steps, output.max_disk), output.folder, written)
    other_bytes = _other_memory(request, model, windows, every)
    _check_memory(source, other_bytes + size.memory, output.max_memory)
    notes = (
        note,
        _lost_updates_note(request, model),
        _experts_note(layers, request),
        other_files_note(output.folder, existing),
        _damage_note(output.folder, [name for step, name in sorted(damaged.items()) if step < request.steps]),
    )
    return CapturePlan(
        source=source,
        model=model,
        text=text,
        request=request,
        output=output,
        windows=windows,
        ids=tokens_of(text, encode, windows, model.vocabulary),
        layers=tuple(layers),
        tensors=tuple(tensors),
        size=size_of(tensors),
        other_bytes=other_bytes,
        run=run,
        earlier=earlier,
        damaged=frozenset(damaged),
        surplus=tuple(name for step, name in files.items() if output.force and step not in recorded),
        written=written,
        notes=tuple(each for each in notes if each),
    )


def _check_memory(source: str, need: int, allowed: int | None) -> None:
    if allowed is not None and need > allowed:
        raise EnvironmentFailure(
            f"{printable(source)}: needs about {need:,} bytes of memory, and --max-memory allows {allowed:,}; "
            f"use --max-memory {-(-need // _MIB)}M or more, or less of --tokens, --batch or --sample-rows."
        )


def _certain_size(layers: Sequence[Layer], tensors: Sequence[CapturedTensor]) -> Size:
    """Return the size without rows of experts, whose number is unknown beforehand."""
    routed = {layer.name for layer in layers if layer.is_routed}
    return size_of([tensor for tensor in tensors if tensor.role == WEIGHT or tensor.layer not in routed])


def _window_tokens(tokens: int | None, model: ModelOutline) -> int:
    if tokens is None:
        return min(DEFAULT_TOKENS, model.positions or DEFAULT_TOKENS)
    if model.positions is not None and tokens > model.positions:
        raise RefusedError(
            f"{printable(model.folder)}: reads {model.positions:,} tokens at a time, and --tokens is {tokens:,}; "
            "use at most that, and more windows with --batch."
        )
    return tokens


def _other_memory(request: CaptureRequest, model: ModelOutline, windows: Windows, layers: Sequence[Layer]) -> int:
    """Return the memory without a step's rows: weights, their gradients if they are updated, what a forward pass keeps
    for the backward pass (about the inputs and outputs of layers that see all tokens), and the logits, in binary32 too,
    with their gradients."""
    width = DTYPES[model.dtype].storage_bytes
    weights = model.nbytes * (2 if request.learning_rate else 1)
    widths = [layer.inputs + layer.outputs for layer in layers if not layer.is_routed] or [0]
    logits = model.vocabulary * (width + 8)
    working = (max(widths) if request.forward_only else sum(widths)) * width
    return LIBRARY_BYTES + weights + windows.step_tokens * (working + logits)


def _run_record(
    checkpoint: Checkpoint,
    model: ModelOutline,
    text: Text,
    request: CaptureRequest,
    windows: Windows,
    *,
    is_bytes: bool,
) -> dict[str, object]:
    """Return everything that decides the bytes of a step's file, except the machine."""
    source = json.dumps([fingerprint(checkpoint), checkpoint.config], sort_keys=True)
    return {
        "version": own_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "model": hashlib.sha256(source.encode()).hexdigest(),
        "text": text.sha256,
        "tokens_are_bytes": is_bytes,
        "batch": windows.batch,
        "tokens": windows.tokens,
        "layers": None if request.layers is None else list(request.layers),
        "roles": list(request.recorded),
        "forward_only": request.forward_only,
        "sample_rows": request.sample_rows,
        "seed": request.seed,
        "learning_rate": request.learning_rate,
        "compute_dtype": model.dtype,
    }


def _experts_note(layers: Sequence[Layer], request: CaptureRequest) -> str | None:
    routed = sum(layer.is_routed for layer in layers)
    if not routed or request.recorded == (WEIGHT,):
        return None
    return f"{routed:,} layers belong to experts, which see part of the tokens: their sizes are upper bounds."


def _lost_updates_note(request: CaptureRequest, model: ModelOutline) -> str | None:
    if not request.learning_rate or DTYPES[model.dtype].bits >= 32:
        return None
    return f"The weights are {model.dtype}, in which small updates are lost; --dtype float32 keeps them."
