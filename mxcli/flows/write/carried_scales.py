"""Scales of whole tensors and of inputs as another layout stores them: the same numbers, or their exact reciprocals."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import InputScale, Weight
from mxcli.files.layouts.layout import WEIGHT
from mxcli.files.layouts.parts import DECODE, ENCODE
from mxcli.files.reading import as_floats
from mxcli.files.tensors import Array
from mxcli.flows.write.omitted import ACTIVATION_SCALES
from mxcli.flows.write.restore import StoredWeight

ENCODES = (".input_global_scale",)
"""Endings of scales of inputs that values are multiplied by; all others scale back."""
_NAN_E8M0, _NAN_E4M3 = 0xFF, 0x7F


@dataclass(frozen=True, slots=True)
class TensorScale:
    """A scale of a whole tensor: `decode` scales back, `encode` is what values were multiplied by; `stored` are the
    parts that the source states it by (none: layouts that store one store 1, or the same number in every form)."""

    decode: float
    encode: float
    stored: frozenset[str] = frozenset()

    def lost(self, parts: Collection[str]) -> float:
        """Return the stored number that is not among stored parts of a weight."""
        return self.encode if ENCODE.name in self.stored - set(parts) else self.decode

    @property
    def is_one(self) -> bool:
        """True if values are the same without it."""
        return self.decode == self.encode == 1

    @property
    def is_positive(self) -> bool:
        """True if it and its reciprocal are positive numbers."""
        return all(math.isfinite(each) and each > 0 for each in (self.decode, self.encode))

    def is_held(self, parts: Collection[str]) -> bool:
        """Return whether stored parts of a weight hold it as it is: by its numbers, or by one whose reciprocal the
        other is."""
        if not {ENCODE.name, DECODE.name}.intersection(parts):
            return self.is_one
        if not self.stored - set(parts):
            return True
        return reciprocal(self.decode if DECODE.name in parts else self.encode) == self.lost(parts)

    def restored(self, exact: float | None, parts: Collection[str]) -> TensorScale:
        """Return it with the `exact` number that its stored one was rounded from, if stored parts of a weight hold that
        one and not the rounded one (None: it was not rounded)."""
        missing = set(parts) & {ENCODE.name, DECODE.name} - self.stored
        if exact is None or self.stored & set(parts) or len(missing) != 1 or len(self.stored) != 1:
            return self
        if reciprocal(exact) != self.lost(()):
            return self
        both = self.stored | missing
        if ENCODE.name in missing:
            return TensorScale(self.decode, exact, both)
        return TensorScale(exact, self.encode, both)

    def as_input_scale(self) -> InputScale:
        """Return it as the scale of a layer's inputs; layouts store no amax."""
        return InputScale(math.nan, self.decode, self.encode)


def reciprocal(value: float) -> float:
    """Return 1 / value in binary32."""
    with np.errstate(all="ignore"):
        return float(np.float32(1) / np.float32(value))


def tensor_scale_of(checkpoint: Checkpoint, stored: StoredWeight) -> TensorScale:
    """Read the tensor scale of a weight."""
    found = {
        content.holds.name: _one_number(checkpoint, content.entry.name)
        for content in stored.contents
        if content.holds in (ENCODE, DECODE)
    }
    return _scale(found) if found else TensorScale(1.0, 1.0)


def _scale(found: Mapping[str, float]) -> TensorScale:
    """Return the scale that parts state; what they do not is the reciprocal."""
    encode, decode = found.get(ENCODE.name), found.get(DECODE.name)
    if encode is None:
        encode = reciprocal(found[DECODE.name])
    return TensorScale(reciprocal(encode) if decode is None else decode, encode, frozenset(found))


def _one_number(checkpoint: Checkpoint, name: str) -> float:
    info = checkpoint.tensors[name]
    values = as_floats(read(checkpoint, info).reshape(-1), info.dtype)
    if values.size != 1:
        raise InputError(f"{printable(name)} {list(info.shape)}: is not the one number that scales a whole tensor.")
    return float(values[0])


@dataclass(frozen=True, slots=True)
class StoredInputScale:
    """A scale of a layer's inputs in a source: the name of its tensor, and the scale."""

    name: str
    scale: TensorScale


def input_scale_names(checkpoint: Checkpoint, stored: StoredWeight) -> Iterator[str]:
    """Yield the names of the scales that a source stores for the inputs of a weight's layer."""
    modules = {stored.weight.name.removesuffix(WEIGHT), stored.contents[0].entry.name.removesuffix(WEIGHT)}
    for module in sorted(modules):
        yield from (name for ending in ACTIVATION_SCALES if (name := module + ending) in checkpoint.tensors)


def input_scale_of(checkpoint: Checkpoint, name: str, weight: Weight) -> StoredInputScale:
    """Read a scale of inputs; that of a format without a tensor scale is the same number in all layouts."""
    number = _one_number(checkpoint, name)
    if weight.format.tensor_scale is None:
        return StoredInputScale(name, TensorScale(number, 1.0))
    return StoredInputScale(name, _scale({ENCODE.name if name.endswith(ENCODES) else DECODE.name: number}))


def _block_scales(checkpoint: Checkpoint, stored: StoredWeight) -> Array:
    return np.asarray(stored.read(checkpoint).scales)


def are_bfloat16(checkpoint: Checkpoint, stored: StoredWeight) -> bool:
    """Return whether the binary32 scales of a weight are values of bfloat16."""
    return not (np.ascontiguousarray(_block_scales(checkpoint, stored)).view(np.uint32) & 0xFFFF).any()


def unsigned_scale_fault(checkpoint: Checkpoint, stored: StoredWeight) -> str | None:
    """Return what the block scales of a weight hold that readers of unsigned scales without NaN would read as other
    numbers; None if they hold nothing of it."""
    scales = _block_scales(checkpoint, stored).view(np.uint8)
    if stored.weight.format.has_power_of_two_scales:
        return "a NaN scale" if (scales == _NAN_E8M0).any() else None
    if (scales & _NAN_E4M3 == _NAN_E4M3).any():
        return "a NaN scale"
    return "a negative scale" if (scales >> 7).any() else None


def shown(numbers: Mapping[str, float]) -> str:
    """Return the first of some numbers, with its name and what two divisions make of it."""
    name, number = next(iter(numbers.items()))
    back = reciprocal(reciprocal(number))
    return f"that of {printable(name)} is {number:.9g}, and 1 / (1 / {number:.9g}) is {back:.9g}"
