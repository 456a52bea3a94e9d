"""The originals of a quantized checkpoint's tensors in the source that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from mxcli.errors import InputError, RefusedError
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.directory import GGUF
from mxcli.files.gguf_names import named_as_gguf, named_as_hugging_face
from mxcli.files.layouts.renamed import names_of
from mxcli.files.models.stacks import orientations
from mxcli.files.tensors import Array, TensorInfo
from mxcli.flows.plan.plan import TensorPlan, axis_of
from mxcli.flows.verify.against.rearranged import names_made_of, rearranged
from mxcli.flows.write.restore import PlainView
from mxcli.flows.write.split import pieces_of, read_piece, stack_module


@dataclass(frozen=True, slots=True)
class Original:
    """A plain tensor, or a part of one: its header, its shape, and a function that reads it."""

    info: TensorInfo
    shape: tuple[int, ...]
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class Originals:
    """The originals by their names in the quantized checkpoint; `tied` names may be missing in it."""

    checkpoint: Checkpoint
    by_name: Mapping[str, Original]
    tied: frozenset[str]


def originals_of(source: Checkpoint, view: PlainView) -> Originals:
    """Return the tensors of a source by their names in a checkpoint made from it: stacked experts are split if the
    checkpoint stores them one by one, and the other way round; names, dtypes and rows are those of GGUF if it is a GGUF
    file, those of Hugging Face if the source alone is one and they are known. Raises RefusedError for a model whose
    names in GGUF files are not known."""
    if view.source.kind == GGUF and source.kind != GGUF:
        source = named_as_gguf(source)
    elif source.kind == GGUF and view.source.kind != GGUF:
        with suppress(InputError, RefusedError):
            source = named_as_hugging_face(source)
    made = rearranged(source, view.tensors)
    found = {name: Original(each.info, each.info.shape, each.read) for name, each in made.items()}
    parts = frozenset(names_made_of(made))
    for name, info in source.tensors.items():
        if name in parts and name not in view.tensors:
            continue
        pieces = {} if name in view.tensors else _experts(source, info, view)
        found |= pieces or {_known_as(name, view): Original(info, info.shape, partial(read, source, info))}
    return Originals(source, found, frozenset(source.tied) | frozenset(view.source.tied))


_RENAMED = ((".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))
_MIXTURE, _MLP = ".block_sparse_moe.", ".mlp."
"""Names of experts in checkpoints of Mixtral, and those that transformers 5 gives them when it writes one."""


def _known_as(name: str, view: PlainView) -> str:
    """Return the name of a tensor of the source in a checkpoint made from it."""
    renamed = name
    for old, new in _RENAMED if _MIXTURE in name else ():
        renamed = renamed.replace(old, new)
    candidates = [name, renamed, renamed.replace(_MIXTURE, _MLP), name.replace(_MIXTURE, _MLP)]
    module, _, parameter = name.rpartition(".")
    # Producers that quantize a model in memory may write its names there.
    candidates += [f"{each}.{parameter}" for each in names_of(module)]
    return next((each for each in candidates if each in view.tensors), name)


def _experts(source: Checkpoint, info: TensorInfo, view: PlainView) -> dict[str, Original]:
    """Return the experts of a stack by their names in the checkpoint; empty for other tensors, or in another order."""
    module = stack_module(info.name)
    first = next((s.weight for name, s in view.weights.items() if module and name.startswith(f"{module}.")), None)
    if first is None or len(info.shape) != 3:
        return {}
    stored = orientations(source.tensors, source.config).of(info)
    axis = axis_of(stored)
    planned = TensorPlan(info, first.scheme, "", axis, summed=axis if stored.known else None)
    pieces = pieces_of(planned, view.layout, source.config)
    if isinstance(pieces, str):
        return {}

    def piece_of(at: int) -> Array:
        return np.ascontiguousarray(read_piece(source, info, pieces[at], axis))

    return {
        piece.weight.name: Original(info, piece.weight.shape, partial(piece_of, at)) for at, piece in enumerate(pieces)
    }
