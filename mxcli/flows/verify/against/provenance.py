"""The rules and dialect that produced the bytes of a weight, found by requantizing its source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from heapq import nlargest

import numpy as np

from mxcli.backends import unpacked
from mxcli.backends.abi import kernel_scheme
from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.layouts import quantized_from
from mxcli.files.models.fused import fused_sets
from mxcli.files.tensors import Array
from mxcli.flows.measure.amax import SharedAmax, amax_key, largest, oriented
from mxcli.flows.verify.against.originals import Originals
from mxcli.flows.verify.checks.rules import Stated
from mxcli.flows.verify.subject import Subject
from mxcli.flows.verify.weight_summary import blocks_of, decode_scale
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Rules, Scheme, resolve, scale_kind, scale_rules
from mxcli.numerics.streams import stream_of

_LARGEST = 4
"""Amaxes that are tried of weights with one tensor scale: a weight that does not belong to them may have a larger
one."""
SAMPLED_ELEMENTS, LEAST_GROUPS = 1 << 17, 8
"""Rules are tried first on a sample of a weight: about this many elements, in at least this many places."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The scheme that reproduces a weight's bytes (`exact`), or the nearest one.

    `equal_blocks` of `blocks` are equal, in the sample that rules were tried on; `tensor_scale` is True if that scale
    is equal too; `implied` if it follows from no magnitude of the source. `draws_unknown`: the weight is recorded as
    stochastic rounding without its seed. `named`: the record or the configuration names the scheme.
    """

    scheme: Scheme
    exact: bool
    equal_blocks: int
    blocks: int
    tensor_scale: bool = True
    draws_unknown: bool = False
    named: bool = False
    implied: bool = False


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
        """Return the provenance of a weight from its original `x`; `amaxes` are the magnitudes of the source from which
        its tensor scale may follow. None for a weight without elements."""
        rows, q = oriented(np.ascontiguousarray(x), stored.weight.axis), stored_form(checkpoint, stored)
        if not q.packed.size:
            return None
        stated = self.stated.get(stored.weight.name, Stated())
        if stated.schemes and not stated.draws_unknown:
            return self._named(q, rows, dtype, amaxes, stored, stated.schemes)
        provenance = self._search(q, rows, dtype, amaxes, stored, stated.schemes)
        unknown = provenance is not None and stated.draws_unknown and not provenance.exact
        return replace(provenance, draws_unknown=True) if provenance is not None and unknown else provenance

    def _named(
        self,
        q: Quantized,
        x: Array,
        dtype: str,
        amaxes: Sequence[float],
        stored: StoredWeight,
        schemes: Sequence[Scheme],
    ) -> Provenance | None:
        """Return the scheme that is named for a weight; of several the one with the most equal blocks."""
        best: Provenance | None = None
        for scheme in schemes:
            requantized, same = requantize(self.backend, stored, q, x, dtype, scheme, amaxes)
            equal, blocks = equal_blocks(requantized, q)
            found = Provenance(scheme, equal == blocks and same, equal, blocks, same, named=True)
            if found.exact:
                if scheme not in self.found:
                    self.found.append(scheme)
                return found
            if best is None or (found.equal_blocks, found.tensor_scale) > (best.equal_blocks, best.tensor_scale):
                best = found
        return best

    def _search(
        self,
        q: Quantized,
        x: Array,
        dtype: str,
        amaxes: Sequence[float],
        stored: StoredWeight,
        stated: Sequence[Scheme],
    ) -> Provenance | None:
        stream, fmt = stream_of(stored.weight.name), q.format
        sample = _sample(q, x)
        implied = decode_scale(q.tensor_scale, q.tensor_encode) * fmt.element.max * fmt.scale.max
        best: Provenance | None = None
        for scheme in self._schemes(q, stated):
            amax, same = tensor_amax(self.backend, stored, q, scheme, (*amaxes, implied))
            # Random draws depend on the element's index in the whole tensor.
            part, rows = (q, x) if scheme.rounding.is_random else sample
            requantized = self.backend.quantize(rows, dtype, scheme, tensor_amax=amax, stream=stream, stats=False)
            equal, blocks = equal_blocks(requantized, part)
            exact = equal == blocks and same and (part is q or self._whole(q, x, dtype, scheme, amax))
            provenance = Provenance(
                scheme, exact, equal, blocks, same, implied=amax is not None and same and amax not in amaxes
            )
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
        others = (_transformed(scheme, hadamard) for scheme in candidates(q.format, self.first))
        return list(dict.fromkeys((*stated, *known, *others)))

    def _whole(self, q: Quantized, x: Array, dtype: str, scheme: Scheme, amax: float | None) -> bool:
        requantized = self.backend.quantize(x, dtype, scheme, tensor_amax=amax, stats=False)
        return np.array_equal(requantized.packed, q.packed) and same_scales(requantized.scales, q.scales)


def stored_form(checkpoint: Checkpoint, stored: StoredWeight) -> Quantized:
    """Return a weight as stored."""
    arrays = [(content, read(checkpoint, checkpoint.tensors[content.entry.name])) for content in stored.contents]
    return quantized_from(stored.weight, arrays)


def requantize(
    backend: Backend, stored: StoredWeight, q: Quantized, x: Array, dtype: str, scheme: Scheme, amaxes: Sequence[float]
) -> tuple[Quantized, bool]:
    """Return the original `x` of a weight, oriented, quantized by a scheme, and whether the stored tensor scale follows
    from one of `amaxes`; else the one of them that gives the most equal blocks is taken."""
    amax, same = tensor_amax(backend, stored, q, scheme, amaxes)
    stream = stream_of(stored.weight.name)
    tried = [
        backend.quantize(x, dtype, scheme, tensor_amax=each, stream=stream, stats=False)
        for each in ([amax] if same else amaxes)
    ]
    return max(tried, key=lambda each: equal_blocks(each, q)[0]) if len(tried) > 1 else tried[0], same


def tensor_amax(
    backend: Backend, stored: StoredWeight, q: Quantized, scheme: Scheme, amaxes: Sequence[float]
) -> tuple[float | None, bool]:
    """Return the first amax that gives the stored tensor scale and True, or the first and False; (None, True) without a
    stored tensor scale. Where the only scale is of the whole tensor, (None, True) if none gives it: its block shows
    that."""
    if q.format.block == (None, None) and q.format.tensor_scale is None:
        return _amax_of_one_scale(backend, q, scheme, amaxes), True
    directions = _directions(stored)
    if q.format.tensor_scale is None or not directions:
        return None, True
    empty = np.empty((1, 0), np.float32)
    for amax in amaxes:
        untransformed = replace(scheme, hadamard=None)
        requantized = backend.quantize(empty, "F32", untransformed, tensor_amax=amax, codes=False, stats=False)
        scales = {
            "encode": (requantized.tensor_encode, q.tensor_encode),
            "decode": (requantized.tensor_scale, q.tensor_scale),
        }
        if all(np.float32(scales[each][0]) == np.float32(scales[each][1]) for each in directions):
            return amax, True
    return amaxes[0], False


def _amax_of_one_scale(backend: Backend, q: Quantized, scheme: Scheme, amaxes: Sequence[float]) -> float | None:
    """Return the first amax of which the rule makes the only scale of a weight; None if it does of none."""
    untransformed = replace(scheme, hadamard=None)
    for amax in amaxes:
        made = backend.quantize(np.zeros((1, 1), np.float32), "F32", untransformed, tensor_amax=amax, stats=False)
        if math.isfinite(amax) and same_scales(np.ravel(made.scales), np.ravel(q.scales)):
            return amax
    return None


_Place = tuple[str | int, str, bytes]
"""A parent module or a number of columns, a format, and the bytes of a tensor scale."""


class Amaxes:
    """Magnitudes of the source from which the tensor scale of a weight may follow."""

    def __init__(self, backend: Backend, originals: Originals | None, subject: Subject) -> None:
        self._backend, self._originals, self._weights = backend, originals, subject.weights
        self._checkpoint = subject.checkpoint
        self._largest: dict[_Place, list[float]] = {}
        columns = {name: stored.weight.shape[-1] for name, stored in subject.weights.items()}
        self._amax = SharedAmax(fused_sets(subject.checkpoint.config).among(columns).values(), self._find)

    def of(self, stored: StoredWeight) -> list[float]:
        """Return the amaxes of `near`, and those of weights with as many inputs and the same tensor scale: ModelOpt
        shares it among all layers that are given one tensor, such as q, k, v and fc1 of a parallel block, or k and v of
        every cross-attention."""
        near = self.near(stored)
        if near == [0.0]:
            return near
        return list(dict.fromkeys([*near, *self._largest_of(self._places(stored)[1], _LARGEST)]))

    def near(self, stored: StoredWeight) -> list[float]:
        """Return the amax of the weight, of its fused set, and of the weights of its parent module with the same tensor
        scale; [0.0] for a format without a scale of the whole tensor."""
        if not stored.weight.format.scales_whole_tensor or self._originals is None:
            return [0.0]
        own = self._amax.own(stored.weight.name)
        shared = self._amax.of(stored.weight.name)
        return list(dict.fromkeys([own, shared, *self._largest_of(self._places(stored)[0], 1)]))

    def _largest_of(self, place: _Place, count: int) -> list[float]:
        """Return the largest amaxes of the weights that share a tensor scale in the file: sets that loaders of an
        unknown model join."""
        if place not in self._largest:
            members = self._alike[place]
            known = {self._amax.own(name) for name in members} if len(members) > 1 else set()
            self._largest[place] = nlargest(count, known)
        return self._largest[place]

    @cached_property
    def _alike(self) -> dict[_Place, list[str]]:
        """Names of weights by the places and the tensor scale that they share."""
        found: dict[_Place, list[str]] = {}
        for name, stored in self._weights.items():
            for place in self._places(stored):
                found.setdefault(place, []).append(name)
        return found

    def _places(self, stored: StoredWeight) -> tuple[_Place, _Place]:
        """Return the parent module of a weight and its columns, each with its format and the bytes of its tensor
        scale."""
        holding = ("scales",) if stored.weight.format.tensor_scale is None else ("encode", "decode")
        scales = [content.entry.name for content in stored.contents if content.holds.name in holding]
        text = b"".join(read(self._checkpoint, self._checkpoint.tensors[name]).tobytes() for name in scales)
        parent = stored.weight.name.removesuffix(".weight").rpartition(".")[0]
        format = stored.weight.format.name
        return (parent, format, text), (stored.weight.shape[-1], format, text)

    def _find(self, name: str) -> float:
        original = None if self._originals is None else self._originals.by_name.get(name)
        if original is None:
            return 0.0
        weight = self._weights[name].weight
        key = amax_key(weight.axis, weight.scheme.hadamard)
        return largest(self._backend, [(original.info.dtype, original.read())], key)


def _transformed(scheme: Scheme, hadamard: Hadamard | None) -> Scheme:
    rounded = hadamard and replace(hadamard, bf16=scheme.choice.bf16_transform)
    return replace(scheme, hadamard=rounded)


@cache
def candidates(fmt: BlockFormat, first: str) -> tuple[Scheme, ...]:
    """Return the schemes of a format that can give different bytes: the default of each dialect, `first` in front, then
    each with every other scale rule, then `first` with every other rounding that is not random."""
    rules = scale_rules(fmt)
    choices = {
        name: DIALECTS[name].choice(scale_kind(fmt), fmt.element.name, fmt.block_name) for name in (first, *DIALECTS)
    }
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
    same = ~differing_blocks(one, other)
    return int(np.count_nonzero(same)), same.size


def differing_blocks(one: Quantized, other: Quantized) -> Array:
    """Return the blocks of two matrices with other codes, those that fill up the bytes of a row included, or another
    scale."""
    codes = blocks_of(stored_codes(one) != stored_codes(other), one.format.block)
    differing: Array = np.asarray(codes, bool) | (_bits(one.scales) != _bits(other.scales))
    return differing


def stored_codes(q: Quantized) -> Array:
    """Return one code per byte, with those that fill up the bytes of each row."""
    columns = q.packed.shape[-1] * 8 // q.format.element.stored_bits
    codes: Array = unpacked(replace(q, shape=(*q.shape[:-1], columns)))
    return codes


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
