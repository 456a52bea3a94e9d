"""Originals of tensors that a producer joined or divided: stacks of single experts, and parts of one projection.

Facts of mlx-lm 0.32: it stacks the experts of a layer under `switch_mlp`, and divides kv_b_proj of latent attention by
heads into `embed_q`, transposed, and `unembed_out`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.tensors import Array, TensorInfo

_STACKED = re.compile(r"(?P<layer>.+)\.(?:switch_mlp|experts)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")
_NAMES = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}
"""The names of a part of an expert."""
_OF_HEADS = re.compile(r"(?P<attention>.+)\.(?P<part>embed_q|unembed_out)\.weight")
_DIVIDED, _PARTS = "kv_b_proj", ("embed_q", "unembed_out")


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A tensor of several of the source, or of a part of one: its header, a function that reads it, and the names of
    those that it is made of."""

    info: TensorInfo
    read: Callable[[], Array]
    made_of: tuple[str, ...]


def rearranged(source: Checkpoint, tensors: Mapping[str, TensorInfo]) -> dict[str, Rearranged]:
    """Return, by their names in a checkpoint made from a source, the tensors that are not there under these names and
    are made of others."""
    found: dict[str, Rearranged] = {}
    for name, info in tensors.items():
        if name in source.tensors or len(info.shape) != 3:
            continue
        made = _stack(source, name, info) or _part_of_heads(source, tensors, name, info)
        found |= {} if made is None else {name: made}
    return found


def _stack(source: Checkpoint, name: str, info: TensorInfo) -> Rearranged | None:
    """Return the stack of all experts of a layer, or None for another tensor and for experts that are not all there."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return None
    for part in _NAMES[match["part"]]:
        names = tuple(f"{match['layer']}.experts.{number}.{part}.weight" for number in range(info.shape[0]))
        if names and all(each in source.tensors for each in names):
            experts = [source.tensors[each] for each in names]
            if len({(each.dtype, each.shape) for each in experts}) == 1:
                return _made(name, experts, (len(names), *experts[0].shape), partial(_joined, source, experts))
    return None


def _joined(source: Checkpoint, experts: list[TensorInfo]) -> Array:
    return np.stack([read(source, each) for each in experts])


def _part_of_heads(
    source: Checkpoint, tensors: Mapping[str, TensorInfo], name: str, info: TensorInfo
) -> Rearranged | None:
    """Return the part of a projection that is one tensor for all heads, or None for another tensor."""
    match = _OF_HEADS.fullmatch(name)
    whole = source.tensors.get(f"{match['attention']}.{_DIVIDED}.weight") if match else None
    first, second = (tensors.get(f"{match['attention']}.{part}.weight") if match else None for part in _PARTS)
    if match is None or whole is None or first is None or second is None or len(whole.shape) != 2:
        return None
    heads, rows = first.shape[0], first.shape[-1]
    if len(first.shape) != 3 or not heads or whole.shape[0] % heads or rows >= whole.shape[0] // heads:
        return None
    is_first = match["part"] == _PARTS[0]
    height = rows if is_first else whole.shape[0] // heads - rows
    shape = (heads, whole.shape[1], height) if is_first else (heads, height, whole.shape[1])
    return _made(name, [whole], shape, partial(_of_heads, source, whole, heads, rows, is_first=is_first))


def _of_heads(source: Checkpoint, whole: TensorInfo, heads: int, rows: int, *, is_first: bool) -> Array:
    by_head = read(source, whole).reshape(heads, -1, whole.shape[1])
    part = by_head[:, :rows].swapaxes(-1, -2) if is_first else by_head[:, rows:]
    return np.ascontiguousarray(part)


def _made(name: str, infos: list[TensorInfo], shape: tuple[int, ...], read_it: Callable[[], Array]) -> Rearranged:
    nbytes = sum(info.nbytes for info in infos)
    return Rearranged(
        replace(infos[0], name=name, shape=shape, nbytes=nbytes), read_it, tuple(info.name for info in infos)
    )


def names_made_of(made: Mapping[str, Rearranged]) -> Iterator[str]:
    """Yield the names of the tensors of the source that others are made of."""
    for each in made.values():
        yield from each.made_of
