"""Dialects: what each producer does, by kind of scale and element."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.dialects import ANY, DEFAULT, DIALECTS, ProducerChoice, find_dialect
from mxcli.numerics.floats import ELEMENTS
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES

RULES = {
    "mxcli": ("rceil", "te", "amax"),
    "ocp": ("floor", "te", "amax"),
    "te": ("rceil", "te", "encode"),
    "paper": ("rceil", "paper", "amax"),
    "torchao": ("rceil", "torchao", "amax-bf16-scale"),
    "torchao-casts": ("floor", "torchao", "amax"),
    "modelopt": ("rceil", "modelopt", "amax"),
    "modelopt-bf16": ("rceil", "modelopt", "amax"),
    "compressed-tensors": ("ct-even1", "ct", "amax-eps"),
    "compressed-tensors-bf16": ("ct-even1", "ct-bf16", "amax-bf16"),
    "vllm": (None, "vllm", "vllm-min"),
    "quark": ("even", None, "amax-bf16"),
    "microxcaling": ("floor", None, None),
    "mx-paper": ("floor", None, None),
    "transformers": ("rceil", None, "encode-reciprocal"),
    "auto-round": ("floor", "vllm", None),
    "auto-round-ct": (None, "auto-round", None),
    "nncf": ("rceil", "nncf", None),
    "mlx": ("rceil", "paper", None),
    "mlx-cpu": ("rceil", "modelopt", None),
    "gguf": (None, None, None),
}
"""Rules for MXFP8 E4M3, NVFP4 and FP8 E4M3; None where a producer has none."""
MXFP4 = {
    "modelopt": ProducerChoice("rceil", rounding="half-toward-zero", set_zero_input=True),
    "modelopt-bf16": ProducerChoice("rceil", rounding="half-toward-zero", set_zero_input=True),
    "compressed-tensors": ProducerChoice("even", clear_zero_input=True),
    "quark": ProducerChoice("even", min_exponent=-126, clear_zero_code=True, infinity_is_nan=True),
    "microxcaling": ProducerChoice("floor", flush_subnormal_blocks=True, infinity_is_nan=True),
    "mlx": ProducerChoice("rceil"),
    "mlx-cpu": ProducerChoice("rceil", rounding="half-toward-zero", clear_zero_code=True),
    "mx-paper": ProducerChoice("floor", flush_subnormals=True),
    "auto-round": ProducerChoice("floor", clear_zero_input=True, infinity_is_nan=True),
    "nncf": ProducerChoice("rceil", min_exponent=-23),
    "gguf": ProducerChoice("floor", rounding="half-toward-zero", clear_zero_code=True),
    "ocp": ProducerChoice("floor"),
}


def rule(dialect: str, kind: str, element: str, block: str = "") -> str | None:
    choice = DIALECTS[dialect].choice(kind, element, block)
    return choice.rule if choice else None


def test_the_rules_of_every_dialect() -> None:
    kinds = (("e8m0", "e4m3"), ("narrow", "e2m1"), ("fp32", "e4m3"))
    assert {name: tuple(rule(name, *kind) for kind in kinds) for name in DIALECTS} == RULES


@pytest.mark.parametrize("dialect", MXFP4)
def test_what_a_producer_does_for_mxfp4(dialect: str) -> None:
    assert DIALECTS[dialect].choice("e8m0", "e2m1", "1x32") == MXFP4[dialect]


def test_compressed_tensors_has_a_rule_for_each_element_it_knows() -> None:
    rules = {element: rule("compressed-tensors", "e8m0", element) for element in ELEMENTS}
    assert {element: name for element, name in rules.items() if name} == {
        "e4m3": "ct-even1",
        "e2m1": "even",
        "e2m3": "even",
    }


def test_transformer_engine_scales_blocks_by_powers_of_two() -> None:
    blocks = ("tensor", "channel", "1x128", "128x128")
    assert [rule("te", "fp32", "e4m3", block) for block in blocks] == ["encode", "encode", "rceil", "rceil"]


def test_modelopt_rounds_the_quotient_by_a_scale_of_a_whole_bfloat16_tensor() -> None:
    blocks = ("tensor", "channel", "1x128", "128x128")
    rules = [rule("modelopt-bf16", "fp32", "e4m3", block) for block in blocks]
    assert rules == ["amax-bf16-quotient", "amax", "amax", "amax"]
    assert [rule("modelopt", "fp32", "e4m3", block) for block in blocks] == ["amax"] * 4


@pytest.mark.parametrize("dialect", ["te", "torchao", "torchao-casts"])
def test_byte_0_does_not_divide_by_its_own_value(dialect: str) -> None:
    choice = DIALECTS[dialect].choice("e8m0", "e4m3", "1x32")
    assert choice is not None
    assert dict(choice.byte0_exponent) == {"floor": -126, "ceil": -126, "even": -126, "rceil": 0}


def test_every_choice_names_rows_that_exist() -> None:
    for row in DIALECTS.values():
        assert row.choices.keys() <= {"e8m0", "narrow", "fp32", "fp32 tensor", "fp32 1x128", "fp32 128x128"}
        for kind, elements in row.choices.items():
            assert elements.keys() <= {ANY, *ELEMENTS}
            for choice in elements.values():
                assert choice.rounding in ELEMENT_ROUNDINGS
                known = MANTISSA_SCALE_RULES if kind in ("narrow", "fp32", "fp32 tensor") else POWER_OF_TWO_SCALE_RULES
                assert choice.rule in known
                assert choice.byte0_exponent.keys() <= POWER_OF_TWO_SCALE_RULES.keys()


def test_dialects_are_found_by_name_and_alias() -> None:
    assert find_dialect(None) is DEFAULT is DIALECTS["mxcli"]
    aliases = {alias: row.name for row in DIALECTS.values() for alias in row.aliases}
    assert aliases == {"nvidia": "te", "ct": "compressed-tensors", "ct-bf16": "compressed-tensors-bf16"}
    for alias, name in (*aliases.items(), *((name, name) for name in DIALECTS)):
        assert find_dialect(f" {alias.upper()} ") is DIALECTS[name]


def test_an_unknown_dialect_is_refused_with_what_is_known() -> None:
    with pytest.raises(UsageError, match=r"unknown dialect 'torcha': known are mxcli, ocp, te,.*Did you mean torchao"):
        find_dialect("torcha")


def test_every_dialect_says_what_it_means_and_where_that_was_seen() -> None:
    for row in DIALECTS.values():
        assert row.meaning.endswith(".")
        assert row.source


def test_a_choice_is_the_default_unless_it_says_otherwise() -> None:
    plain = ProducerChoice("floor")
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    assert values == {
        "rule": "floor",
        "rounding": "nearest-even",
        "byte0_exponent": {},
        "min_exponent": -127,
        "clear_zero_input": False,
        "clear_zero_code": False,
        "set_zero_input": False,
        "flush_subnormal_blocks": False,
        "flush_subnormals": False,
        "bf16_transform": False,
        "infinity_is_nan": False,
    }
