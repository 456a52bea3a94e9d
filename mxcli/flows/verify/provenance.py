"""Which rule and whose order of operations made the bytes of a weight, found by making them again from the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from mxcli.backends import unpacked
from mxcli.backends.abi import kernel_scheme
from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import COLUMN, quantized_from
from mxcli.files.tensors import Array
from mxcli.flows.verify.check_files import Stated
from mxcli.flows.verify.weight_summary import blocks_of
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Rules, Scheme, resolve, scale_kind, scale_rules
from mxcli.numerics.streams import stream_of

SAMPLED_ELEMENTS, LEAST_GROUPS = 1 << 17, 8
"""Of a weight rules are tried on so many elements first, in so many places or more."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The recipe whose bytes a weight has, or comes nearest to: then `equal_blocks` of `blocks` are the same, in the
    sample that rules were tried on; `tensor_scale` is whether that is the same too. `draws_unknown` says that it is
    said to be rounded at random, and by which seed is not."""

    scheme: Scheme
    exact: bool
    equal_blocks: int
    blocks: int
    tensor_scale: bool = True
    draws_unknown: bool = False


@dataclass(slots=True)
class Tracer:
    """Finds origins: what is `stated` of a weight is tried first, then what was right before (with `only_found` that
    alone), then the dialect `first`."""

    backend: Backend
    first: str
    found: list[Scheme] = field(default_factory=list)
    only_found: bool = False
    stated: Mapping[str, Stated] = field(default_factory=dict)

    def origin(
        self, checkpoint: Checkpoint, stored: StoredWeight, x: Array, dtype: str, amaxes: Sequence[float]
    ) -> Provenance | None:
        """Return the origin of a weight from its original `x`; `amaxes` are the magnitudes that its tensor scale may
        have been chosen by. None for a weight without elements."""
        turned = np.swapaxes(x, -1, -2) if stored.weight.axis == COLUMN else x
        arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in stored.contents]
        q = quantized_from(stored.weight, arrays)
        if not q.packed.size:
            return None
        said = self.stated.get(stored.weight.name, Stated())
        origin = self._origin(q, np.ascontiguousarray(turned), dtype, amaxes, stored, said.schemes)
        unknown = origin is not None and said.draws_unknown and not origin.exact
        return replace(origin, draws_unknown=True) if origin is not None and unknown else origin

    def _origin(
        self,
        q: Quantized,
        x: Array,
        dtype: str,
        amaxes: Sequence[float],
        stored: StoredWeight,
        said: Sequence[Scheme],
    ) -> Provenance | None:
        directions, stream = _directions(stored), stream_of(stored.weight.name)
        sample = _sample(q, x)
        best: Provenance | None = None
        for scheme in self._recipes(q, said):
            amax, same = self._tensor_amax(q, scheme, amaxes, directions)
            # What is drawn for an element goes by its place in the whole tensor.
            part, rows = (q, x) if scheme.rounding.is_random else sample
            made = self.backend.quantize(rows, dtype, scheme, tensor_amax=amax, stream=stream, stats=False)
            equal, blocks = equal_blocks(made, part)
            exact = equal == blocks and same and (part is q or self._whole(q, x, dtype, scheme, amax))
            origin = Provenance(scheme, exact, equal, blocks, same)
            if exact:
                if scheme not in self.found:
                    self.found.append(scheme)
                return origin
            if best is None or (origin.equal_blocks, origin.tensor_scale) > (best.equal_blocks, best.tensor_scale):
                best = origin
        return best

    def _recipes(self, q: Quantized, said: Sequence[Scheme]) -> list[Scheme]:
        """Return what is tried, in order; all of it after the transform that codes are of."""
        hadamard = q.scheme.hadamard
        known = [scheme for scheme in self.found if scheme.format == q.format and scheme.hadamard == hadamard]
        if self.only_found:
            return known
        others = (replace(scheme, hadamard=hadamard) for scheme in candidates(q.format, self.first))
        return list(dict.fromkeys((*said, *known, *others)))

    def _tensor_amax(
        self, q: Quantized, scheme: Scheme, amaxes: Sequence[float], directions: frozenset[str]
    ) -> tuple[float | None, bool]:
        """Return the amax that makes the tensor scale as it is stored, and whether one does; else the first."""
        if q.format.tensor_scale is None or not directions:
            return None, True
        nothing = np.empty((1, 0), np.float32)
        for amax in amaxes:
            untransformed = replace(scheme, hadamard=None)
            made = self.backend.quantize(nothing, "F32", untransformed, tensor_amax=amax, codes=False, stats=False)
            stated = {"encode": (made.tensor_encode, q.tensor_encode), "decode": (made.tensor_scale, q.tensor_scale)}
            if all(np.float32(stated[way][0]) == np.float32(stated[way][1]) for way in directions):
                return amax, True
        return amaxes[0], False

    def _whole(self, q: Quantized, x: Array, dtype: str, scheme: Scheme, amax: float | None) -> bool:
        made = self.backend.quantize(x, dtype, scheme, tensor_amax=amax, stats=False)
        return np.array_equal(made.packed, q.packed) and same_scales(made.scales, q.scales)


@cache
def candidates(row: BlockFormat, first: str) -> tuple[Scheme, ...]:
    """Return every way to quantize to a format that has bytes of its own: what dialects do by themselves, `first` in
    front, then each with every other rule, then `first` with every other rounding that is not random."""
    rules = scale_rules(row)
    choices = {name: DIALECTS[name].choice(scale_kind(row), row.element.name) for name in (first, *DIALECTS)}
    known = [name for name, choice in choices.items() if choice is not None]
    # A dialect's own rule need not serve every element that the scale goes with.
    plain = [name for name, choice in choices.items() if choice is not None and choice.rule in rules]
    unique: dict[bytes, Scheme] = {}
    for scheme in (
        *(resolve(row, Rules(dialect=name)) for name in plain),
        *_ruled(row, known),
        *_rounded(row, known[:1]),
    ):
        unique.setdefault(bytes(kernel_scheme(scheme)), scheme)
    return tuple(unique.values())


def _ruled(row: BlockFormat, dialects: Sequence[str]) -> Iterator[Scheme]:
    for name in dialects:
        for rule in scale_rules(row):
            yield resolve(row, Rules(dialect=name, scale_rounding=rule))


def _rounded(row: BlockFormat, dialects: Sequence[str]) -> Iterator[Scheme]:
    for name in dialects:
        for rule in scale_rules(row):
            for rounding in ELEMENT_ROUNDINGS.values():
                if not rounding.is_random:
                    yield resolve(row, Rules(dialect=name, scale_rounding=rule, rounding=rounding.name))


def equal_blocks(one: Quantized, other: Quantized) -> tuple[int, int]:
    """Return how many blocks of two matrices have the same codes and scale, and how many blocks there are."""
    differing = blocks_of(unpacked(one) != unpacked(other), one.format.block)
    same = ~np.asarray(differing, bool) & (_bits(one.scales) == _bits(other.scales))
    return int(np.count_nonzero(same)), same.size


def same_scales(one: Array, other: Array) -> bool:
    """Return whether scales have the same bits."""
    return np.array_equal(_bits(one), _bits(other))


def _bits(scales: Array) -> Array:
    return np.ascontiguousarray(scales).view(np.uint32) if scales.dtype == np.float32 else scales


def _directions(stored: StoredWeight) -> frozenset[str]:
    """Return which of the tensor scales are stored."""
    return frozenset(content.holds.name for content in stored.contents) & {"encode", "decode"}


def _sample(q: Quantized, x: Array) -> tuple[Quantized, Array]:
    """Return rows of a weight and of its original that rules are tried on: whole blocks from all over it; all of it
    where it is small, or where one scale is for all of it."""
    rows, columns = q.shape[-2:] if len(q.shape) > 1 else (1, q.shape[-1])
    block = q.format.block[0]
    if block is None or x.size <= SAMPLED_ELEMENTS or x.ndim < 2:
        return q, x
    groups = x.size // columns // block if rows % block == 0 else rows // block
    wanted = min(groups, max(LEAST_GROUPS, SAMPLED_ELEMENTS // (block * columns)))
    chosen = np.unique(np.linspace(0, groups - 1, wanted).astype(np.int64))
    taken = (chosen[:, None] * block + np.arange(block)).reshape(-1)
    packed = q.packed.reshape(-1, q.packed.shape[-1])[taken]
    scales = q.scales.reshape(-1, q.scales.shape[-1])[chosen]
    part = replace(q, shape=(len(taken), columns), packed=packed, scales=scales)
    return part, np.ascontiguousarray(x.reshape(-1, columns)[taken])
