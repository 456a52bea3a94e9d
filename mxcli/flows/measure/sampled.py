"""Measurement of a sample of each tensor: only its rows are read, in groups whose spread gives the uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from operator import add

import numpy as np

from mxcli.backends.backend import Backend
from mxcli.files.checkpoint import Checkpoint, check_source, read, read_rows
from mxcli.files.layouts import COLUMN
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, TensorInfo
from mxcli.flows.measure.amax import AmaxKey, SharedAmax, amax_key_of, has_tensor_scale, largest, oriented
from mxcli.flows.measure.measure import TensorPlans, in_source_order, quantized_only, read_groups
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.numerics.blocks import folded, grid_shape
from mxcli.numerics.estimates import is_of_part
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.samples import Sample, combined, read_whole, sample_of
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import WORST_BLOCKS, Stats
from mxcli.numerics.streams import Draw, Rows, Run, Sampling, draw, stream_of, unit_rows


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of a tensor of one length, as read: [runs, rows, columns], or the whole tensor (no `firsts`)."""

    firsts: tuple[int, ...]
    x: Array


Parts = tuple[tuple[Part, ...], ...]
"""The parts read of a tensor, by group; one group with one part if it was read whole."""
Measure = Callable[[Array], Stats]
"""A function that measures an array under one scheme."""


def measure_samples(
    checkpoint: Checkpoint, plans: Sequence[Plan], backend: Backend, sampling: Sampling
) -> Iterator[tuple[TensorPlans, tuple[Sample, ...]]]:
    """Measure a sample of every tensor that some plan quantizes; yield decisions and samples in the order of the
    source.

    All plans measure the same rows. A tensor scale follows from the largest magnitude in the sample, or in those of
    the tensors that share it.
    """
    yield from in_source_order(plans, lambda unit: _sampled_unit(checkpoint, unit, backend, sampling))
    check_source(checkpoint)


def memory_to_sample(sampling: Sampling, *plans: Plan) -> Need:
    """Return the memory of `measure_samples`: the samples of tensors read together, and copies of a part of them."""
    return need_of(_working_bytes(sampling, unit) for unit in read_groups(plans))


def bytes_to_read(sampling: Sampling | None, planned: TensorPlans) -> int:
    """Return the bytes read of a tensor: all of it without a sampling."""
    info = planned[0].tensor
    drawn = None if sampling is None else _drawn(sampling, planned)
    return info.nbytes if drawn is None else sum(_rows(info).row_bytes * run.rows for group in drawn for run in group)


@dataclass(frozen=True, slots=True)
class Taken:
    """The sample taken of `tensors` tensors, `read_whole` of which were read whole. `tensor_scales` names the formats
    whose scale comes from the amax of a sample instead of the tensor's."""

    fraction: float
    seed: int
    tensors: int
    read_whole: int
    elements: int
    sampled_elements: int
    tensor_scales: tuple[str, ...]

    @property
    def is_everything(self) -> bool:
        """True if all elements were read, so that nothing is estimated."""
        return self.sampled_elements == self.elements


def taken(sampling: Sampling, measured: Iterable[tuple[Mapping[str, Value], Sequence[Scheme]]]) -> Taken:
    """Return the sample that was taken, from the metrics of each tensor and the schemes it was measured under."""
    lengths, scaled = list[tuple[int, int]](), dict[str, None]()
    for metrics, schemes in measured:
        lengths.append((int(str(metrics["elements"])), int(str(metrics["sampled_elements"]))))
        rows = (scheme.format for scheme in schemes if is_of_part(metrics))
        scaled |= dict.fromkeys(row.name for row in rows if row.tensor_scale is not None or row.block == (None, None))
    return Taken(
        sampling.fraction,
        sampling.seed,
        tensors=len(lengths),
        read_whole=sum(1 for elements, sampled in lengths if elements == sampled),
        elements=sum(elements for elements, _ in lengths),
        sampled_elements=sum(sampled for _, sampled in lengths),
        tensor_scales=tuple(scaled),
    )


