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
from mxcli.files.capture_writer import CapturedTensor, StepName, described, step_files
from mxcli.files.captures import CAPTURED_ROLES
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.roles import GRADIENT
from mxcli.files.tensors import DTYPES
from mxcli.files.writer_place import check_place
from mxcli.flows.capturing.budget import Limits, Size, check_size, expected, size_of
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
class Asked:
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
class Place:
    """Where captures go, and whether they may replace others or go on after them."""

    folder: Path
    force: bool = False
    resume: bool = False
    max_disk: int | None = None
    max_memory: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before the weights are loaded: its layers, the tensors of a step's file and their size, the memory it
    needs, about, and the steps whose files an earlier run left, with their loss."""

    source: str
    model: Outline
    text: Text
    asked: Asked
    place: Place
    windows: Windows
    ids: NDArray[np.int64]
    layers: tuple[Layer, ...]
    tensors: tuple[CapturedTensor, ...]
    size: Size
    memory_bytes: int
    run: dict[str, object]
    kept: dict[int, float | None]
    notes: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The files that there will be."""
        return [str(StepName(step)) for step in range(self.windows.steps)]


def plan_capture(source: str, checkpoint: Checkpoint, text: Text, asked: Asked, place: Place) -> Plan:
    """What would be captured, and what that takes; no weights are loaded.

    Raises what `outline`, `chosen_layers`, `tokens_of` and `check_size` do; RefusedError for an output that is in use,
    or that other options made; EnvironmentFailure where it needs more memory than is allowed.
    """
    earlier = step_files(place.folder)
    names = [str(StepName(step)) for step in range(asked.steps)]
    check_place(place.folder, checkpoint, [*names, *earlier], force=place.force or place.resume)
    seen = outline(checkpoint, asked.dtype)
    every = linear_layers(seen.empty)
    layers = chosen_layers(every, asked.layers)
    windows = Windows(asked.steps, asked.batch, _window_tokens(asked.tokens, seen))
    rows = min(windows.step_tokens, asked.sample_rows or windows.step_tokens)
    tensors = expected(layers, asked.recorded, rows)
    size = size_of(tensors)
    check_size(size, Limits(asked.steps, place.max_disk), place.folder)
    need = _memory(asked, seen, windows, every, size)
    if place.max_memory is not None and need > place.max_memory:
        raise EnvironmentFailure(
            f"{printable(source)}: needs about {need:,} bytes of memory, and --max-memory allows {place.max_memory:,}; "
            f"use --max-memory {-(-need // _MIB)}M or more, or less of --tokens, --batch or --sample-rows."
        )
    encode, note = encoder(seen)
    ids = tokens_of(text, encode, windows, seen.vocabulary)
    run = _run_record(checkpoint, seen, text, asked, windows, is_bytes=note is not None)
    kept = _kept(place.folder, names, run) if place.resume else {}
    return Plan(
        source,
        seen,
        text,
        asked,
        place,
        windows,
        ids,
        tuple(layers),
        tuple(tensors),
        size,
        need,
        run,
        kept,
        tuple(note for note in (note, _lost_updates(asked, seen)) if note),
    )


def _window_tokens(tokens: int | None, seen: Outline) -> int:
    if tokens is None:
        return min(USUAL_TOKENS, seen.positions or USUAL_TOKENS)
    if seen.positions is not None and tokens > seen.positions:
        raise RefusedError(
            f"{printable(seen.folder)}: reads {seen.positions:,} tokens at a time, and --tokens asks for {tokens:,}; "
            "ask for no more than that, and for more windows with --batch."
        )
    return tokens


def _memory(asked: Asked, seen: Outline, windows: Windows, layers: Sequence[Layer], size: Size) -> int:
    """Weights, their gradients where they change, the rows of a step, and what is kept of a pass to go back through:
    about the layers' inputs and outputs; and the logits, in binary32 too, with their gradients."""
    width = DTYPES[seen.dtype].storage_bytes
    weights = seen.nbytes * (2 if asked.learning_rate else 1)
    passes = sum(layer.inputs + layer.outputs for layer in layers) * width
    logits = seen.vocabulary * (width + 8)
    working = max(layer.inputs + layer.outputs for layer in layers) * width if asked.forward_only else passes
    return LIBRARY_BYTES + weights + size.memory + windows.step_tokens * (working + logits)


def _run_record(
    checkpoint: Checkpoint, seen: Outline, text: Text, asked: Asked, windows: Windows, *, is_bytes: bool
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


def _kept(folder: Path, names: Sequence[str], run: dict[str, object]) -> dict[int, float | None]:
    """The steps whose files are there, with their loss; raises RefusedError where another run made them."""
    found: dict[int, float | None] = {}
    for step, name in enumerate(names):
        if not (folder / name).is_file():
            continue
        told = described(folder / name)
        before = told.get("run")
        if not isinstance(before, dict):
            raise RefusedError(f"{printable(folder / name)}: cannot be resumed: no run of this command made it.")
        changes = [
            f"{key} was {printable(before.get(key))} and is {printable(value)}"
            for key, value in run.items()
            if before.get(key) != value
        ]
        if changes:
            raise RefusedError(
                f"{printable(folder)}: cannot be resumed: {'; '.join(changes)}. Give the same options, or another "
                "-o/--output."
            )
        loss = told.get("loss")
        value = loss.get("value") if isinstance(loss, dict) else None
        found[step] = value if isinstance(value, float) else None
    return found


def _lost_updates(asked: Asked, seen: Outline) -> str | None:
    if not asked.learning_rate or DTYPES[seen.dtype].bits >= 32:
        return None
    return f"The weights are {seen.dtype}, in which small updates are lost; --dtype float32 keeps them."
