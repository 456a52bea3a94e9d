"""`mxcli.capture`: the linear layers of a model recorded in whatever loop runs it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.files.capture_writer import StepName, refuse_existing_steps, step_files, step_of
from mxcli.files.captures import CAPTURED_ROLES, MODEL_KEY
from mxcli.flows.capture.arguments import (
    check_model,
    how_many,
    known_folder,
    known_roles,
    known_selectors,
    known_size,
    known_steps,
    parse_metadata,
    require_int,
)
from mxcli.flows.capture.budget import Limits, check_size, expected, size_of
from mxcli.flows.capture.layers import Layer, chosen_layers, is_compiled, linear_layers, stacked_weights
from mxcli.flows.capture.recorder import CaptureTarget, LayerHook, Recorder, Recording, listed

if TYPE_CHECKING:
    import torch

_COMPILED = "compiled code (torch.compile) runs uncompiled while it is recorded"


@contextmanager
def capture(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    layers: str | Iterable[str] | None = None,
    roles: str | Iterable[str] = CAPTURED_ROLES,
    sample_rows: int | None = None,
    steps: int | Collection[int] | None = None,
    seed: int = 0,
    max_disk: int | None = None,
    max_memory: int | None = None,
    rank: int | None = None,
    force: bool = False,
    about: Mapping[str, object] | None = None,
) -> Iterator[Recorder]:
    """Record what the linear layers of a model are handed, and the gradients of their outputs, in a training loop.

    Inside the `with` block, run the model as ever and call `step()` of what it yields after each optimizer step: that
    writes `step-000000.safetensors`, … to the directory (`step-000000-rank-1.safetensors` where there are several
    ranks). A layer's file entries are LAYER.activation, its input as it was handed to it, [tokens, features];
    LAYER.gradient, the gradient of what was run backward with respect to its output, in the same order of tokens;
    LAYER.weight, [out, in], as the step began with it. Types stay what they are: under autocast an input may be float32
    that the layer then rounds. Loss scales and averages are in the gradients as autograd has them.

    All calls of a step are one behind another: micro-batches of gradient accumulation, and a layer's several calls.
    `sample_rows` keeps that many tokens at most, by `seed`, step and their place in the step, so that layers that see
    the same tokens keep the same ones. `layers` are selectors as `--include` takes them; `steps` are how many steps to
    record, or which (None: all). `max_memory` bounds the bytes of rows in memory, `max_disk` those of all files; what
    would need more is refused as soon as it can be foreseen: at once with `sample_rows`, else as the rows of a step
    come. `about` is what else each file is to say, in values that JSON holds.

    The model's outputs and gradients stay the same to the last bit; the hooks are removed at the end, also after a
    failure, and copies of the model have none. Code that torch.compile made, of the model or around it, runs uncompiled
    meanwhile. Calls that activation checkpointing repeats count once; calls under no_grad, such as a validation, are
    recorded in steps that have no others of that layer. Where several backward passes go through one call, as those of
    two losses, or `torch.autograd.grad` before `backward`, its gradient is that of the last.

    What a reader should know of the files, above all that there are none, is in `notes` and is warned of at the end.

    Raises UsageError for what means nothing, RefusedError for a model that has nothing to record and for files that
    exist (unless `force`), EnvironmentFailure for limits and disks.
    """
    check_model(model)
    if sample_rows is not None:
        sample_rows = require_int("sample_rows", sample_rows, 1, "keep one row at least, or all with None")
    known = known_steps(steps)
    seed = require_int("seed", seed, None, "seeds are whole numbers")
    asked = Recording(known_roles(roles), sample_rows, known, seed)
    selectors, folder, said = known_selectors(layers), known_folder(directory), parse_metadata(about)
    limits = Limits(how_many(known), known_size("max_disk", max_disk), known_size("max_memory", max_memory))
    own_rank, ranks = _ranks()
    if rank is not None:
        own_rank = require_int("rank", rank, 0, "ranks are whole numbers from 0")
    every = linear_layers(model)
    chosen = chosen_layers(every, selectors)
    target = CaptureTarget(
        folder, own_rank, ranks == 1, limits, force=force, about={**said, MODEL_KEY: [layer.name for layer in every]}
    )
    if not force:
        _refuse_taken(target, known)
    if sample_rows is not None:
        check_size(size_of(expected(chosen, asked.roles, sample_rows)), target.limits, target.folder)
    with _uncompiled(), recording(model, chosen, asked, target) as recorder:
        if is_compiled(model):
            recorder.note(_COMPILED)
        yield recorder
        for note in (*recorder.notes, *_at_the_end(recorder)):
            warnings.warn(f"capture: {note}.", stacklevel=3)


def _at_the_end(recorder: Recorder) -> Iterator[str]:
    """What to say of a recorder that has come to its end."""
    if recorder.close():
        yield f"what was recorded of step {recorder.number} is not written: call step() at its end"
    elif not recorder.files:
        yield "nothing was recorded: in no step that was asked for was a layer called as a module, and step() after it"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled code runs uncompiled, whoever holds it: it has no place for hooks that came after it was made."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def recording(
    model: torch.nn.Module, layers: Sequence[Layer], asked: Recording, target: CaptureTarget
) -> Iterator[Recorder]:
    """What records these layers of a model while the block runs; its code must not be compiled meanwhile."""
    recorder = Recorder(layers, asked, target)
    with ExitStack() as stack:
        if stacked := stacked_weights(model):
            recorder.note(f"weights of three dimensions are not recorded, being no linear layers': {listed(stacked)}")
        stack.callback(recorder.close)
        for layer in layers:
            hook = LayerHook(layer, recorder.called)
            stack.enter_context(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        yield recorder


def _refuse_taken(target: CaptureTarget, known: int | Collection[int] | None) -> None:
    """Raises RefusedError where a file of a step that is asked for exists; looks at those that exist only."""
    steps = range(known or 1) if known is None or isinstance(known, int) else known
    names = (StepName(step, target.rank, target.alone) for step in map(step_of, step_files(target.folder)))
    refuse_existing_steps(target.folder, (name for name in names if name.step in steps))


def _ranks() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
