"""Rounding rules as numbers: thresholds and steps, the same in Python and in the kernel's header."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from mxcli.backends import abi as recipes
from mxcli.backends import cpu
from mxcli.numerics import stats
from mxcli.numerics.floats import E2M1, E4M3, E5M2, ELEMENTS
from mxcli.numerics.mantissa_rules import (
    MANTISSA_SCALE_RULES,
    BlockScaleFormula,
    ElementScaleFormula,
    ErrorNorm,
    TensorScaleFormula,
)
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES

KERNELS = Path(__file__).parents[2] / "kernels"
EVEN = {"e4m3": 0x77FFFF, "e5m2": 0x6FFFFF, "e2m3": 0x77FFFF, "e3m2": 0x6FFFFF, "e2m1": 0x5FFFFF}


def test_element_roundings() -> None:
    rows = {row.name: (row.above, row.half_if, row.half_always) for row in ELEMENT_ROUNDINGS.values()}
    assert rows.pop("stochastic") == rows["nearest-even"]  # what searches for scales
    assert [row.name for row in ELEMENT_ROUNDINGS.values() if row.is_random] == ["stochastic"]
    assert rows == {
        "nearest-even": (0.5, 1, 0),
        "half-away": (0.5, 0, 1),
        "toward-zero": (2.0, 0, 0),
        "half-toward-zero": (0.5, 0, 0),
    }


def test_thresholds_above_which_an_exponent_is_raised() -> None:
    thresholds = {"floor": 0x7FFFFF, "ceil": 0, "rceil": 0, "nearest": 0x3FFFFF, "ct-even1": 0x5FFFFF, "best": 0x7FFFFF}
    for name, threshold in thresholds.items():
        rule = POWER_OF_TWO_SCALE_RULES[name]
        assert {rule.carry_above(element) for element in ELEMENTS.values() if rule.serves(element)} == {threshold}
    even = POWER_OF_TWO_SCALE_RULES["even"]
    assert {e.name: even.carry_above(e) for e in ELEMENTS.values() if even.serves(e)} == EVEN
    assert POWER_OF_TWO_SCALE_RULES.keys() == {*thresholds, "even"}


def test_rules_of_the_ratio_and_rules_that_search() -> None:
    assert [rule.name for rule in POWER_OF_TWO_SCALE_RULES.values() if rule.of_ratio] == ["rceil", "nearest"]
    candidates = {rule.name: rule.candidates for rule in POWER_OF_TWO_SCALE_RULES.values() if rule.candidates}
    assert candidates == {"best": (1, 0, -1)}


def test_recipes_serve_narrow_or_binary32_scales() -> None:
    kinds = {row.name: row.scale for row in MANTISSA_SCALE_RULES.values()}
    assert set(kinds.values()) == {"narrow", "fp32"}
    assert kinds["best"] == kinds["nncf"] == kinds["static-4"] == "narrow"
    assert kinds["te"] == kinds["ct-bf16"] == kinds["vllm"] == "narrow"
    assert kinds["amax"] == kinds["amax-bf16"] == kinds["vllm-min"] == "fp32"
    for row in MANTISSA_SCALE_RULES.values():
        assert row.scale == "narrow" or row.tensor_step is TensorScaleFormula.NONE
        assert row.min_scale >= 0 <= row.zero_scale


def test_scales_instead_of_none_and_of_zero() -> None:
    lowest = {row.name: row.min_scale for row in MANTISSA_SCALE_RULES.values() if row.min_scale}
    assert lowest == {"torchao": 2.0**-6, "modelopt": 2.0**-9, "vllm-min": 1 / 229376}
    codes = {row.name: row.zero_code for row in MANTISSA_SCALE_RULES.values() if row.zero_code}
    assert codes == {"ct": 0b0_0100_000, "ct-bf16": 0b0_0100_000}
    zero = {row.name: row.zero_scale for row in MANTISSA_SCALE_RULES.values() if row.zero_scale}
    assert zero["nncf"] == 2.0**-23
    assert MANTISSA_SCALE_RULES["modelopt"].zero_scale == MANTISSA_SCALE_RULES["amax"].zero_scale == 1


def test_rules_that_try_scales_with_a_mantissa() -> None:
    tried = {row.name: (row.multiples, row.error.name) for row in MANTISSA_SCALE_RULES.values() if row.multiples}
    assert tried == {
        "four-over-six-mse": ((1.0, 1.5), "SQUARES"),
        "four-over-six-mae": ((1.0, 1.5), "MAGNITUDES"),
        "four-over-six-max": ((1.0, 1.5), "LARGEST"),
    }
    assert [row.name for row in MANTISSA_SCALE_RULES.values() if row.tries_codes] == ["best"]


def test_what_an_amax_is_scaled_to() -> None:
    reaches = {row.name: row.reach(E2M1, E4M3) for row in MANTISSA_SCALE_RULES.values() if row.scale == "narrow"}
    assert {name: reach for name, reach in reaches.items() if reach != (6.0, 448.0)} == {
        "four-over-six-mse": (6.0, 256.0),
        "four-over-six-mae": (6.0, 256.0),
        "four-over-six-max": (6.0, 256.0),
        "static-4": (4.0, 448.0),
        "best": (6.0, 256.0),
        "unbiased": (6 * 16 / 17, 448.0),
    }
    assert MANTISSA_SCALE_RULES["unbiased"].reach(E2M1, E5M2) == (6 * 8 / 9, 57344.0)
    assert MANTISSA_SCALE_RULES["best"].reach(E4M3, E5M2) == (448.0, 32768.0)


@pytest.mark.parametrize("table", [ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES, MANTISSA_SCALE_RULES])
def test_every_row_says_what_it_means_and_who_does_it(table: dict[str, object]) -> None:
    for name, row in table.items():
        for field in ("meaning", "source", *(["formula"] if hasattr(row, "formula") else [])):
            assert getattr(row, field), (name, field)


# --- The kernel's text -------------------------------------------------------------------------------------


def enumerators(file: str, name: str) -> dict[str, int]:
    """The enumerators of an enum of a kernel header, without their common prefix."""
    text = re.sub(r"//.*", "", (KERNELS / file).read_text(encoding="utf-8"))
    body = re.search(rf"enum {name} {{(.*?)}}", text, re.DOTALL)
    assert body is not None, name
    pairs = re.findall(r"(\w+) = (\d+)", body[1])
    assert len(pairs) == len([part for part in body[1].split(",") if part.strip()])
    return {key: int(value) for key, value in pairs}


@pytest.mark.parametrize(
    ("name", "prefix", "steps"),
    [
        ("MxTensorStep", "MX_TENSOR_", TensorScaleFormula),
        ("MxBlockStep", "MX_BLOCK_", BlockScaleFormula),
        ("MxElementStep", "MX_ELEMENT_", ElementScaleFormula),
        ("MxErrorNorm", "MX_", ErrorNorm),
    ],
)
def test_steps_have_the_numbers_of_the_header(name: str, prefix: str, steps: type[IntEnum]) -> None:
    in_python = {f"{prefix}{step.name}": step.value for step in steps}
    assert in_python == enumerators("numerics.h", name)


def test_every_step_is_a_recipes() -> None:
    recipes = MANTISSA_SCALE_RULES.values()
    assert {row.tensor_step for row in recipes} == set(TensorScaleFormula)
    assert {row.block_step for row in recipes} == set(BlockScaleFormula)
    assert {row.element_step for row in recipes} == set(ElementScaleFormula)
    assert {row.error for row in recipes} == set(ErrorNorm)


def test_scale_kinds_and_source_types_have_the_numbers_of_the_headers() -> None:
    kinds = {
        "MX_POWER_OF_TWO": recipes._POWER_OF_TWO,
        "MX_MINIFLOAT": recipes._MINIFLOAT,
        "MX_BINARY32": recipes._BINARY32,
    }
    assert kinds == enumerators("numerics.h", "MxScaleKind")
    types = {f"MX_{name}": number for name, (number, _) in cpu.TYPES.items()}
    assert types == enumerators("quantize.h", "MxType")


def test_histograms_have_the_sizes_of_the_headers() -> None:
    text = (KERNELS / "numerics.h").read_text(encoding="utf-8")
    text += (KERNELS / "quantize.h").read_text(encoding="utf-8")
    sizes = dict(re.findall(r"(?:#define (?=MX_\w+_BINS )|constexpr int (?=kWorst ))(\w+) (?:= )?(\d+)", text))
    assert {name: int(value) for name, value in sizes.items()} == {
        "MX_SCALE_BINS": stats.SCALE_BINS,
        "MX_CODE_BINS": stats.CODE_BINS,
        "MX_SQNR_BINS": stats.SQNR_BINS,
        "MX_RANGE_BINS": stats.RANGE_BINS,
        "kWorst": stats.WORST_BLOCKS,
    }
