"""Names resolved to a recipe, and refused where they mean nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES
from mxcli.numerics.scale_rules import POWER_OF_TWO_SCALE_RULES
from mxcli.numerics.scheme import NONFINITE_POLICIES, Rules, resolve, resolve_all, scale_kind, scale_rules

POWER_OF_TWO = ["floor", "ceil", "rceil", "even", "nearest", "ct-even1", "best"]
ANY_NARROW = ["te", "paper", "torchao", "modelopt", "ct", "ct-bf16", "vllm", "best", "unbiased", "auto-round", "nncf"]
FOUR_AND_SIX = ["four-over-six-mse", "four-over-six-mae", "four-over-six-max", "static-6", "static-4"]
NARROW = [*ANY_NARROW[:7], *FOUR_AND_SIX, *ANY_NARROW[7:]]
BINARY32 = [
    "amax", "amax-eps", "amax-bf16", "amax-bf16-scale", "amax-bf16-quotient", "encode", "encode-reciprocal", "vllm-min",
]  # fmt: skip
WITHOUT_EVEN = [rule for rule in POWER_OF_TWO if rule != "even"]


@pytest.mark.parametrize(
    ("name", "kind", "rules"),
    [
        ("mxfp8", "e8m0", POWER_OF_TWO),
        ("mxfp4", "e8m0", POWER_OF_TWO),
        ("mxint8", "e8m0", WITHOUT_EVEN),
        ("int4:e8m0:1x32", "e8m0", WITHOUT_EVEN),
        ("nvfp4", "narrow", NARROW),
        ("nvfp4_2d", "narrow", NARROW),
        ("e2m1:e5m2:1x16", "narrow", NARROW),
        ("int4:e4m3:1x16:fp32", "narrow", ANY_NARROW),
        ("e2m3:e4m3:1x16:fp32", "narrow", ANY_NARROW),
        ("fp8_e4m3", "fp32", POWER_OF_TWO + BINARY32),
        ("int8:fp32:channel", "fp32", WITHOUT_EVEN + BINARY32),
    ],
)
def test_rules_that_serve_a_format(name: str, kind: str, rules: list[str]) -> None:
    row = find_format(name)
    assert scale_kind(row) == kind
    assert scale_rules(row) == rules


def test_every_rule_serves_some_named_format() -> None:
    served = {rule for row in FORMATS.values() for rule in scale_rules(row)}
    assert served == {*POWER_OF_TWO_SCALE_RULES, *MANTISSA_SCALE_RULES}


def test_the_default_recipe() -> None:
    defaults = {name: resolve(name) for name in FORMATS}
    rules = {name: recipe.scale_rule.name for name, recipe in defaults.items()}
    assert rules == {
        **dict.fromkeys(("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"), "rceil"),
        **dict.fromkeys(("nvfp4", "nvfp4_2d"), "te"),
        **dict.fromkeys((name for name in FORMATS if name.startswith("fp8")), "amax"),
    }
    for recipe in defaults.values():
        assert (recipe.rounding.name, recipe.dialect.name, recipe.nonfinite) == ("nearest-even", "mxcli", "saturate")
        assert not recipe.infinity_is_nan


def test_what_is_named_wins_over_the_dialect() -> None:
    recipe = resolve("mxfp4", Rules(dialect="modelopt"))
    assert (recipe.scale_rule.name, recipe.rounding.name) == ("rceil", "half-toward-zero")
    recipe = resolve("mxfp4", Rules(dialect="modelopt", scale_rounding="floor", rounding="nearest-even"))
    assert (recipe.scale_rule.name, recipe.rounding.name) == ("floor", "nearest-even")
    assert recipe.choice.set_zero_input
    assert resolve(FORMATS["nvfp4"], Rules(dialect="ct")).scale_rule.name == "ct"


def test_rules_have_aliases_and_any_case() -> None:
    assert resolve("fp8_e4m3_128x128", Rules(scale_rounding=" UE8M0 ")).scale_rule is POWER_OF_TWO_SCALE_RULES["rceil"]
    assert resolve("nvfp4", Rules(scale_rounding="compressed-tensors")).scale_rule is MANTISSA_SCALE_RULES["ct"]
    assert resolve("nvfp4", Rules(scale_rounding="four-over-six")).scale_rule.name == "four-over-six-mse"


def test_a_name_of_rules_for_both_kinds_of_scale() -> None:
    assert resolve("nvfp4", Rules(scale_rounding="best")).scale_rule is MANTISSA_SCALE_RULES["best"]
    assert resolve("mxfp4", Rules(scale_rounding="best")).scale_rule is POWER_OF_TWO_SCALE_RULES["best"]
    assert resolve("fp8_e4m3", Rules(scale_rounding="best")).scale_rule is POWER_OF_TWO_SCALE_RULES["best"]


def test_a_transform_is_rounded_to_bfloat16_where_the_producer_does_that() -> None:
    hadamard = find_hadamard(16)
    found = {name: resolve("nvfp4", Rules(dialect=name, hadamard=hadamard)).hadamard for name in ("te", "mxcli")}
    assert found == {"te": replace(hadamard, bf16=True), "mxcli": hadamard}
    assert resolve("nvfp4", Rules(dialect="te")).hadamard is None


def test_policies_for_nan_and_infinity() -> None:
    assert NONFINITE_POLICIES == ("error", "saturate", "nan-block")
    assert [resolve("mxfp8", Rules(nonfinite=policy)).infinity_is_nan for policy in NONFINITE_POLICIES] == [
        False,
        False,
        True,
    ]
    assert resolve("mxfp8", Rules(dialect="microxcaling")).infinity_is_nan
    assert resolve("mxfp8", Rules(dialect="quark")).infinity_is_nan


def test_a_dialect_without_a_rule_takes_one_that_is_named() -> None:
    recipe = resolve("mxfp8", Rules(dialect="vllm", scale_rounding="ceil"))
    assert (recipe.scale_rule.name, recipe.rounding.name, recipe.dialect.name) == ("ceil", "nearest-even", "vllm")


@pytest.mark.parametrize(
    ("name", "choices", "words"),
    [
        ("mxfp7", {}, "unknown format 'mxfp7'"),
        ("mxfp8", {"scale_rounding": "rciel"}, "unknown scale rounding 'rciel': mxfp8_e4m3 takes floor, ceil,"),
        ("mxfp8", {"scale_rounding": "rciel"}, "Did you mean rceil"),
        ("mxfp8", {"scale_rounding": "te"}, "scale rounding te does not serve mxfp8_e4m3"),
        ("nvfp4", {"scale_rounding": "floor"}, "it takes te, paper, torchao, modelopt, ct, ct-bf16, vllm"),
        ("mxint8", {"scale_rounding": "even"}, "scale rounding even does not serve mxint8 (int8 elements"),
        ("mxfp8", {"scale_rounding": "amax"}, "scale rounding amax does not serve mxfp8_e4m3"),
        ("mxfp8", {"rounding": "half-up"}, "unknown element rounding 'half-up': known are nearest-even,"),
        ("mxfp8", {"dialect": "tensorrt"}, "unknown dialect 'tensorrt': known are mxcli, ocp,"),
        ("mxfp8", {"nonfinite": "clip"}, "--nonfinite takes error, saturate, nan-block"),
        ("mxfp8", {"dialect": "vllm"}, "vllm has no rule for mxfp8_e4m3 (e4m3 elements, e8m0 scales)"),
        ("mxfp8_e5m2", {"dialect": "compressed-tensors"}, "name one with --scale-rounding, or another --as"),
        ("mxfp8", {"dialect": "gguf"}, "gguf has no rule for mxfp8_e4m3"),
        ("nvfp4", {"dialect": "quark"}, "quark has no rule for nvfp4 (e2m1 elements, e4m3 scales)"),
    ],
)
def test_refusals_say_what_would_do(name: str, choices: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        resolve(name, Rules(**choices))
    assert words in str(refusal.value)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_dialect_gives_every_format_a_rule_that_serves_it_or_a_refusal(name: str, dialect: str) -> None:
    row = FORMATS[name]
    try:
        recipe = resolve(row, Rules(dialect=dialect))
    except UsageError:
        choice = DIALECTS[dialect].choice(scale_kind(row), row.element.name, row.block_name)
        assert choice is None or choice.rule not in scale_rules(row)
    else:
        assert recipe.scale_rule.name in scale_rules(row)
        assert (recipe.format, recipe.dialect) == (row, DIALECTS[dialect])


def test_recipes_of_several_formats_and_what_is_wrong_with_each() -> None:
    assert [recipe.scale_rule.name for recipe in resolve_all(["mxfp8", "nvfp4"], Rules(rounding="half-away"))] == [
        "rceil",
        "te",
    ]
    with pytest.raises(UsageError) as refused:
        resolve_all(["mxfp9", "mxfp8", "nvfp4", "nvfp5"], Rules(rounding="up"))
    assert [reason.split("'")[1] for reason in refused.value.reasons] == ["mxfp9", "up", "nvfp5"]
