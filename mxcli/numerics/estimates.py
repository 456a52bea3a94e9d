"""Metrics of whole tensors and of samples; those of a sample with the uncertainty of each estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import ESTIMATED, KNOWN, METRICS, OF_SAMPLE, Metric, measured
from mxcli.numerics.samples import Sample, half_width
from mxcli.numerics.stats import Stats

Counted = Stats | Sample
"""Statistics of a whole tensor, or of a sample."""

SAMPLED = ("sampled_elements", "sampled_blocks")
"""Keys of how much of a tensor was counted."""


def metrics_of(
    counted: Counted,
    row: BlockFormat,
    shape: tuple[int, ...] | None = None,
    tensors: int = 1,
    metrics: Mapping[str, Metric] = METRICS,
) -> dict[str, Value]:
    """Return the metrics as `measured` does; of a sample with how much was counted, and after each estimate its
    uncertainty.

    The uncertainty is half of the CONFIDENCE_PERCENT interval of the whole tensor's value: 0 where the sample is the
    whole tensor, None where the sample has nothing to estimate it from.
    """
    if isinstance(counted, Stats):
        return measured(counted, row, shape, tensors, metrics)
    lengths = Stats(elements=counted.elements, blocks=counted.blocks)
    values: dict[str, Value] = {}
    for kind, stats in ((KNOWN, lengths), (ESTIMATED, counted.estimate), (OF_SAMPLE, counted.counted)):
        of_kind = {name: metric for name, metric in metrics.items() if metric.sampled == kind}
        values |= measured(stats, row, shape, tensors, of_kind)
    unsure = _uncertainties(counted, row, tensors, metrics)
    known: dict[str, Value] = dict(zip(SAMPLED, (counted.counted.elements, counted.counted.blocks), strict=True))
    for name in metrics:
        known[name] = values[name]
        if name in unsure:
            known[uncertainty_key(name)] = None if values[name] is None else unsure[name]
    return known


def uncertainty_key(name: str) -> str:
    """Return the key of an estimate's uncertainty."""
    return f"{name}_uncertainty"


def uncertainty_of(metrics: Mapping[str, Value], name: str) -> float | None:
    """Return the uncertainty of an estimate; None if it has none or it is unknown."""
    value = metrics.get(uncertainty_key(name))
    return value if isinstance(value, float) and value > 0 else None


def is_of_part(metrics: Mapping[str, Value]) -> bool:
    """Return whether metrics come from a sample smaller than the tensor."""
    return SAMPLED[0] in metrics and metrics[SAMPLED[0]] != metrics["elements"]


def is_estimated(metric: Metric) -> bool:
    """Return whether a sample reports the metric with an uncertainty."""
    return metric.number and metric.sampled == ESTIMATED


def keys_of(metrics: Mapping[str, Metric], *, sampled: bool) -> list[str]:
    """Return the keys that `metrics_of` returns for these metrics, in order."""
    if not sampled:
        return list(metrics)
    named = ((name, uncertainty_key(name)) if is_estimated(metric) else (name,) for name, metric in metrics.items())
    return [*SAMPLED, *(key for keys in named for key in keys)]


def _uncertainties(
    sample: Sample, row: BlockFormat, tensors: int, metrics: Mapping[str, Metric]
) -> dict[str, float | None]:
    estimated = {name: metric for name, metric in metrics.items() if is_estimated(metric)}
    if sample.counted.elements == sample.elements:
        return dict.fromkeys(estimated, 0.0)
    replicates = [measured(stats, row, None, tensors, estimated) for stats in sample.without_each]
    return {name: _half_width([each[name] for each in replicates]) for name in estimated}


def _half_width(values: list[Value]) -> float | None:
    known = [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]
    return half_width(known) if known and len(known) == len(values) else None
