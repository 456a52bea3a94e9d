"""What a run over a text will capture, and what that takes, before the weights are loaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mxcli.errors import EnvironmentFailure, RefusedError, printable
from mxcli.files.capture_writer import CapturedTensor, step_files
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.roles import GRADIENT, WEIGHT
from mxcli.files.tensors import DTYPES
from mxcli.files.writer_place import check_place
from mxcli.flows.capturing.budget import Limits, Size, StepsThere, check_size, expected, size_of
from mxcli.flows.capturing.kept import KeptStep, kept_steps, on_disk, others_note, own_step
from mxcli.flows.capturing.layers import Layer, chosen_layers, linear_layers
from mxcli.flows.capturing.model import Outline, encoder, outline
from mxcli.flows.capturing.text import Text, Windows, tokens_of
from mxcli.flows.doctor import own_version
from mxcli.flows.fingerprint import fingerprint

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
    model: Outline
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
    check_place(place.folder, checkpoint, earlier, force=place.force or place.resume)
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


def _window_tokens(tokens: int | None, seen: Outline) -> int:
    if tokens is None:
        return min(USUAL_TOKENS, seen.positions or USUAL_TOKENS)
    if seen.positions is not None and tokens > seen.positions:
        raise RefusedError(
            f"{printable(seen.folder)}: reads {seen.positions:,} tokens at a time, and --tokens asks for {tokens:,}; "
            "ask for no more than that, and for more windows with --batch."
        )
    return tokens


def _other_memory(asked: CaptureRequest, seen: Outline, windows: Windows, layers: Sequence[Layer]) -> int:
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
    checkpoint: Checkpoint, seen: Outline, text: Text, asked: CaptureRequest, windows: Windows, *, is_bytes: bool
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


def _lost_updates(asked: CaptureRequest, seen: Outline) -> str | None:
    if not asked.learning_rate or DTYPES[seen.dtype].bits >= 32:
        return None
    return f"The weights are {seen.dtype}, in which small updates are lost; --dtype float32 keeps them."