def sample_notes(sample: Taken | None) -> list[str]:
    """Return notes on numbers that come from a sample; none if all elements were read."""
    if sample is None or sample.is_everything:
        return []
    notes = ["Counts, extremes, histograms and worst blocks are those of the sample; what is rare may not be in it."]
    if sample.tensor_scales:
        notes.append(
            f"{', '.join(sample.tensor_scales)}: the tensor scale follows from the amax of the sample, a lower bound; "
            "the intervals ignore that."
        )
    if sample.read_whole:
        notes.append(
            f"{sample.read_whole:,} of {sample.tensors:,} tensors are read whole: they are small, must be decoded, or "
            "their blocks span too many rows to sample."
        )
    return notes


def _rows(info: TensorInfo) -> Rows:
    batch, height, columns = folded(info.shape)
    return Rows(batch, height, columns * DTYPES[info.dtype].storage_bytes, 1)


def _drawn(sampling: Sampling, planned: TensorPlans) -> Draw | None:
    """Return the rows to read of a tensor; None: all of it, for instance where its bytes must be decoded first."""
    info = planned[0].tensor
    if info.offset == IN_MEMORY:
        return None
    read_groups = [
        unit_rows([each.scheme.format], turned=each.axis == COLUMN) for each in planned if each.scheme is not None
    ]
    known = [unit for unit in read_groups if unit is not None]
    groups = [s.scheme.hadamard.size for s in planned if s.axis == COLUMN and s.scheme and s.scheme.hadamard]
    unit = math.lcm(*known, *groups) if len(known) == len(read_groups) else None
    return draw(sampling, info.name, replace(_rows(info), unit=unit))


def _read(checkpoint: Checkpoint, sampling: Sampling, planned: TensorPlans) -> Parts:
    info, drawn = planned[0].tensor, _drawn(sampling, planned)
    if drawn is None:
        return ((Part((), read(checkpoint, info)),),)
    return tuple(tuple(_parts(checkpoint, info, group)) for group in drawn)


def _parts(checkpoint: Checkpoint, info: TensorInfo, runs: Iterable[Run]) -> Iterator[Part]:
    """Yield the runs of a group; the last ones of a tensor's matrices may be shorter than the others."""
    by_length: dict[int, list[int]] = {}
    for run in runs:
        by_length.setdefault(run.rows, []).append(run.first)
    for rows, firsts in by_length.items():
        yield Part(tuple(firsts), read_rows(checkpoint, info, firsts, rows))


def _sampled_unit(
    checkpoint: Checkpoint, unit: Sequence[TensorPlans], backend: Backend, sampling: Sampling
) -> Iterator[tuple[TensorPlans, tuple[Sample, ...]]]:
    waiting = [(planned, _read(checkpoint, sampling, planned)) for planned in unit]
    stored = {planned[0].tensor.name: (planned[0].tensor.dtype, parts) for planned, parts in waiting}
    keys = {amax_key_of(each) for planned, _ in waiting for each in planned if has_tensor_scale(each)}

    def find(at: tuple[str, AmaxKey]) -> float:
        dtype, parts = stored[at[0]]
        return largest(backend, [(dtype, part.x) for group in parts for part in group], at[1])

    amaxes = SharedAmax([[(name, key) for name in stored] for key in keys], find)
    known = {key: {name: amaxes.own((name, key)) for name in stored} for key in keys}
    shared = {key: max(each.values()) for key, each in known.items()}
    stored.clear()
    while waiting:
        planned, parts = waiting.pop(0)
        planned = quantized_only(planned)
        if planned:
            name = planned[0].tensor.name
            by_axis = {axis: _along(parts, axis) for axis in dict.fromkeys(each.axis for each in planned)}
            of_each = [
                (each, shared.get(key) if each.group else known.get(key, {}).get(name))
                for each in planned
                for key in [amax_key_of(each)]
            ]
            yield (
                planned,
                tuple(
                    _sample(_measuring(backend, each, amax), each, parts, by_axis[each.axis]) for each, amax in of_each
                ),
            )


