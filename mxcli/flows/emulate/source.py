"""A model of torch as a source: its tensors by the names that its files would have, and where each is in the model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcli.errors import RefusedError, printable
from mxcli.files.checkpoint import Checkpoint, with_roles
from mxcli.files.dialect import detect_dialect
from mxcli.files.models.known import known_model
from mxcli.files.roles import role_of
from mxcli.files.tensors import IN_MEMORY, TensorInfo, byte_count

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
}
"""Dtypes of torch by their names in safetensors."""
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PROBE = 8
"""The length that a dimension is probed with."""


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a parameter that a tensor of the files is: an index or a range of each dimension, and the order of
    those that are left (None: as they are)."""

    parameter: str
    index: tuple[int | slice, ...] = ()
    order: tuple[int, ...] | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return that part of a tensor of the parameter's shape, as a view."""
        found = whole[self.index] if self.index else whole
        return found if self.order is None else found.permute(self.order)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as a checkpoint, its parameters by name, and the place of each of its tensors in them (None: it is put
    together from several)."""

    checkpoint: Checkpoint
    parameters: Mapping[str, Any]
    places: Mapping[str, Place | None]


def source_of(model: Any) -> ModelSource:
    """Return a model as a source. Raises RefusedError for one that is quantized already."""
    parameters = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if _is_tensor(tensor)}
    # What transformers ties again when it loads a model is stored under one name.
    aliases = getattr(model, "all_tied_weights_keys", None) or ()
    places = dict(_in_files(model, {name: tensor for name, tensor in parameters.items() if name not in aliases}))
    config = config_of(model)
    infos, tied, first = dict[str, TensorInfo](), dict[str, str](), dict[int, str]()
    for name, (shape, place) in places.items():
        tensor = parameters[place.parameter] if place is not None else None
        dtype = DTYPES.get(str(_any_dtype(tensor, parameters)).removeprefix("torch."), "U8")
        role = role_of(name, shape, dtype)
        infos[name] = TensorInfo(name, dtype, shape, role, _file(model), IN_MEMORY, byte_count(dtype, shape))
        if place is not None and not place.index:
            stored = first.setdefault(id(tensor), name)
            tied |= {} if stored == name else {name: stored}
    dialect, notes = detect_dialect(infos, config, None)
    if dialect is not None:
        raise RefusedError(
            f"{type(model).__name__}: its weights are quantized already ({dialect}): emulate a format on the original."
        )
    known = known_model(config)
    checkpoint = Checkpoint(
        kind="safetensors",
        root=_file(model),
        files=(),
        tensors=with_roles(known.with_roles(infos), {}),
        metadata={},
        config=config,
        producer_config=None,
        side_files=(),
        tied=tied,
        captures={},
        dialect=None,
        index=None,
        notes=tuple(notes),
        decoders={},
        identities={},
        model=known,
    )
    return ModelSource(checkpoint, parameters, {name: place for name, (_, place) in places.items()})


def config_of(model: Any) -> dict[str, object] | None:
    """Return the configuration of a model as its config.json would have it; None without one."""
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):
        return dict(config)
    if not callable(getattr(config, "to_dict", None)):
        return None
    assert config is not None
    found = dict(config.to_dict())
    if not found.get("architectures"):
        found["architectures"] = [type(model).__name__]
    return found


def _file(model: Any) -> Path:
    return Path(type(model).__name__)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)


def _any_dtype(tensor: Any, parameters: Mapping[str, Any]) -> Any:
    """Return the dtype of a tensor; of one that is put together from several, that of the model."""
    return (next(iter(parameters.values())) if tensor is None else tensor).dtype


def _in_files(model: Any, parameters: Mapping[str, Any]) -> Iterator[tuple[str, tuple[tuple[int, ...], Place | None]]]:
    """Yield the name and shape of each tensor of the files, and its place."""
    import torch

    revert = _reverter(model)
    plain = {name: _without_wrappers(name) for name in parameters}
    if revert is None:
        for name, tensor in parameters.items():
            yield plain[name], (tuple(tensor.shape), Place(name))
        return
    outlines = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in parameters.items()
    }
    names = {id(outline): name for name, outline in outlines.items()}
    reverted = revert(model, dict(outlines))
    whole = {names[id(found)] for found in reverted.values() if id(found) in names}
    parts = {
        file_name: (place, shape)
        for name, outline in outlines.items()
        if name not in whole
        for file_name, place, shape in _parts(model, name, tuple(outline.shape), revert)
    }
    for file_name, found in reverted.items():
        shape = tuple(found.shape)
        if id(found) in names:
            yield file_name, (shape, Place(names[id(found)]))
        else:
            place, seen = parts.get(file_name, (None, shape))
            yield file_name, (shape, place if seen == shape else None)


def _reverter(model: Any) -> Any:
    """Return the function of transformers that gives weights the names of files; None for other models, and for
    releases that name them alike."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return None
    loading = sys.modules.get("transformers.core_model_loading")
    return getattr(loading, "revert_weight_conversion", None)


def _parts(
    model: Any, name: str, shape: tuple[int, ...], revert: Any
) -> Iterator[tuple[str, Place | None, tuple[int, ...]]]:
    """Yield the tensors of files that a parameter is divided into, by a small one that is numbered in its stead."""
    import torch

    small = (shape[0], *(_PROBE if size % _PROBE == 0 else size for size in shape[1:]))
    numbered = torch.arange(prod(small)).reshape(small)
    for file_name, part in revert(model, {name: numbered}).items():
        yield (file_name, *_placed(name, part, small, shape))


def _placed(
    name: str, part: torch.Tensor, small: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Place | None, tuple[int, ...]]:
    """Return the place of a numbered part in its parameter, and its whole shape; no place for one whose elements are
    in another order."""
    import torch

    steps = [prod(small[at + 1 :]) for at in range(len(small))]
    first = int(part.flatten()[0]) if part.numel() else 0
    begin = [first // step % size for step, size in zip(steps, small, strict=True)]
    order, lengths = [], dict[int, int]()
    for at, size in enumerate(part.shape):
        step = int(part.select(at, 1).flatten()[0]) - first if size > 1 else None
        if step not in steps or steps.index(step) in lengths:
            return None, tuple(part.shape)
        order.append(steps.index(step))
        lengths[order[-1]] = size
    scale = [size // probe for size, probe in zip(shape, small, strict=True)]
    index = tuple(
        slice(begin[at] * scale[at], (begin[at] + lengths[at]) * scale[at]) if at in lengths else begin[at]
        for at in range(len(small))
    )
    if any(at not in lengths and scale[at] != 1 for at in range(len(small))):
        return None, tuple(part.shape)
    left = sorted(order)
    place = Place(name, index, None if order == left else tuple(left.index(at) for at in order))
    probe = tuple(slice(begin[at], begin[at] + lengths[at]) if at in lengths else begin[at] for at in range(len(small)))
    numbered = torch.arange(prod(small)).reshape(small)
    if not torch.equal(Place(name, probe, place.order).of(numbered), part):
        return None, tuple(part.shape)
    return place, tuple(lengths[at] * scale[at] for at in order)


def _without_wrappers(name: str) -> str:
    """Return a name without what wrappers of modules add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def shown(name: str) -> str:
    """Return a name for a message."""
    return f"'{printable(name)}'"
