"""What a run over a text will capture, and what that takes, before the weights are loaded."""

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
from mxcli.files.capture_writer import CapturedTensor, StepName, capture_metadata, step_files, step_of
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.partials import check_output_folder
from mxcli.files.roles import GRADIENT, WEIGHT
from mxcli.files.tensors import DTYPES
from mxcli.flows.capture.budget import Limits, Size, StepsThere, check_size, expected, size_of
from mxcli.flows.capture.layers import Layer, chosen_layers, linear_layers
from mxcli.flows.capture.model import ModelOutline, Text, Windows, encoder, outline, tokens_of
from mxcli.flows.capture.recorder import listed
from mxcli.flows.doctor import own_version
from mxcli.flows.write.records import fingerprint


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step whose file an earlier run left: its loss, in nats per token, and its bytes."""

    loss: float | None
    nbytes: int


def kept_steps(folder: Path, run: Mapping[str, object], *, force: bool) -> dict[int, KeptStep]:
    """The steps whose files this run made.

    Raises RefusedError where another run made one, of any step, which would lie beside ours; with `force` such files
    are not kept.
    """
    found: dict[int, KeptStep] = {}
    for name in step_files(folder):
        path = folder / name
        step = own_step(name)
        try:
            told = capture_metadata(path)
            _check_run(path, None if step is None else told.get("run"), run)
        except (InputError, RefusedError):
            if force:
                continue
            raise
        assert step is not None
        loss = told.get("loss")
        value = loss.get("value") if isinstance(loss, dict) else None
        found[step] = KeptStep(value if isinstance(value, float) else None, path.stat().st_size)
    return found


def own_step(name: str) -> int | None:
    """The step whose file this command gives that name; None for one that it never gives, such as a rank's."""
    step = step_of(name)
    return step if str(StepName(step)) == name else None


def on_disk(folder: Path, files: Mapping[int, str], kept: Mapping[int, KeptStep]) -> StepsThere:
    """What counts as written: steps that are kept, and files that are replaced one by one, but for the last of them.
    `files` are those of the steps to record that exist, in the order of steps."""
    replaced = [
        (folder / name).lstat().st_size
        for step, name in files.items()
        if step not in kept and (folder / name).is_file()
    ]
    return StepsThere(len(kept), sum(step.nbytes for step in kept.values()), replaced=sum(replaced[:-1]))


def others_note(folder: Path, earlier: Sequence[str]) -> str | None:
    """What to say of files that this command neither replaces nor removes."""
    others = [name for name in earlier if own_step(name) is None]
    if not others:
        return None
    return f"{printable(folder)} holds captures that this command does not make, and that stay: {listed(others)}."


def _check_run(path: Path, before: object, run: Mapping[str, object]) -> None:
    """Raises RefusedError for a file that is not of this run, with what is different."""
    if not isinstance(before, dict):
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: no run of this command made it; move it away, or --force its "
            "replacement."
        )
    changes = [
        f"{key} was {printable(before.get(key))} and is {printable(value)}"
        for key, value in run.items()
        if before.get(key) != value
    ]
    if changes:
        raise RefusedError(
            f"{printable(path)}: cannot be resumed: {'; '.join(changes)}. Give the same options, --force to replace "
            "what is there, or another -o/--output."
        )


USUAL_TOKENS = 256
LIBRARY_BYTES = 1 << 29
"""Memory of the interpreter with torch and transformers, about."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to capture of a model: `tokens` in a window (None: as usual), the layers by selectors (None: all), and what
    of each. Gradients are left out with `forward_only`. With a learning rate every step changes the weights by it.
    `dtype` is what to compute in (None: what the model is of)."""

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

    @property
    def recorded(self) -> tuple[str, ...]:
        """The roles that there will be."""
        return tuple(role for role in self.roles if role != GRADIENT or not self.forward_only)


@dataclass(frozen=True, slots=True)
class CaptureFolder:
    """Where captures go, and whether they may replace others or go on after them."""

    folder: Path
    force: bool = False
    resume: bool = False
    max_disk: int | None = None
    max_memory: int | None = None


@dataclass(frozen=True, slots=True)
class CapturePlan:
    """A run before the weights are loaded: its layers, the tensors of a step's file and their size, the most there may
    be, the memory it needs besides, about, the steps that an earlier run left, and files of earlier runs that go when
    all is there. `there` is what counts as written."""

    source: str
    model: ModelOutline
    text: Text
    asked: CaptureRequest
    place: CaptureFolder
    windows: Windows
    ids: NDArray[np.int64]
    layers: tuple[Layer, ...]
    tensors: tuple[CapturedTensor, ...]
    size: Size
    other_bytes: int
    run: dict[str, object]
    kept: dict[int, KeptStep]
    surplus: tuple[str, ...]
    there: StepsThere
    notes: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        """The memory that all needs, about."""
        return self.other_bytes + self.size.memory


