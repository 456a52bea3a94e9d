"""`mxcli.capture`: records the linear layers of a model in any training loop."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mxcli.files.capture_writer import StepName, refuse_existing_steps, step_files, step_of
from mxcli.files.captures import CAPTURED_ROLES, MODEL_KEY
from mxcli.flows.capture.arguments import (
    WARN,
    check_model,
    parse_flag,
    parse_folder,
    parse_metadata,
    parse_on_error,
    parse_roles,
    parse_selectors,
    parse_size,
    parse_steps,
    require_int,
    step_count,
)
from mxcli.flows.capture.budget import Limits, check_size, expected, size_of
from mxcli.flows.capture.layers import Layer, chosen_layers, is_compiled, linear_layers, stacked_weights
from mxcli.flows.capture.recorder import CaptureTarget, Recorder, Recording, Watch, listed, warn
from mxcli.flows.capture.weights import parametrization_of

if TYPE_CHECKING:
    import torch

_COMPILED = "compiled code (torch.compile) runs uncompiled during recording"
_ABOUT_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks on modules"
"""The beginning of torch's warning that hooks fire for the wrapper too; the one here ignores it."""


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
    on_error: str = WARN,
) -> Iterator[Recorder]:
    """Record the inputs of a model's linear layers, and the gradients of their outputs, in a training loop.

    Inside the `with` block, run the model as usual and call `step()` of what it yields after each optimizer step: that
    writes `step-000000.safetensors`, … to the directory (`step-000000-rank-1.safetensors` with several ranks). A file
    holds LAYER.activation, the layer's input, [tokens, features]; LAYER.gradient, the gradient of the backward pass
    with respect to the layer's output, in the same order of tokens; LAYER.weight, [out, in], as at the beginning of the
    step. Dtypes are unchanged: under autocast an input may be float32 that the layer then rounds. Gradients include
    loss scales and averages as autograd has them.

    All calls of a step are concatenated: micro-batches of gradient accumulation, and several calls of a layer.
    `sample_rows` keeps that many tokens at most, chosen by `seed`, step and their index in the step, so that layers
    that see the same tokens keep the same ones. `layers` are selectors as in `--include`; `steps` is the number of
    steps to record, or their numbers (None: all). `max_memory` bounds the bytes of rows in memory, `max_disk` those of
    all files; a recording that needs more is refused as soon as that is known: at once with `sample_rows`, else as the
    rows of a step arrive. `about` is further metadata for each file, in JSON values.

    The model's outputs, gradients, buffers and random numbers are unchanged to the last bit: modules get no hooks, and
    no code of theirs runs for the recording. The weight of a layer with a parametrization is the one that its own
    forward computed; one that is quantized, sharded or offloaded is left out, with a note. Compiled code
    (torch.compile), of the model or around it, runs uncompiled meanwhile, which may round differently. Calls that
    activation checkpointing repeats count once; calls under no_grad, such as a validation, are recorded only in steps
    without other calls of that layer. If one forward is backpropagated several times, as with two losses, or
    `torch.autograd.grad` before `backward`, the last gradient is recorded.

    An error inside the block (a full disk, a limit, a folder that was removed, a tensor that cannot be recorded) never
    reaches the program with `on_error="warn"`: the recording ends with one warning, `stopped` of what is yielded has
    the reason, steps written before stay, and `mxcli-incomplete.json` next to them says so. With "raise" it is raised
    in the model's forward or backward pass, or in `step()`.

    Notes on the files, above all if there are none, are in `notes` and become warnings at the end.

    Raises UsageError for invalid arguments, RefusedError for a model with nothing to record and for files that exist
    (unless `force`), EnvironmentFailure for limits and disks; before the block begins, for any `on_error`.
    """
    check_model(model)
    if sample_rows is not None:
        sample_rows = require_int("sample_rows", sample_rows, 1, "keep one row at least, or all with None")
    recorded_steps = parse_steps(steps)
    seed = require_int("seed", seed, None, "seeds are integers")
    wanted = Recording(parse_roles(roles), sample_rows, recorded_steps, seed, parse_on_error(on_error))
    selectors, folder, metadata = parse_selectors(layers), parse_folder(directory), parse_metadata(about)
    limits = Limits(step_count(recorded_steps), parse_size("max_disk", max_disk), parse_size("max_memory", max_memory))
    own_rank, ranks = _ranks()
    if rank is not None:
        own_rank = require_int("rank", rank, 0, "ranks are integers from 0")
    every = linear_layers(model)
    chosen = chosen_layers(every, selectors)
    target = CaptureTarget(
        folder,
        own_rank,
        ranks == 1,
        limits,
        force=parse_flag("force", force),
        about={**metadata, MODEL_KEY: [layer.name for layer in every]},
    )
    if not force:
        _refuse_existing(target, recorded_steps)
    if sample_rows is not None:
        check_size(size_of(expected(chosen, wanted.roles, sample_rows)), target.limits, target.folder)
    with _uncompiled(), recording(model, chosen, wanted, target, warn) as recorder:
        if is_compiled(model):
            recorder.note(_COMPILED)
        yield recorder
        final = list(_final_notes(recorder))
        for note in (*recorder.oddities, *final):
            warn(note, stacklevel=3)


