"""The plain view of a GGUF file, or of Mistral's own, with the names, order of rows and configuration of Hugging
Face."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from mxcli.errors import InputError, RefusedError
from mxcli.files.directory import GGUF
from mxcli.files.gguf_names import hugging_face_names
from mxcli.files.layouts.mistral import MISTRAL
from mxcli.files.mistral_names import hugging_face_names_of_mistral
from mxcli.files.models.known import known_model
from mxcli.files.outline import Destination
from mxcli.files.reading import as_floats
from mxcli.files.record import read_record
from mxcli.files.roles import role_of
from mxcli.files.structure import tied_by_config
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count
from mxcli.flows.write.restore import PlainView, Renamed


def as_hugging_face(view: PlainView, dtype: str | None = None) -> PlainView:
    """Return the view of a GGUF file, or of Mistral's own, as Hugging Face has the model, of any other source as it is;
    weights in `dtype` (None: the recorded dtype of each, else as in the view).

    Raises RefusedError with every reason why names, order of rows or configuration are not known.
    """
    if not has_other_names(view):
        return view
    names_of = hugging_face_names if view.source.kind == GGUF else hugging_face_names_of_mistral
    known = names_of(replace(view.source, tensors=view.tensors, stored=view.source))
    record = read_record(view.source.root)
    recorded = {} if record is None else {_of_all(name): str(each["dtype"]) for name, each in record.tensors.items()}
    weights, foreign, tensors = {}, {}, dict[str, TensorInfo]()
    renamed: dict[str, Renamed] = {}
    for name, info in view.tensors.items():
        target = known.targets[name]
        if target is None:
            continue
        own = stored_dtype = info.dtype
        if name in view.weights:
            stored = view.weights[name]
            own = dtype or recorded.get(target.name, own)
            weights[target.name] = replace(
                stored, weight=replace(stored.weight, name=target.name, dtype=own), reorder=target.reorder
            )
        elif name in view.foreign:
            own = stored_dtype = dtype or recorded.get(target.name, own)
            entry = replace(view.foreign[name].plain, name=target.name, dtype=own)
            foreign[target.name] = replace(view.foreign[name], plain=entry)
        else:
            own = _narrowed_dtype(view, info, recorded.get(target.name))
        if name not in view.weights:
            renamed[target.name] = Renamed(name, partial(_made, target.reorder, stored_dtype, own))
        tensors[target.name] = _plain(info, target, own)
    model = known_model(known.config)
    tensors = model.with_roles(tensors)
    tied = tied_by_config(tensors, known.config)[0]
    source = replace(view.source, config=known.config, model=model, tied=tied)
    left_out = tuple(name for name, target in known.targets.items() if target is None)
    return PlainView(source, view.layout, weights, tensors, (*view.unused, *left_out), foreign, renamed)


def has_other_names(view: PlainView) -> bool:
    """Return whether tensors of a source have the names and order of rows of another program than transformers."""
    return view.source.kind == GGUF or (view.layout is MISTRAL and not (view.source.config or {}).get("model_type"))


def _of_all(name: str) -> str:
    """Return the name of a tensor, of one of a single expert that of the stack of all."""
    return _EXPERT.sub(".experts.", name)


_EXPERT = re.compile(r"\.experts\.\d+\.")


def _narrowed_dtype(view: PlainView, info: TensorInfo, recorded: str | None) -> str:
    """Return the recorded dtype of a plain vector that was widened to binary32, if it holds all of its values."""
    if info.dtype != "F32" or recorded is None or recorded not in _NARROW or len(info.shape) > 1:
        return info.dtype
    x = view.read(info)
    return recorded if np.array_equal(_widened(_NARROW[recorded](x), recorded), x) else info.dtype


_NARROW: Mapping[str, Callable[[Array], Array]] = {
    "BF16": lambda x: (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16),
    "F16": lambda x: x.astype(np.float16),
}


def _widened(x: Array, dtype: str) -> Array:
    return as_floats(x, dtype).astype(np.float32, copy=False)


def _made(reorder: Callable[[Array], Array] | None, stored: str, dtype: str, x: Array) -> Array:
    """Return a tensor with its rows in order, narrowed if it was widened."""
    ordered = x if reorder is None else reorder(x)
    return _NARROW[dtype](ordered) if stored == "F32" and dtype in _NARROW else ordered


def _plain(info: TensorInfo, target: Destination, dtype: str) -> TensorInfo:
    role = role_of(target.name, info.shape, dtype)
    return TensorInfo(target.name, dtype, info.shape, role, info.file, IN_MEMORY, byte_count(dtype, info.shape))


def hugging_face_fault(view: PlainView) -> str | None:
    """Return why the tensors of a GGUF file, or of Mistral's own, have no known names in Hugging Face; None if they
    have, or for any other source."""
    try:
        as_hugging_face(view)
    except (InputError, RefusedError) as error:
        return "; ".join(reason.rstrip(".") for reason in error.reasons[:3])
    return None