def plan_capture(
    source: str, checkpoint: Checkpoint, text: Text, asked: CaptureRequest, place: CaptureFolder
) -> CapturePlan:
    """What would be captured, and what that takes; no weights are loaded.

    Raises what `outline`, `chosen_layers`, `tokens_of` and `check_size` do; RefusedError for an output that is in use,
    or that other options made; EnvironmentFailure where it needs more memory than is allowed.
    """
    earlier = step_files(place.folder)
    check_output_folder(place.folder, checkpoint, earlier, force=place.force or place.resume)
    seen = outline(checkpoint, asked.dtype)
    every = linear_layers(seen.empty)
    layers = chosen_layers(every, asked.layers)
    windows = Windows(asked.steps, asked.batch, _window_tokens(asked.tokens, seen))
    rows = min(windows.step_tokens, asked.sample_rows or windows.step_tokens)
    tensors = expected(layers, asked.recorded, rows)
    encode, note = encoder(seen)
    run = _run_record(checkpoint, seen, text, asked, windows, is_bytes=note is not None)
    found = kept_steps(place.folder, run, force=place.force) if place.resume else {}
    kept = {step: each for step, each in sorted(found.items()) if step < asked.steps}
    own = {step: name for name in earlier if (step := own_step(name)) is not None}
    there = on_disk(place.folder, {step: own[step] for step in sorted(own) if step < asked.steps}, kept)
    certain = _certain(layers, tensors)
    check_size(certain, Limits(asked.steps, place.max_disk), place.folder, there)
    other = _other_memory(asked, seen, windows, every)
    need = other + certain.memory
    if place.max_memory is not None and need > place.max_memory:
        raise EnvironmentFailure(
            f"{printable(source)}: needs about {need:,} bytes of memory, and --max-memory allows {place.max_memory:,}; "
            f"use --max-memory {-(-need // _MIB)}M or more, or less of --tokens, --batch or --sample-rows."
        )
    ids = tokens_of(text, encode, windows, seen.vocabulary)
    notes = (note, _lost_updates(asked, seen), _routed(layers, asked), others_note(place.folder, earlier))
    return CapturePlan(
        source,
        seen,
        text,
        asked,
        place,
        windows,
        ids,
        tuple(layers),
        tuple(tensors),
        size_of(tensors),
        other,
        run,
        kept,
        tuple(name for step, name in own.items() if place.force and step >= asked.steps),
        there,
        tuple(each for each in notes if each),
    )


def _certain(layers: Sequence[Layer], tensors: Sequence[CapturedTensor]) -> Size:
    """The size without rows of experts, of which nobody knows beforehand how many there will be."""
    routed = {layer.name for layer in layers if layer.is_routed}
    return size_of([tensor for tensor in tensors if tensor.role == WEIGHT or tensor.layer not in routed])


def _window_tokens(tokens: int | None, seen: ModelOutline) -> int:
    if tokens is None:
        return min(USUAL_TOKENS, seen.positions or USUAL_TOKENS)
    if seen.positions is not None and tokens > seen.positions:
        raise RefusedError(
            f"{printable(seen.folder)}: reads {seen.positions:,} tokens at a time, and --tokens asks for {tokens:,}; "
            "ask for no more than that, and for more windows with --batch."
        )
    return tokens


def _other_memory(asked: CaptureRequest, seen: ModelOutline, windows: Windows, layers: Sequence[Layer]) -> int:
    """Memory but for the rows of a step: weights, their gradients where they change, and what is kept of a pass to go
    back through: about the inputs and outputs of layers that see all tokens; and the logits, in binary32 too, with
    their gradients."""
    width = DTYPES[seen.dtype].storage_bytes
    weights = seen.nbytes * (2 if asked.learning_rate else 1)
    widths = [layer.inputs + layer.outputs for layer in layers if not layer.is_routed] or [0]
    logits = seen.vocabulary * (width + 8)
    working = (max(widths) if asked.forward_only else sum(widths)) * width
    return LIBRARY_BYTES + weights + windows.step_tokens * (working + logits)


def _run_record(
    checkpoint: Checkpoint, seen: ModelOutline, text: Text, asked: CaptureRequest, windows: Windows, *, is_bytes: bool
) -> dict[str, object]:
    """All that decides the bytes of a step's file, but the machine."""
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
        "layers": None if asked.layers is None else list(asked.layers),
        "roles": list(asked.recorded),
        "forward_only": asked.forward_only,
        "sample_rows": asked.sample_rows,
        "seed": asked.seed,
        "learning_rate": asked.learning_rate,
        "compute_dtype": seen.dtype,
    }


def _routed(layers: Sequence[Layer], asked: CaptureRequest) -> str | None:
    routed = sum(layer.is_routed for layer in layers)
    if not routed or asked.recorded == (WEIGHT,):
        return None
    return f"{routed:,} layers are of experts, which see a part of the tokens: what they take is at most what is said."


def _lost_updates(asked: CaptureRequest, seen: ModelOutline) -> str | None:
    if not asked.learning_rate or DTYPES[seen.dtype].bits >= 32:
        return None
    return f"The weights are {seen.dtype}, in which small updates are lost; --dtype float32 keeps them."
