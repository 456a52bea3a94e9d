"""Which recipes a comparison compares, from the names typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mxcli.errors import UsageError
from mxcli.numerics.combinations import combine
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, resolve, scale_rules


@pytest.mark.parametrize(
    ("formats", "rules", "roundings", "names"),
    [
        ("mxfp8", "", "", "mxfp8_e4m3 floor, mxfp8_e4m3 ceil, mxfp8_e4m3 rceil, mxfp8_e4m3 even"),
        ("e3m2:e8m0:1x16", "", "", ", ".join(f"e3m2:e8m0:1x16 {rule}" for rule in ("floor", "ceil", "rceil", "even"))),
        (
            "nvfp4",
            "",
            "",
            ", ".join(f"nvfp4 {r}" for r in scale_rules(FORMATS["nvfp4"])),
        ),
        ("mxfp8,mxfp4,nvfp4,fp8_e4m3", "", "", "mxfp8_e4m3 rceil, mxfp4_e2m1 rceil, nvfp4 te, fp8_e4m3 amax"),
        ("mxfp4", "rceil,floor", "", "mxfp4_e2m1 rceil, mxfp4_e2m1 floor"),
        ("mxfp4, mxfp8", "ue8m0 ,CEIL", "", "mxfp4_e2m1 rceil, mxfp4_e2m1 ceil, mxfp8_e4m3 rceil, mxfp8_e4m3 ceil"),
        (
            "mxfp4",
            "",
            "nearest-even,toward-zero",
            "mxfp4_e2m1 rceil nearest-even, mxfp4_e2m1 rceil toward-zero",
        ),
        ("fp8_e4m3", "rceil,amax", "", "fp8_e4m3 rceil, fp8_e4m3 amax"),
    ],
)
def test_every_format_meets_every_rule_that_serves_it(formats: str, rules: str, roundings: str, names: str) -> None:
    found = combine(*(text.split(",") if text else [] for text in (formats, rules, roundings)))
    assert ", ".join(found.names) == names
    assert found.notes == ()
    for name, recipe in zip(found.names, found.schemes, strict=True):
        format, rule, *rounding = name.split(" ")
        assert recipe == resolve(format, Rules(scale_rounding=rule, rounding=rounding[0] if rounding else None))


def test_the_dialect_decides_what_is_not_named() -> None:
    found = combine(["mxfp8", "mxfp4", "nvfp4"], rules=Rules(dialect="modelopt", nonfinite="nan-block"))
    assert found.names == (
        "mxfp8_e4m3 rceil nearest-even", "mxfp4_e2m1 rceil half-toward-zero", "nvfp4 modelopt nearest-even"
    )  # fmt: skip
    assert {recipe.dialect.name for recipe in found.schemes} == {"modelopt"}
    assert {recipe.nonfinite for recipe in found.schemes} == {"nan-block"}


def test_what_no_list_names_is_that_of_the_rules() -> None:
    rules = Rules("paper", "stochastic", "te", "nan-block", 5, find_hadamard(16, 3))
    found = combine(["nvfp4"], axes=("row", "column"), rules=rules)
    assert found.schemes == (resolve("nvfp4", rules),) * 2
    found = combine(["nvfp4"], ["te"], ["nearest-even"], ["none", "32"], rules=rules)
    assert [(each.scale_rule.name, each.rounding.name) for each in found.schemes] == [("te", "nearest-even")] * 2
    assert [each.hadamard for each in found.schemes] == [None, replace(find_hadamard(32), bf16=True)]
    assert {(each.dialect.name, each.nonfinite) for each in found.schemes} == {("te", "nan-block")}


def test_what_is_left_out_is_said_once() -> None:
    assert combine(["mxint8"]).notes == ("Left out, since the rule does not serve the format: mxint8 even.",)
    found = combine(["mxfp8", "mxint8", "fp8_e4m3"], ["even", "rceil", "amax"])
    assert found.names == (
        "mxfp8_e4m3 even", "mxfp8_e4m3 rceil", "mxint8 rceil", "fp8_e4m3 even", "fp8_e4m3 rceil", "fp8_e4m3 amax"
    )  # fmt: skip
    assert found.notes == (
        "Left out, since the rule does not serve the format: mxfp8_e4m3 amax, mxint8 even, mxint8 amax.",
    )


def test_a_format_that_no_named_rule_serves_is_compared_all_the_same() -> None:
    found = combine(["mxfp4", "nvfp4"], ["floor", "rceil"])
    assert found.names == ("mxfp4_e2m1 floor", "mxfp4_e2m1 rceil", "nvfp4 te")
    assert found.notes == ("nvfp4 takes none of floor, rceil: it is compared under te, its own.",)


def test_what_is_named_twice_is_compared_once() -> None:
    found = combine(["mxfp8", "mxfp8_e4m3", "e4m3:e8m0:1x32", "nvfp4"], ["rceil", "ue8m0"])
    assert found.names == ("mxfp8_e4m3 rceil", "nvfp4 te")
    assert found.notes[:3] == (
        "--formats names mxfp8_e4m3 twice; it is compared once.",
        "--formats names mxfp8_e4m3 twice; it is compared once.",
        "--scale-roundings names rceil twice; it is compared once.",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((["mxfp9"],), "unknown format 'mxfp9'"),
        ((["mxfp8"], ["flor"]), "unknown scale rounding 'flor': known are floor, .* Did you mean floor?"),
        ((["mxfp8", "mxfp4"], [], ["nearest"]), "unknown element rounding 'nearest'"),
        ((["mxfp8"], ["rceil", "te"]), "te serves none of the formats named: mxfp8_e4m3 takes floor, ceil"),
        ((["mxfp8"], ["te", "paper"]), "Rules that serve no format: 2 problems"),
        ((["mxfp8"], ["rceil"]), "mxfp8_e4m3 under rceil is one combination. Name another format"),
        ((["mxfp8", "mxfp8"], ["rceil"]), "is one combination"),
    ],
)
def test_what_means_nothing_is_refused(arguments: tuple[list[str], ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        combine(*arguments)
    with pytest.raises(UsageError, match="gguf has no rule for mxfp8_e4m3"):
        combine(["mxfp4", "mxfp8"], rules=Rules(dialect="gguf"))


def test_transforms_and_axes_are_named_where_they_differ() -> None:
    found = combine(["nvfp4"], ["te"], [], ["none", "16", "64"], hadamard_seed=3)
    assert found.names == ("nvfp4 te no-hadamard", "nvfp4 te hadamard-16", "nvfp4 te hadamard-64")
    assert [recipe.hadamard for recipe in found.schemes] == [None, find_hadamard(16, 3), find_hadamard(64, 3)]
    assert found.axes == (None, None, None)
    assert found.varies
    found = combine(["nvfp4", "mxfp4"], [], ["stochastic"], ["16"], axes=("row", "column"), rules=Rules(seed=7))
    assert found.names == ("nvfp4 te row", "nvfp4 te column", "mxfp4_e2m1 rceil row", "mxfp4_e2m1 rceil column")
    assert found.axes == ("row", "column") * 2
    assert {(recipe.seed, recipe.hadamard) for recipe in found.schemes} == {(7, find_hadamard(16))}
    both = combine(["nvfp4"], ["te"], ["nearest-even", "stochastic"], ["none", "16"])
    assert both.names[0] == "nvfp4 te nearest-even no-hadamard"
    assert both.names[3] == "nvfp4 te stochastic hadamard-16"
    assert not combine(["nvfp4", "mxfp4"]).varies


def test_a_format_by_itself_can_be_compared_with_its_transform_or_along_its_axes() -> None:
    """The common rules stand in only where nothing else differs."""
    found = combine(["mxfp4"], axes=("row", "column"))
    assert found.names == ("mxfp4_e2m1 rceil row", "mxfp4_e2m1 rceil column")
    assert found.without_axes == ("mxfp4_e2m1 rceil", "mxfp4_e2m1 rceil")
    found = combine(["mxfp4"], hadamards=["none", "16"], axes=("row", "column"))
    assert found.without_axes[1:3] == ("mxfp4_e2m1 rceil no-hadamard", "mxfp4_e2m1 rceil hadamard-16")
    assert combine(["mxfp4"], hadamards=["none", "32"]).names[1] == "mxfp4_e2m1 rceil hadamard-32"
    assert len(combine(["mxfp4"], hadamards=["32"]).names) == 4
    found = combine(["mxfp4"], hadamards=["16", "16", "none"])
    assert found.notes == ("--hadamards names hadamard-16 twice; it is compared once.",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("17", "a Hadamard transform of 17: --hadamard takes 16, 32, 64, 128."),
        ("big", "unknown transform 'big': --hadamards takes none, 16, 32, 64, 128."),
        ("-16", "unknown transform '-16'"),
        ("1600000000016", "unknown transform '1600000000016': --hadamards takes none, 16, 32, 64, 128."),
        ("9" * 5000, "unknown transform '999"),
        ("\u0661\u0666", "unknown transform"),
    ],
)
def test_transforms_that_do_not_exist(name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        combine(["mxfp4"], hadamards=["none", name])


def test_all_names_that_mean_nothing_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        combine(["mxfp9", "mxfp8", "nvfp5"], ["flor", "rceil", "ceel"], ["half-awy"], rules=Rules(dialect="torcho"))
    asked = [reason.split("'")[1] for reason in refused.value.reasons]
    assert asked == ["mxfp9", "nvfp5", "flor", "ceel", "half-awy", "torcho"]
    meant = [reason.rpartition("Did you mean ")[2] for reason in refused.value.reasons]
    assert meant[1:] == ["nvfp4?", "floor?", "ceil?", "half-away?", "torchao?"]
    assert meant[0].startswith("mxfp8")


def test_a_rule_is_reported_though_no_format_is_known() -> None:
    with pytest.raises(UsageError) as refused:
        combine(["mxfp9"], ["flor"])
    assert refused.value.reasons[1].startswith("unknown scale rounding 'flor': known are floor, ceil, rceil")


def test_formats_that_a_dialect_has_no_rule_for_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as refused:
        combine(["mxfp4", "mxfp8", "nvfp4"], rules=Rules(dialect="gguf"))
    assert [reason.partition(" (")[0] for reason in refused.value.reasons] == [
        "gguf has no rule for mxfp8_e4m3",
        "gguf has no rule for nvfp4",
    ]
