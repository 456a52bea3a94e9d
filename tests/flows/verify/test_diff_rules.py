"""diff and verify name element roundings and the recipes of NVFP4."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import quantized, source

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.against.provenance import candidates
from mxcli.flows.verify.diff import Diff, diff_sides
from mxcli.flows.verify.diff_rules import recipes_of
from mxcli.flows.verify.sides import side_of
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Rules, mantissa_rules
from mxcli.output.difference import conclusion


def both(tmp_path: Path, format: str, one: Rules, other: Rules) -> Diff:
    model = source(tmp_path / "m")
    folders = [quantized(model, tmp_path / name, Options(format, each)) for name, each in (("a", one), ("b", other))]
    sides = [side_of(path.name, open_checkpoint(path)) for path in folders]
    return diff_sides(*sides, backend=Cpu())


NEAREST, AWAY, INWARD, CUT = "nearest-even", "half-away", "half-toward-zero", "toward-zero"
NEAR = (NEAREST, AWAY, INWARD)


@pytest.mark.parametrize(
    ("format", "one", "other", "pairs"),
    [
        ("mxfp4", NEAREST, AWAY, [(NEAREST, AWAY)]),
        ("mxfp4", INWARD, NEAREST, [(INWARD, NEAREST)]),
        ("nvfp4", AWAY, INWARD, [(AWAY, INWARD)]),
        ("mxfp6", NEAREST, CUT, [(each, CUT) for each in NEAR]),
        ("mxfp8", CUT, AWAY, [(CUT, each) for each in NEAR]),
    ],
)
def test_diff_names_element_roundings(
    tmp_path: Path, format: str, one: str, other: str, pairs: list[tuple[str, str]]
) -> None:
    rules = [Rules(rounding=each, scale_rounding="paper" if format == "nvfp4" else "floor") for each in (one, other)]
    result = both(tmp_path, format, *rules)
    (steps,) = result.code_steps.values()
    assert set(steps.pairs) >= set(pairs)
    if steps.differing >= 32:
        assert sorted(steps.pairs) == sorted(pairs)
    assert steps.farther == 0
    assert any(line.startswith(f"Roundings ({FORMATS_OF[format]})") for line in conclusion(result))


FORMATS_OF = {"mxfp4": "mxfp4_e2m1", "mxfp6": "mxfp6_e2m3", "mxfp8": "mxfp8_e4m3", "nvfp4": "nvfp4"}


def test_stochastic_rounding_is_named_where_codes_go_both_ways(tmp_path: Path) -> None:
    result = both(tmp_path, "mxfp4", Rules(), Rules(rounding="stochastic", seed=1))
    (steps,) = result.code_steps.values()
    assert ("nearest-even", "stochastic") in steps.pairs
    assert all("stochastic" in pair for pair in steps.pairs)


@pytest.mark.parametrize(
    ("one", "other"),
    [("te", "four-over-six-mse"), ("static-4", "modelopt"), ("unbiased", "te"), ("best", "static-4")],
)
def test_diff_names_the_recipes_of_tensor_scales(tmp_path: Path, one: str, other: str) -> None:
    result = both(tmp_path, "nvfp4", Rules(scale_rounding=one), Rules(scale_rounding=other))
    scales = [each.blocks.tensor_scales for each in result.tensors if each.blocks and each.blocks.tensor_scales]
    ((ours, theirs),) = recipes_of("nvfp4", scales)
    assert one in ours
    assert other in theirs
    assert any(line.startswith("Recipes (nvfp4): the tensor scales have the ratio of") for line in conclusion(result))


def test_no_recipes_have_other_ratios() -> None:
    assert recipes_of("nvfp4", [(1.0, 1.5), (1.0, 1.75)]) == []
    assert recipes_of("nvfp4", [(1.0, 1.3)]) == []
    assert recipes_of("nvfp4", []) == []


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d"])
def test_verify_tries_every_recipe_with_every_rounding(name: str) -> None:
    tried = {(each.scale_rule.name, each.rounding.name) for each in candidates(FORMATS[name], "mxcli")}
    roundings = [each.name for each in ELEMENT_ROUNDINGS.values() if not each.is_random]
    # `paper` and `static-6` differ where the scale is 0; every rule has its own numbers.
    assert {(rule, rounding) for rule in mantissa_rules(FORMATS[name]) for rounding in roundings} <= tried
    assert mantissa_rules(FORMATS[name]) == [row.name for row in MANTISSA_SCALE_RULES.values() if row.scale == "narrow"]