def _final_notes(recorder: Recorder) -> Iterator[str]:
    """Close the recorder and yield notes on rows or files that are missing."""
    if recorder.close():
        yield f"step {recorder.number} is not written: call step() at its end"
    elif not recorder.files and recorder.stopped is None:
        yield "nothing was recorded: no layer was called as a module in a recorded step, followed by step()"


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled code uncompiled: it ignores hooks that are registered after compilation."""
    import torch

    warnings.filterwarnings("ignore", _ABOUT_HOOKS, UserWarning)
    own = warnings.filters[0]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        with suppress(ValueError):
            cast("list[object]", warnings.filters).remove(own)


@contextmanager
def recording(
    model: torch.nn.Module,
    layers: Sequence[Layer],
    request: Recording,
    target: CaptureTarget,
    on_stop: Callable[[str], object] = lambda sentence: None,
) -> Iterator[Recorder]:
    """Record these layers of a model while the block runs; its code must not be compiled meanwhile. `on_stop` receives
    the sentence of an error that ends the recording."""
    from torch.nn.modules import module as modules

    recorder = Recorder(layers, request, target, on_stop)
    with ExitStack() as stack:
        if stacked := stacked_weights(model):
            recorder.note(
                f"weights of three dimensions are not recorded: they do not belong to linear layers: {listed(stacked)}"
            )
        stack.callback(recorder.close)
        watch = Watch()
        for layer in layers:
            watch.add(layer.module, partial(recorder.called, layer))
            parametrization = parametrization_of(layer.module)
            if parametrization is not None:
                watch.add(parametrization, partial(_computed, recorder, layer))
        handle = modules.register_module_forward_hook(watch, with_kwargs=True)
        # The handle leaves an entry here, for which torch would call modules in its slower way from then on.
        stack.callback(modules._global_forward_hooks_with_kwargs.pop, handle.id, None)
        stack.callback(handle.remove)
        yield recorder


def _computed(recorder: Recorder, layer: Layer, args: object, kwargs: object, weight: torch.Tensor) -> None:
    """Pass the weight that a parametrization computed to the recorder."""
    recorder.computed(layer, weight)


def _refuse_existing(target: CaptureTarget, recorded_steps: int | Collection[int] | None) -> None:
    """Raise RefusedError if a file of a recorded step exists; iterates over existing files only."""
    steps = range(recorded_steps or 1) if recorded_steps is None or isinstance(recorded_steps, int) else recorded_steps
    names = (StepName(step, target.rank, target.alone) for step in map(step_of, step_files(target.folder)))
    refuse_existing_steps(target.folder, (name for name in names if name.step in steps))


def _ranks() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
