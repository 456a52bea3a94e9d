"""Re-encoded codes have the same values wherever FP8 can represent them; all other elements are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mxcli
from mxcli.errors import UsageError
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.reencodings import REENCODINGS

MX = [name for name, row in FORMATS.items() if row.has_power_of_two_scales]
WIDTHS = {"row": None, "1x128": 128}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def heavy(*shape: int) -> np.ndarray:
    return normal(*shape) * np.exp(3 * normal(*shape, seed=1), dtype=np.float32)


def far_apart(rows: int, columns: int) -> np.ndarray:
    return normal(rows, columns) * np.exp2(4 * normal(rows, columns // 32, seed=2)).repeat(32, axis=1)


def misfits(values: np.ndarray, width: int | None) -> int:
    """Count elements that E4M3 cannot represent under the smallest power of two that keeps the group within 448, in
    exact binary64 arithmetic."""
    columns = values.shape[1]
    count = 0
    for start in range(0, columns, width or columns):
        group = values[:, start : start + (width or columns)].astype(np.float64)
        largest = np.abs(group).max(axis=1, keepdims=True)
        scale = np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest) / 448)))
        scale = np.where(largest > 448 * scale, 2 * scale, scale)
        scale = np.where(largest <= 224 * scale, scale / 2, scale)
        magnitude = np.abs(group / scale)
        binade = np.floor(np.log2(np.where(magnitude == 0, 1, magnitude)))
        step = np.exp2(np.maximum(binade, -6) - 3)
        count += int((magnitude % step != 0).sum())
    return count


@pytest.mark.parametrize("target", REENCODINGS)
@pytest.mark.parametrize("format", MX)
@pytest.mark.parametrize("data", [normal, heavy, far_apart])
def test_elements_are_exact_or_counted(data: object, format: str, target: str) -> None:
    q = mxcli.quantize(data(24, 416), format)  # type: ignore[operator]
    again, inexact = q.reencode(target)
    before, after = q.dequantize(), again.dequantize()
    assert inexact == int((before != after).sum())
    assert inexact == misfits(np.asarray(before), WIDTHS[target])
    if q.format.element.mantissa_bits <= 3:  # the maximum stays representable: nothing saturates
        assert np.abs(after).max() == np.abs(before).max()


@pytest.mark.parametrize(("format", "room"), [("mxfp4", 15), ("mxfp6_e2m3", 12), ("mxfp6_e3m2", 10)])
def test_range_of_blocks_in_a_row(format: str, room: int) -> None:
    element = FORMATS[mxcli.quantize(np.ones((1, 32), np.float32), format).format.name].element
    every_code = np.array([element.value(code) for code in range(element.max_code + 1)], np.float32)
    block = np.resize(every_code, 32)
    block[-1] = element.max
    for binades, kept in ((room - 1, True), (room + 2, False)):
        x = np.concatenate([block, block * np.float32(2.0**-binades)]).reshape(1, 64)
        _, inexact = mxcli.quantize(x, format).reencode("row")
        assert (inexact == 0) is kept, binades


def test_normal_weights_are_exact() -> None:
    for format in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"):
        assert mxcli.quantize(normal(64, 1024), format).reencode("row")[1] == 0


def test_zeros_stay_zeros() -> None:
    again, inexact = mxcli.quantize(np.zeros((3, 64), np.float32), "mxfp4").reencode("row")
    assert inexact == 0
    assert np.isfinite(np.asarray(again.scales)).all()
    assert not np.asarray(again.dequantize()).any()


def test_nan_counts_every_element_it_changes() -> None:
    x = np.ones((2, 64), np.float32)
    x[0, 3] = np.nan
    again, inexact = mxcli.quantize(x, "mxfp8").reencode("row")  # block 0 of row 0 is NaN; row 0 becomes NaN
    assert inexact == 32
    assert np.isnan(np.asarray(again.dequantize())[0]).all()
    assert np.array_equal(np.asarray(again.dequantize())[1], x[1])


def test_torch_tensors_stay_torch_tensors() -> None:
    again, inexact = mxcli.quantize(torch.randn(8, 256, generator=torch.Generator().manual_seed(0)), "mxfp4").reencode(
        "row"
    )
    assert isinstance(again.codes, torch.Tensor)
    assert (again.format.spelling, inexact) == ("e4m3:fp32:channel", 0)


def test_unsupported_reencodings() -> None:
    with pytest.raises(UsageError, match="e4m3 scales may have a mantissa"):
        mxcli.quantize(normal(2, 32), "nvfp4").reencode("row")
    with pytest.raises(UsageError, match="unknown re-encoding 'rows': known are row, 1x128"):
        mxcli.quantize(normal(2, 32), "mxfp4").reencode("rows")
