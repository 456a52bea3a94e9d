"""The measuring path of all verbs: each tensor is read once and quantized under every plan; codes are dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

from mxcli.backends.backend import Backend
from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint, check_source, read
from mxcli.files.tensors import DTYPES, Array
from mxcli.flows.measure.amax import SharedAmax, amax_key_of, has_tensor_scale, largest, oriented
from mxcli.flows.plan.memory import Need, need_of
from mxcli.flows.plan.plan import Plan, TensorPlan
from mxcli.numerics.blocks import COLUMN, Quantized, grid_shape
from mxcli.numerics.estimates import Counted, metrics_of, uncertainty_key
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.streams import stream_of

PER_BLOCK = {"amax": "F32", "decode": "F32", "saturated": "I32", "underflowed": "I32", "noise": "F64"}
"""Arrays with a value per block, and their types."""

_OF_ONE_FORMAT = ("subnormal_percent", "binades_available", "binades_used", "code_use_percent")
"""Metrics without a meaning over several element formats."""

_ANOMALIES: dict[str, Callable[[Mapping[str, Value]], object]] = {
    "with NaN or infinities": lambda m: m["nonfinite"],
    "with blocks lost to a scale that became zero or was clamped": lambda m: m["scale_underflowed_blocks"],
    "with values that decode to infinity, which --exclude keeps as they are": lambda m: m["max_abs_error"] is None,
    "of zeros only": lambda m: (
        m["amax"] == 0 and not m["nonfinite"] and m.get("sampled_elements", m["elements"]) == m["elements"]
    ),
}

TensorPlans = tuple[TensorPlan, ...]
"""The decisions of several plans on one tensor."""
T = TypeVar("T")


def measured_tensors(plans: Sequence[Plan]) -> list[TensorPlans]:
    """Return the tensors that some plan quantizes, in the order of the source, with the decisions of all plans."""
    return [
        planned for planned in zip(*(plan.tensors for plan in plans), strict=True) if any(s.scheme for s in planned)
    ]


def quantized_only(planned: TensorPlans) -> TensorPlans:
    """Return the decisions that quantize the tensor."""
    return tuple(each for each in planned if each.scheme is not None)


def measure(
    checkpoint: Checkpoint,
    plans: Sequence[Plan],
    backend: Backend,
    *,
    per_block: bool = False,
    codes: bool = False,
) -> Iterator[tuple[TensorPlans, tuple[Quantized, ...]]]:
    """Quantize every tensor that some plan quantizes, and yield the decisions and results in the order of the source.

    Each tensor is read once. Tensors that share a tensor scale are read together; the results of the later ones wait
    for their turn. Codes are kept only if requested. Raises InputError at the end too if a file has changed since.
    """
    yield from in_source_order(
        plans, lambda unit: _measured_unit(checkpoint, unit, backend, per_block=per_block, codes=codes)
    )
    check_source(checkpoint)


def in_source_order(
    plans: Sequence[Plan], measured_unit: Callable[[Sequence[TensorPlans]], Iterable[tuple[TensorPlans, T]]]
) -> Iterator[tuple[TensorPlans, T]]:
    """Yield the results of `measured_unit`, which takes tensors that share a tensor scale, in the order of the
    source."""
    order = iter([planned[0].tensor.name for planned in measured_tensors(plans)])
    waiting: dict[str, tuple[TensorPlans, T]] = {}
    next_name = next(order, None)
    for unit in read_groups(plans):
        for planned, made in measured_unit(unit):
            waiting[planned[0].tensor.name] = planned, made
            while next_name in waiting:
                yield waiting.pop(next_name)
                next_name = next(order, None)


def read_groups(plans: Sequence[Plan]) -> list[list[TensorPlans]]:
    """Return the tensors to measure, grouped by the tensor scales that they share in some plan."""
    wanted = {planned[0].tensor.name for planned in measured_tensors(plans)}
    found: dict[tuple[bool, str], list[TensorPlans]] = {}
    for planned in zip(*(plan.tensors for plan in plans), strict=True):
        group = next((each.group for each in planned if each.group is not None), None)
        key = (True, group) if group is not None else (False, planned[0].tensor.name)
        found.setdefault(key, []).append(planned)
    return [unit for unit in found.values() if any(planned[0].tensor.name in wanted for planned in unit)]


def memory_to_measure(*plans: Plan, per_block: bool = False) -> Need:
    """Return the memory of `measure`: tensors read together, a transposed copy of one, and arrays per block."""
    return need_of(_working_bytes(unit, per_block) for unit in read_groups(plans))


def pooled_metrics(counted: Counted, fmt: BlockFormat, tensors: int) -> dict[str, Value]:
    """Return the metrics of several tensors taken together, with their number."""
    return {"tensors": tensors, **metrics_of(counted, fmt, tensors=tensors)}


def pooled_over_formats(parts: Mapping[BlockFormat, tuple[Counted, int]]) -> dict[str, Value]:
    """Return the metrics of tensors in several formats taken together, given the sum and the number of those in each.

    Bits are averaged over elements and histograms by exponent added up; metrics of a single element format are absent.
    """
    if len(parts) == 1:
        ((fmt, (stats, tensors)),) = parts.items()
        return pooled_metrics(stats, fmt, tensors)
    each = [pooled_metrics(counted, fmt, tensors) for fmt, (counted, tensors) in parts.items()]
    whole = reduce(add, (counted for counted, _ in parts.values()))
    together = pooled_metrics(whole, next(iter(parts)), sum(tensors for _, tensors in parts.values()))
    unknown = {key for name in _OF_ONE_FORMAT for key in (name, uncertainty_key(name))}
    together |= dict.fromkeys(unknown & together.keys(), None)
    bits = sum(stored_bits(counted.elements, counted.blocks, fmt, tensors) for fmt, (counted, tensors) in parts.items())
    together["bits_per_element"] = bits / whole.elements if whole.elements else None
    for name, pick in (("scale_exponent_min", min), ("scale_exponent_max", max)):
        known = [value for metrics in each if isinstance(value := metrics[name], int)]
        together[name] = pick(known, default=None)
    for name in ("scale_exponent_histogram", "element_exponent_histogram"):
        counts: Counter[str] = Counter()
        for metrics in each:
            histogram = metrics[name]
            counts.update(histogram if isinstance(histogram, dict) else {})
        together[name] = dict(counts)
    return together


def stored_bits(elements: int, blocks: int, fmt: BlockFormat, tensors: int = 1) -> int:
    """Return the bits of codes and all scales; rows that end within a byte are not rounded up."""
    tensor_scale = fmt.tensor_scale.bits if fmt.tensor_scale else 0
    return elements * fmt.element.stored_bits + blocks * fmt.scale.bits + tensors * tensor_scale


def anomaly_notes(measured_as: Iterable[tuple[str, Sequence[Mapping[str, Value]]]]) -> Iterator[str]:
    """Yield a sentence for each anomaly of some tensor under some scheme, given the metrics under each."""
    tensors = list(measured_as)
    for what, has in _ANOMALIES.items():
        found = [name for name, metrics in tensors if any(map(has, metrics))]
        if found:
            plural, more = ("s", ", …") if len(found) > 1 else ("", "")
            yield f"{len(found):,} tensor{plural} ('{printable(found[0])}'{more}) {what}."


def _measured_unit(
    checkpoint: Checkpoint, unit: Iterable[TensorPlans], backend: Backend, *, per_block: bool, codes: bool
) -> Iterator[tuple[TensorPlans, tuple[Quantized, ...]]]:
    arrays = [(planned, read(checkpoint, planned[0].tensor)) for planned in unit]
    stored = {planned[0].tensor.name: (planned[0].tensor.dtype, x) for planned, x in arrays}
    sharing = {amax_key_of(each) for planned, _ in arrays for each in planned if each.group and has_tensor_scale(each)}
    amaxes = SharedAmax(
        [[(name, key) for name in stored] for key in sharing], lambda at: largest(backend, [stored[at[0]]], at[1])
    )
    shared = {key: amaxes.of((next(iter(stored)), key)) for key in sharing}
    while arrays:
        planned, x = arrays.pop(0)
        planned = quantized_only(planned)
        if planned:
            # Several schemes with a tensor scale of the tensor's own need the same amax.
            name = planned[0].tensor.name
            alone = Counter(amax_key_of(each) for each in planned if has_tensor_scale(each) and each.group is None)
            own = {key: amaxes.own((name, key)) for key, count in alone.items() if count > 1}
            by_axis = {axis: oriented(x, axis) for axis in dict.fromkeys(each.axis for each in planned)}
            yield (
                planned,
                tuple(
                    _quantized(
                        backend,
                        by_axis[each.axis],
                        each,
                        (shared if each.group else own).get(amax_key_of(each)),
                        per_block=per_block,
                        codes=codes,
                    )
                    for each in planned
                ),
            )
            stored.pop(name)


def _quantized(
    backend: Backend, x: Array, each: TensorPlan, amax: float | None, *, per_block: bool, codes: bool
) -> Quantized:
    assert each.scheme is not None
    tensor_amax, info = amax if has_tensor_scale(each) else None, each.tensor
    return backend.quantize(
        x,
        info.dtype,
        each.scheme,
        tensor_amax=tensor_amax,
        stream=stream_of(info.name),
        codes=codes,
        per_block=per_block,
    )


def _working_bytes(unit: Sequence[TensorPlans], per_block: bool) -> tuple[str, int]:
    """Return the largest tensor of a group, and the bytes of all."""
    infos = [planned[0].tensor for planned in unit]
    largest_tensor = max(infos, key=lambda info: info.nbytes)
    block_bytes = sum(DTYPES[dtype].storage_bytes for dtype in PER_BLOCK.values()) if per_block else 0
    blocks = sum(math.prod(grid_shape(s.scheme.format, s.shape)) for planned in unit for s in planned if s.scheme)
    turned = max((s.tensor.nbytes for planned in unit for s in quantized_only(planned) if s.axis == COLUMN), default=0)
    return largest_tensor.name, sum(info.nbytes for info in infos) + turned + block_bytes * blocks
