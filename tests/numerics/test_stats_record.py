"""Statistics survive JSON to the last bit."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from mxcli.backends import cpu
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules, resolve
from mxcli.numerics.stats import Histogram, Stats, stats_of, stats_record


def bits(stats: Stats) -> list[Any]:
    """Every field with its type, floats by their bits."""
    found = []
    for each in fields(Stats):
        value = getattr(stats, each.name)
        found.append(
            value.hex() if isinstance(value, float) else list(value) if isinstance(value, Histogram) else value
        )
    return found


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8_e4m3", "fp8_e4m3", "mxint8"])
def test_what_a_kernel_counts_comes_back(format: str) -> None:
    x = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32) * np.float32(1e-3)
    x[3, 5], x[7, 9], x[0] = np.inf, np.nan, 0
    stats = cpu.quantize(x, "F32", resolve(FORMATS[format], Rules(nonfinite="nan-block")), threads=1).stats
    assert stats is not None
    back = stats_of(json.loads(json.dumps(stats_record(stats))))
    assert bits(back) == bits(stats)
    assert bits(back + stats) == bits(stats + stats)


def test_values_that_json_could_lose() -> None:
    odd = Stats(
        elements=2**53 + 1,
        signal=0.1 + 0.2,
        noise=5e-324,
        error=-0.0,
        cross=math.inf,
        scale_bins=Histogram(257, [0, 0, 3, 0, 2**62]),
        worst=((0.1, 7), (1e-300, 2**40)),
    )
    assert bits(stats_of(json.loads(json.dumps(stats_record(odd))))) == bits(odd)
    assert bits(stats_of(json.loads(json.dumps(stats_record(Stats()))))) == bits(Stats())


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("saturated", "7", "'saturated' cannot be '7'"),
        ("saturated", 1.5, "'saturated' cannot be 1.5"),
        ("nan", True, "'nan' cannot be True"),
        ("signal", None, "'signal' cannot be None"),
        ("noise", [1.0], r"'noise' cannot be \[1.0\]"),
        ("scale_bins", [-1, 2], "bins -1 to 0 of a histogram of 257"),
        ("scale_bins", [256, 1, 1], "bins 256 to 258 of a histogram of 257"),
        ("worst", [[1, 2]], "a worst block cannot be"),
        ("worst", [["1.0", 2]], "a worst block cannot be"),
        ("worst", [[1.0]], "a worst block cannot be"),
    ],
)
def test_values_of_other_types_are_no_statistics(name: str, value: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        stats_of({**stats_record(Stats()), name: value})
