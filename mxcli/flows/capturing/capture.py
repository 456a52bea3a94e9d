"""`mxcli.capture`: the linear layers of a model recorded in whatever loop runs it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.files.capture_writer import StepName, refuse_existing_steps
from mxcli.files.captures import CAPTURED_ROLES, MODEL_KEY
from mxcli.flows.capturing.budget import Limits, check_size, expected, size_of
from mxcli.flows.capturing.layers import Layer, chosen_layers, is_compiled, linear_layers, stacked_weights
from mxcli.flows.capturing.recorder import Recorder, Recording, Target, listed

if TYPE_CHECKING:
    import torch

_COMPILED = "compiled code (torch.compile) runs uncompiled while it is recorded"


@contextmanager
def capture(
    model: torch.nn.Module,
    directory: str | Path,
    *,
    layers: Sequence[str] | None = None,
    roles: Sequence[str] = CAPTURED_ROLES,
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
    failure. Code that torch.compile made runs uncompiled meanwhile. Calls that activation checkpointing repeats count
    once; calls without gradients, such as a validation, are recorded in steps that have no others.

    Raises UsageError for what means nothing, RefusedError for a model that has nothing to record and for files that
    exist (unless `force`), EnvironmentFailure for limits and disks.
    """
    if sample_rows is not None and sample_rows < 1:
        raise UsageError(f"sample_rows {sample_rows}: keep one row at least, or all with None.")
    known = _known_steps(steps)
    asked = Recording(known_roles(roles), sample_rows, known, seed)
    every = linear_layers(model)
    chosen = chosen_layers(every, [layers] if isinstance(layers, str) else layers)
    own_rank, ranks = _ranks()
    planned = known if known is None or isinstance(known, int) else len(known)
    target = Target(
        Path(directory),
        own_rank if rank is None else rank,
        ranks == 1,
        Limits(planned, max_disk, max_memory),
        force=force,
        about={**(about or {}), MODEL_KEY: [layer.name for layer in every]},
    )
    if not force:
        numbers = range(known or 1) if known is None or isinstance(known, int) else known
        refuse_existing_steps(target.folder, (StepName(number, target.rank, target.alone) for number in numbers))
    if sample_rows is not None:
        check_size(size_of(expected(chosen, asked.roles, sample_rows)), target.limits, target.folder)
    with recording(model, chosen, asked, target) as recorder:
        yield recorder
        if recorder.close():
            warnings.warn(
                f"capture: what was recorded of step {recorder.number} is not written: call step() at its end.",
                stacklevel=3,
            )


@contextmanager
def recording(model: torch.nn.Module, layers: Sequence[Layer], asked: Recording, target: Target) -> Iterator[Recorder]:
    """What records these layers of a model while the block runs; compiled code runs uncompiled meanwhile."""
    recorder = Recorder(layers, asked, target)
    with ExitStack() as stack:
        if is_compiled(model):
            import torch

            recorder.note(_COMPILED)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if stacked := stacked_weights(model):
            recorder.note(f"weights of three dimensions are not recorded, being no linear layers': {listed(stacked)}")
        stack.callback(recorder.close)
        for layer in layers:
            hook = partial(recorder.called, layer)
            stack.enter_context(layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True))
        yield recorder


def known_roles(roles: Sequence[str] | None) -> tuple[str, ...]:
    """The roles in their usual order, all for None; raises UsageError for what is none."""
    if roles is None:
        return CAPTURED_ROLES
    unknown = [role for role in roles if role not in CAPTURED_ROLES]
    if unknown or not roles:
        word = unknown[0] if unknown else ""
        raise UsageError(
            f"role '{printable(word)}' is not recorded: there are {', '.join(CAPTURED_ROLES)}."
            f"{did_you_mean(word, CAPTURED_ROLES)}"
        )
    return tuple(role for role in CAPTURED_ROLES if role in roles)


def _known_steps(steps: int | Collection[int] | None) -> int | Collection[int] | None:
    """The steps in Python's numbers; raises UsageError for none at all, and for what is no number of a step."""
    if steps is None:
        return None
    if _is_whole(steps):
        if steps < 1:
            raise UsageError(f"steps {steps}: record one step at least, or all with None.")
        return int(steps)
    if not isinstance(steps, Collection):
        raise UsageError(f"steps {printable(steps)}: say how many, or which.")
    if len(steps) == 0:
        raise UsageError("steps is empty: record one step at least, or all with None.")
    for number in (steps[0], steps[-1]) if isinstance(steps, range) else steps:
        if not _is_whole(number) or number < 0:
            raise UsageError(f"steps has {printable(number)}: steps are whole numbers from 0.")
    return steps if isinstance(steps, range) else frozenset(map(int, steps))


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, also of numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _ranks() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
