"""The rules and dialect that produced the bytes of a weight, found by requantizing its source."""

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
"""Rules are tried first on a sample of a weight: about this many elements, in at least this many places."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The scheme that reproduces a weight's bytes (`exact`), or the nearest one.

    `equal_blocks` of `blocks` are equal, in the sample that rules were tried on; `tensor_scale` is True if that scale
    is equal too. `draws_unknown`: the weight is recorded as stochastic rounding without its seed.
    """

    scheme: Scheme
    exact: bool
    equal_blocks: int
    blocks: int
    tensor_scale: bool = True
    draws_unknown: bool = False


@dataclass(slots=True)
class Tracer:
    """A search for the scheme of weights: the schemes `stated` first, then those found before (with `only_found` these
    alone), then the dialect `first`."""

    backend: Backend
    first: str
    found: list[Scheme] = field(default_factory=list)
    only_found: bool = False
    stated: Mapping[str, Stated] = field(default_factory=dict)

    def trace(
        self, checkpoint: Checkpoint, stored: StoredWeight, x: Array, dtype: str, amaxes: Sequence[float]
    ) -> Provenance | None:
        """Return the provenance of a weight from its original `x`; `amaxes` are the magnitudes from which its tensor
        scale may follow. None for a weight without elements."""
        oriented = np.swapaxes(x, -1, -2) if stored.weight.axis == COLUMN else x
        arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in stored.contents]
        q = quantized_from(stored.weight, arrays)
        if not q.packed.size:
            return None
        stated = self.stated.get(stored.weight.name, Stated())
        provenance = self._search(q, np.ascontiguousarray(oriented), dtype, amaxes, stored, stated.schemes)
        unknown = provenance is not None and stated.draws_unknown and not provenance.exact
        return replace(provenance, draws_unknown=True) if provenance is not None and unknown else provenance

    def _search(
        self,
        q: Quantized,
        x: Array,
        dtype: str,
        amaxes: Sequence[float],
        stored: StoredWeight,
        stated: Sequence[Scheme],
    ) -> Provenance | None:
        directions, stream = _directions(stored), stream_of(stored.weight.name)
        sample = _sample(q, x)
        best: Provenance | None = None
        for scheme in self._schemes(q, stated):
            amax, same = self._tensor_amax(q, scheme, amaxes, directions)
            # Random draws depend on the element's index in the whole tensor.
            part, rows = (q, x) if scheme.rounding.is_random else sample
            requantized = self.backend.quantize(rows, dtype, scheme, tensor_amax=amax, stream=stream, stats=False)
            equal, blocks = equal_blocks(requantized, part)
            exact = equal == blocks and same and (part is q or self._whole(q, x, dtype, scheme, amax))
            provenance = Provenance(scheme, exact, equal, blocks, same)
            if exact:
                if scheme not in self.found:
                    self.found.append(scheme)
                return provenance
            if best is None or (provenance.equal_blocks, provenance.tensor_scale) > (
                best.equal_blocks,
                best.tensor_scale,
            ):
                best = provenance
        return best

    def _schemes(self, q: Quantized, stated: Sequence[Scheme]) -> list[Scheme]:
        """Return the schemes to try in order, all with the transform of the codes."""
        hadamard = q.scheme.hadamard
        known = [scheme for scheme in self.found if scheme.format == q.format and scheme.hadamard == hadamard]
        if self.only_found:
            return known
        others = (replace(scheme, hadamard=hadamard) for scheme in candidates(q.format, self.first))
        return list(dict.fromkeys((*stated, *known, *others)))

    def _tensor_amax(
        self, q: Quantized, scheme: Scheme, amaxes: Sequence[float], directions: frozenset[str]
    ) -> tuple[float | None, bool]:
        """Return the amax that gives the stored tensor scale and True, or the first amax and False."""
        if q.format.tensor_scale is None or not directions:
            return None, True
        empty = np.empty((1, 0), np.float32)
        for amax in amaxes:
            untransformed = replace(scheme, hadamard=None)
            requantized = self.backend.quantize(empty, "F32", untransformed, tensor_amax=amax, codes=False, stats=False)
            scales = {
                "encode": (requantized.tensor_encode, q.tensor_encode),
                "decode": (requantized.tensor_scale, q.tensor_scale),
            }
            if all(np.float32(scales[each][0]) == np.float32(scales[each][1]) for each in directions):
                return amax, True
        return amaxes[0], False

    def _whole(self, q: Quantized, x: Array, dtype: str, scheme: Scheme, amax: float | None) -> bool:
        requantized = self.backend.quantize(x, dtype, scheme, tensor_amax=amax, stats=False)
        return np.array_equal(requantized.packed, q.packed) and same_scales(requantized.scales, q.scales)


@cache
def candidates(fmt: BlockFormat, first: str) -> tuple[Scheme, ...]:
    """Return the schemes of a format that can give different bytes: the default of each dialect, `first` in front, then
    each with every other scale rule, then `first` with every other rounding that is not random."""
    rules = scale_rules(fmt)
    choices = {name: DIALECTS[name].choice(scale_kind(fmt), fmt.element.name) for name in (first, *DIALECTS)}
    known = [name for name, choice in choices.items() if choice is not None]
    # A dialect's default rule may not serve every element format.
    plain = [name for name, choice in choices.items() if choice is not None and choice.rule in rules]
    unique: dict[bytes, Scheme] = {}
    for scheme in (
        *(resolve(fmt, Rules(dialect=name)) for name in plain),
        *_ruled(fmt, known),
        *_rounded(fmt, known[:1]),
    ):
        unique.setdefault(bytes(kernel_scheme(scheme)), scheme)
    return tuple(unique.values())


def _ruled(fmt: BlockFormat, dialects: Sequence[str]) -> Iterator[Scheme]:
    for name in dialects:
        for rule in scale_rules(fmt):
            yield resolve(fmt, Rules(dialect=name, scale_rounding=rule))


def _rounded(fmt: BlockFormat, dialects: Sequence[str]) -> Iterator[Scheme]:
    for name in dialects:
        for rule in scale_rules(fmt):
            for rounding in ELEMENT_ROUNDINGS.values():
                if not rounding.is_random:
                    yield resolve(fmt, Rules(dialect=name, scale_rounding=rule, rounding=rounding.name))


def equal_blocks(one: Quantized, other: Quantized) -> tuple[int, int]:
    """Return the number of blocks of two matrices with equal codes and scale, and the number of all blocks."""
    differing = blocks_of(unpacked(one) != unpacked(other), one.format.block)
    same = ~np.asarray(differing, bool) & (_bits(one.scales) == _bits(other.scales))
    return int(np.count_nonzero(same)), same.size


def same_scales(one: Array, other: Array) -> bool:
    """Return whether scales have equal bits."""
    return np.array_equal(_bits(one), _bits(other))


def _bits(scales: Array) -> Array:
    return np.ascontiguousarray(scales).view(np.uint32) if scales.dtype == np.float32 else scales


def _directions(stored: StoredWeight) -> frozenset[str]:
    """Return the directions of the tensor scale that are stored."""
    return frozenset(content.holds.name for content in stored.contents) & {"encode", "decode"}


def _sample(q: Quantized, x: Array) -> tuple[Quantized, Array]:
    """Return evenly spaced rows of whole blocks of a weight and its original; all of a weight that is small or has one
    scale."""
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
