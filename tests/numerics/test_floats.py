"""Scalar formats: what each row is worth, by the numbers of the papers, the oracle and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import oracle
import pytest

from mxcli.numerics.floats import E8M0, ELEMENTS, FP32, SCALES, element_format

# bits, emax, largest, smallest normal, smallest positive
ROWS = {
    "e4m3": (8, 8, 448.0, 2.0**-6, 2.0**-9),
    "e5m2": (8, 15, 57344.0, 2.0**-14, 2.0**-16),
    "e2m3": (6, 2, 7.5, 1.0, 0.125),
    "e3m2": (6, 4, 28.0, 0.25, 0.0625),
    "e2m1": (4, 2, 6.0, 1.0, 0.5),
    "int8": (8, 0, 127 / 64, 1.0, 1 / 64),
    "int6": (6, 0, 31 / 16, 1.0, 1 / 16),
    "int4": (4, 0, 1.75, 1.0, 0.25),
}
# "Recipes for Pre-training LLMs with MXFP8", table 1
BINADES = {"e4m3": 17.8, "e5m2": 31.8, "e2m3": 5.9, "e3m2": 8.8, "e2m1": 3.6}
EVERY_SPELLING = [f"e{x}m{y}" for x in range(1, 8) for y in range(7) if x + y <= 7]
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


def test_every_element_has_its_numbers() -> None:
    rows = {row.name: (row.bits, row.emax, row.max, row.min_normal, row.min_positive) for row in ELEMENTS.values()}
    assert rows == ROWS


def test_binades_are_those_of_table_1() -> None:
    assert {name: round(ELEMENTS[name].binades, 1) for name in BINADES} == BINADES


def test_stored_widths_hold_a_code() -> None:
    widths = {"e1m0": 4, "e2m1": 4, "int4": 4, "int6": 6, "e3m1": 6, "e2m3": 6, "e5m1": 8, "e4m3": 8, "int8": 8}
    for name, width in widths.items():
        element = element_format(name)
        assert element is not None
        assert element.stored_bits == width
    assert FP32.stored_bits == FP32.bits == 32


def test_the_values_of_e2m1() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert [ELEMENTS["e2m1"].value(code) for code in range(8)] == values
    assert [ELEMENTS["e2m1"].value(code) for code in range(8, 16)] == [-value for value in values]
    assert math.copysign(1, ELEMENTS["e2m1"].value(8)) == -1


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("e4m3", 0b0_1111_110, 448.0),
        ("e4m3", 0b0_1111_111, math.nan),
        ("e4m3", 0b1_1111_111, math.nan),
        ("e4m3", 0b0_0000_001, 2.0**-9),
        ("e5m2", 0b0_11110_11, 57344.0),
        ("e5m2", 0b0_11111_00, math.inf),
        ("e5m2", 0b1_11111_00, -math.inf),
        ("e5m2", 0b0_11111_01, math.nan),
        ("e5m2", 0b1_11111_11, math.nan),
        ("e2m3", 0b1_11_111, -7.5),
        ("e3m2", 0b0_111_11, 28.0),
        ("int8", 0x7F, 127 / 64),
        ("int8", 0x81, -127 / 64),
        ("int8", 0x80, -2.0),
        ("int4", 0xF, -0.25),
        ("int4", 0x8, -2.0),
    ],
)
def test_the_value_of_a_code(name: str, code: int, value: float) -> None:
    assert ELEMENTS[name].value(code) == pytest.approx(value, rel=0, nan_ok=True)


@pytest.mark.parametrize("name", [*ELEMENTS, *EVERY_SPELLING])
def test_every_code_of_every_element_is_worth_what_the_oracle_says(name: str) -> None:
    element, fmt = element_format(name), oracle.element_format(name)
    assert element is not None
    assert (element.bits, element.mantissa_bits, element.emax) == (fmt.bits, fmt.mantissa_bits, fmt.emax)
    assert (element.max, element.nan_code or 0) == (fmt.max, fmt.nan_code)
    np.testing.assert_array_equal([element.value(code) for code in range(2**fmt.bits)], fmt.values)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_is_worth_what_ml_dtypes_says(name: str) -> None:
    codes = np.arange(2 ** ELEMENTS[name].bits, dtype=np.uint8)
    values = [ELEMENTS[name].value(int(code)) for code in codes]
    np.testing.assert_array_equal(values, codes.view(ML_DTYPES[name]).astype(np.float64))


def test_e8m0_holds_powers_of_two_and_no_zero() -> None:
    assert (E8M0.bits, E8M0.min_positive, E8M0.max, E8M0.emin, E8M0.emax) == (8, 2.0**-127, 2.0**127, -127, 127)
    assert [E8M0.value(code) for code in (0, 127, 128, 254)] == [2.0**-127, 1.0, 2.0, 2.0**127]
    assert math.isnan(E8M0.value(255))
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal([E8M0.value(code) for code in range(256)], expected)


def test_fp32_is_binary32() -> None:
    limits = np.finfo(np.float32)
    expected = (float(limits.max), float(limits.smallest_normal), float(limits.smallest_subnormal))
    assert (FP32.max, FP32.min_normal, FP32.min_positive) == expected
    assert FP32.value(0x3FC00000) == 1.5
    assert FP32.value(0xFF800000) == -math.inf
    assert math.isnan(FP32.value(0x7FC00000))


def test_scales_are_elements_too() -> None:
    assert list(SCALES) == ["e8m0", "e4m3", "e5m2", "fp32"]
    assert SCALES["e4m3"] is ELEMENTS["e4m3"]
    assert SCALES["e5m2"] is ELEMENTS["e5m2"]


@pytest.mark.parametrize(
    "name", ["e0m3", "e8m0", "e4m4", "e7m1", "e3", "m3", "int2", "int16", "E4M3", "e2m7", "", "e2m1x"]
)
def test_what_spells_no_element(name: str) -> None:
    assert element_format(name) is None
