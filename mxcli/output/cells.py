"""Metrics as the cells of tables."""

from __future__ import annotations

from collections.abc import Mapping

from mxcli.numerics.estimates import uncertainty_of
from mxcli.numerics.measures import Value
from mxcli.numerics.metrics import number_of
from mxcli.output.numbers import significant

EXACT = "exact"

Metrics = Mapping[str, Value]


def noise_cell(metrics: Metrics, name: str) -> str:
    """A measure of noise; `exact` where there is none."""
    return EXACT if metrics["mse"] == 0 else number_cell(metrics, name)


def number_cell(metrics: Metrics, name: str) -> str:
    """Three significant digits of a metric, and two of how unsure an estimate is."""
    unsure = uncertainty_of(metrics, name)
    return significant(number_of(metrics, name)) + ("" if unsure is None else f" ±{unsure:#.2g}".rstrip("."))