def _along(parts: Parts, axis: str) -> Parts:
    """Return the parts with blocks along their last dimension."""
    return tuple(tuple(replace(part, x=oriented(part.x, axis)) for part in group) for group in parts)


def _measuring(backend: Backend, each: TensorPlan, amax: float | None) -> Measure:
    scheme, info = each.scheme, each.tensor
    assert scheme is not None
    tensor_amax, parts = amax if has_tensor_scale(each) else None, count()

    def measure(x: Array) -> Stats:
        # Every part begins at element 0 of its own: a stream for each, or all would be rounded by the same draws.
        part = next(parts)
        stream = stream_of(f"{info.name} {part}" if part else info.name)
        stats = backend.quantize(x, info.dtype, scheme, tensor_amax=tensor_amax, stream=stream, codes=False).stats
        assert stats is not None
        return stats

    return measure


def _sample(measure: Measure, planned: TensorPlan, stored: Parts, oriented_parts: Parts) -> Sample:
    """Return the sample of a tensor, from its parts as stored and with blocks along their last dimension."""
    assert planned.scheme is not None
    fmt = planned.scheme.format
    if not stored[0][0].firsts:
        return read_whole(measure(oriented_parts[0][0].x))
    if fmt.block == (None, None):
        counted, groups = _one_block(measure, stored, planned.tensor.dtype)
    else:
        each = [[(part, measure(part.x)) for part in group] for group in oriented_parts]
        groups = [reduce(add, (stats for _, stats in group)) for group in each]
        counted = reduce(add, groups)
        worst = [place for group in each for part, stats in group for place in _placed(planned, part, stats.worst)]
        counted.worst = tuple(sorted(worst, key=lambda pair: (-pair[0], pair[1]))[:WORST_BLOCKS])
    # An index into the sample is not an index into the tensor.
    counted.first_nonfinite = -1
    return sample_of(counted, groups, planned.tensor.elements, math.prod(grid_shape(fmt, planned.shape)))


def _one_block(measure: Measure, parts: Parts, dtype: str) -> tuple[Stats, list[Stats]]:
    """Return the statistics of a sample that is one block, and of each group as a part of that block.

    A row that holds the sample's largest magnitude and zeros gives each group the scale of the whole sample; what it
    adds itself is taken off again. Rules that try several scales may yet choose one for each group.
    """
    flat = [np.concatenate([part.x.reshape(-1, part.x.shape[-1]) for part in group]) for group in parts]
    counted = measure(np.concatenate(flat))
    anchor = np.zeros_like(flat[0][:1])
    amax = np.array(counted.amax, np.float32)
    anchor[0, 0] = amax.view(np.uint32) >> 16 if DTYPES[dtype].is_raw else amax
    alone = measure(anchor)
    return counted, [combined([(measure(np.concatenate([x, anchor])), 1, 1), (alone, -1, -1)]) for x in flat]


def _placed(each: TensorPlan, part: Part, worst: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield the blocks of a part of a sample by their index in the tensor."""
    assert each.scheme is not None
    row = each.scheme.format
    _, height, _ = folded(each.tensor.shape)
    down, across = grid_shape(row, part.x.shape)[-2:]
    all_down, all_across = grid_shape(row, each.shape)[-2:]
    span = row.block[1 if each.axis == COLUMN else 0] or 1
    for noise, block in worst:
        index, below, across_it = block // (down * across), block // across % down, block % across
        in_run = across_it if each.axis == COLUMN else below
        matrix, first = divmod(part.firsts[index] + in_run * span, height)
        place = (below, first // span) if each.axis == COLUMN else (first // span, across_it)
        yield noise, (matrix * all_down + place[0]) * all_across + place[1]


def _working_bytes(sampling: Sampling, unit: Sequence[TensorPlans]) -> tuple[str, int]:
    """Return the tensor of a group with the largest part read, and the bytes of all parts."""
    sizes = {planned[0].tensor.name: bytes_to_read(sampling, planned) for planned in unit}
    # A copy is made of what is turned, and of what is one block.
    return max(sizes, key=lambda name: sizes[name]), sum(sizes.values()) + max(sizes.values())
