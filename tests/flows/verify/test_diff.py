from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from planted import GATE, UP, Tensors, changed, quantized, source, untouched
from tiny_models import bf16, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import UsageError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.diff import Diff, Difference, diff_sides
from mxcli.flows.verify.sides import side_of
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.numerics.hadamard import hadamard_of
from mxcli.numerics.scheme import Rules
from mxcli.output.difference import conclusion

WEIGHTS = 7
SAMPLES = Path(__file__).parents[2] / "data" / "layouts"


def diff(a: Path, b: Path, *selectors: str, by_record: bool = False) -> Diff:
    sides = [side_of(path.name, open_checkpoint(path), by_record=by_record) for path in (a, b)]
    return diff_sides(*sides, backend=Cpu(), selectors=selectors)


def named(result: Diff, name: str) -> Difference:
    return next(each for each in result.tensors if each.name == name)


def both(tmp_path: Path, one: Options, other: Options) -> Diff:
    model = source(tmp_path / "m")
    return diff(quantized(model, tmp_path / "a", one), quantized(model, tmp_path / "b", other))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp6", "fp8_e4m3"])
def test_the_same_bytes_are_the_same(tmp_path: Path, format: str) -> None:
    result = both(tmp_path, Options(format), Options(format))
    assert result.counts == {"equal": 12}
    assert result.differing == ()


# Codes and scales of a format are the same in every layout; the tensor scale is a divisor in one, a factor in another.
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "mxfp4"])
def test_layouts_are_compared_by_what_they_hold(tmp_path: Path, format: str) -> None:
    one, other = (
        Options(format, Rules(dialect="modelopt", nonfinite="error"), layout=layout) for layout in ("ct", "modelopt")
    )
    result = both(tmp_path, one, other)
    assert result.differing == ()
    assert [side.layout for side in result.sides] == ["compressed-tensors", "modelopt"]
    measured = named(result, UP).distance
    assert measured is not None
    assert (measured.relative_error or 0.0) < 2e-7


RULES = [
    ("mxfp4", "floor", "rceil"),
    ("mxfp4", "ceil", "even"),
    ("mxfp8", "floor", "ceil"),
    ("mxfp6", "rceil", "floor"),
]


@pytest.mark.parametrize(("format", "one", "other"), RULES)
def test_the_rules_of_both_are_among_those_that_explain_the_scales(
    tmp_path: Path, format: str, one: str, other: str
) -> None:
    result = both(
        tmp_path,
        Options(format, Rules(scale_rounding=one, nonfinite="error")),
        Options(format, Rules(scale_rounding=other, nonfinite="error")),
    )
    (explanation,) = result.explanations.values()
    assert explanation.contradictory == 0
    assert (one, other) in explanation.pairs
    assert (other, one) not in explanation.pairs
    assert explanation.blocks == sum(each.blocks.blocks for each in result.tensors if each.blocks is not None)


# By hand: amax 7 has exponent 2, so floor chooses 2^(2-2) = 1 and rceil the power of two above 7/6, 2.
def test_scales_one_step_apart_are_counted(tmp_path: Path) -> None:
    x = np.zeros((2, 64), np.float32)
    x[:, ::32] = 7
    model = source(tmp_path / "m", {"a.weight": bf16(x)})
    rules = [Options("mxfp4", Rules(scale_rounding=rule, nonfinite="error")) for rule in ("floor", "rceil")]
    folders = [quantized(model, tmp_path / str(at), options) for at, options in enumerate(rules)]
    (difference,) = diff(folders[0], folders[1]).tensors
    assert difference.differs == ("codes", "scales")
    assert difference.blocks is not None
    assert (difference.blocks.scales, difference.blocks.steps) == (4, {1: 4})
    # 7 is 6 (saturated) in units of 1, and 4 in units of 2 (a tie between 3 and 4).
    assert (difference.blocks.codes, difference.blocks.one_step, difference.blocks.blocks_in_codes) == (4, 4, 4)
    # 6 for 8: the second differs from the first by 2 of 6.
    assert difference.distance is not None
    assert difference.distance.relative_error == pytest.approx(1 / 3)


def test_a_rule_that_searches_is_the_same_rule(tmp_path: Path) -> None:
    result = both(
        tmp_path,
        Options("mxfp8", Rules(scale_rounding="best", nonfinite="error")),
        Options("mxfp8", Rules(scale_rounding="floor", nonfinite="error")),
    )
    (explanation,) = result.explanations.values()
    assert explanation.pairs == []
    assert explanation.best is not None


def test_signs_of_zeros_and_single_steps_are_counted_apart(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp4"))

    def change(tensors: Tensors) -> None:
        packed = tensors[f"{UP}_packed"][1]
        packed[0, :4] = 0x00
        packed[1, :4] = 0x22

    def other(tensors: Tensors) -> None:
        change(tensors)
        packed = tensors[f"{UP}_packed"][1]
        packed[0, :4] = 0x88
        packed[1, :2] = 0x23
        packed[1, 2:4] = 0x2A

    result = diff(changed(folder, tmp_path / "a", change), changed(folder, tmp_path / "b", other))
    blocks = named(result, UP).blocks
    assert blocks is not None
    assert (blocks.codes, blocks.zero_signs, blocks.one_step, blocks.blocks_in_codes) == (12, 8, 2, 2)
    assert result.counts == {"equal": 11, "codes": 1}


def test_tensor_scales_that_one_side_shares_are_counted(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("nvfp4"))

    def doubled(tensors: Tensors) -> None:
        tensors[f"{GATE}_global_scale"][1][:] *= 2

    result = diff(folder, changed(folder, tmp_path / "b", doubled))
    assert named(result, GATE).differs == ("tensor scale",)
    blocks = named(result, GATE).blocks
    assert blocks is not None
    assert blocks.tensor_scales is not None
    # The stored scale is a divisor, so the decode scale is halved.
    assert blocks.tensor_scales[1] / blocks.tensor_scales[0] == 0.5
    assert result.fused == (1, 0)


def test_tensor_scales_that_are_only_spelled_differently_are_equal(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("nvfp4"))

    def nudged(tensors: Tensors) -> None:
        scale = tensors[f"{GATE}_global_scale"][1]
        scale[:] = np.nextafter(scale, np.float32(np.inf))

    result = diff(folder, changed(folder, tmp_path / "b", nudged))
    assert (result.differing, result.fused) == ((), (0, 0))


@pytest.mark.parametrize(
    ("format", "ending"), [("nvfp4", "_scale"), ("fp8_e4m3_channel", "_scale"), ("mxfp8", "_scale")]
)
def test_a_nan_scale_has_no_distance(tmp_path: Path, format: str, ending: str) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options(format, layout="mxcli"))

    def broken(tensors: Tensors) -> None:
        scales = tensors[UP + ending][1].reshape(-1)
        scales[0] = np.nan if scales.dtype == np.float32 else {"nvfp4": 0x7F, "mxfp8": 0xFF}[format]

    blocks = named(diff(folder, changed(folder, tmp_path / "b", broken)), UP).blocks
    assert blocks is not None
    assert (blocks.scales, blocks.steps, blocks.nan_scales) == (1, {}, 1)


SIGNS = ("+" * 16 + "-" * 16, "+-" * 16)


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"hadamard_signs": None}, WEIGHTS),
        ({"hadamard_signs": SIGNS[1]}, WEIGHTS),
        ({"tensors": {UP: {"hadamard_signs": SIGNS[1]}}}, 1),
        ({"tensors": {UP: {"hadamard_signs": None}}}, 1),
    ],
)
def test_the_same_codes_after_another_transform_are_other_weights(
    tmp_path: Path, change: dict[str, object], differs: int
) -> None:
    options = Options("nvfp4", Rules(hadamard=hadamard_of(SIGNS[0]), nonfinite="error"), layout="mxcli")
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", options)
    result = diff(folder, changed(folder, tmp_path / "b", untouched, **change))
    assert result.counts == {"equal": 12 - differs, "transform": differs}
    up = named(result, UP)
    assert (up.differs, up.blocks) == (("transform",), None)
    assert up.distance is not None
    assert (up.distance.relative_error or 0) > 1
    assert up.treatments is not None
    assert up.treatments[0].hadamard == hadamard_of(SIGNS[0])


def test_axes_and_transforms_are_named(tmp_path: Path) -> None:
    by_column = Options(
        "mxfp8", Rules(hadamard=hadamard_of(SIGNS[0]), nonfinite="error"), layout="mxcli", axis="column"
    )
    result = both(tmp_path, Options("mxfp8", layout="mxcli"), by_column)
    assert result.counts == {"equal": 5, "axis": WEIGHTS, "transform": WEIGHTS}
    assert conclusion(result)[0].startswith(
        "Axis: blocks along rows in A and along columns in B, of 7 weights: codes and scales are not compared; values "
        "differ by up to 0.0"
    )
    assert conclusion(result)[1].startswith("Transform: none in A and hadamard-32 in B, of 7 weights: codes and scales")


def test_formats_shapes_dtypes_and_missing_tensors_are_reported(tmp_path: Path) -> None:
    a = quantized(source(tmp_path / "m"), tmp_path / "a", Options("mxfp8"))
    tensors = llama()
    tensors[GATE] = noise(64, 64)
    tensors["model.norm.weight"] = ("F32", np.ones(64, np.float32))
    tensors["model.layers.0.input_layernorm.weight"] = noise(64, seed=9)
    tensors["extra.weight"] = noise(32, 32)
    del tensors["lm_head.weight"]
    mixed = Options("mxfp8", overrides=(Override("*.up_proj", "mxfp4"), Override("*.down_proj", keep=True)))
    b = quantized(source(tmp_path / "n", tensors), tmp_path / "b", mixed)
    result = diff(a, b)
    assert {each.name: each.differs for each in result.differing} == {
        "lm_head.weight": ("only in A",),
        UP: ("format",),
        GATE: ("shape",),
        "model.layers.0.mlp.down_proj.weight": ("format",),
        "model.norm.weight": ("dtype",),
        "model.layers.0.input_layernorm.weight": ("values",),
        "extra.weight": ("only in B",),
    }
    assert named(result, UP).kinds == ("mxfp8_e4m3", "mxfp4_e2m1")
    assert named(result, "model.layers.0.mlp.down_proj.weight").kinds == ("mxfp8_e4m3", "BF16")
    measured = named(result, UP).distance
    assert measured is not None
    assert 0.05 < (measured.relative_error or 0) < 0.2


def test_what_a_package_decodes_is_what_we_decode() -> None:
    folder = SAMPLES / "ct-mxfp4"
    result = diff(folder, folder / "dequantized.safetensors")
    assert result.counts == {"format": 2}
    assert [each.distance.noise for each in result.tensors if each.distance is not None] == [0, 0]


def test_a_plain_checkpoint_may_be_either_side(tmp_path: Path) -> None:
    model = source(tmp_path / "m")
    folder = quantized(model, tmp_path / "q", Options("mxfp8"))
    dequantize_checkpoint(open_checkpoint(folder), tmp_path / "back", backend=Cpu())
    for pair in ((folder, tmp_path / "back"), (tmp_path / "back", folder)):
        result = diff(*pair)
        assert result.counts == {"equal": 5, "format": WEIGHTS}
        assert [each.distance.noise for each in result.tensors if each.distance is not None] == [0] * WEIGHTS
    assert diff(model, model).differing == ()


def test_selectors_restrict_it(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp8"))
    assert [each.name for each in diff(folder, folder, "*.up_proj", "@norm").tensors][:1] == [
        "model.layers.0.input_layernorm.weight"
    ]
    assert len(diff(folder, folder, "*.up_proj").tensors) == 1
    with pytest.raises(UsageError, match="matches no tensor"):
        diff(folder, folder, "nothing")


def test_empty_and_odd_tensors_are_survived(tmp_path: Path) -> None:
    tensors = {"empty": noise(0, 32), "scalar": ("F32", np.float32(1).reshape(())), "flags": ("BOOL", np.ones(3, bool))}
    a, b = write_model(tmp_path / "a", tensors), write_model(tmp_path / "b", {**tensors, "flags": noise(3)})
    assert diff(a, a).counts == {"equal": 3}
    result = diff(a, b)
    assert result.counts == {"equal": 2, "dtype": 1}
    assert named(result, "flags").distance is None


def test_equal_hashes_in_both_records_are_not_read(tmp_path: Path) -> None:
    model = source(tmp_path / "m")
    one = quantized(model, tmp_path / "a", Options("nvfp4"))
    other = quantized(
        model, tmp_path / "b", Options("nvfp4", overrides=(Override(UP, rules=Rules(rounding="half-away")),))
    )
    result = diff(one, other, by_record=True)
    differing = {each.name for each in result.differing}
    assert {each.name for each in result.tensors if not each.by_record} == differing
    assert all(each.is_equal for each in result.tensors if each.by_record)
    full = diff(one, other)
    assert not any(each.by_record for each in full.tensors)
    assert [(each.name, each.differs, each.blocks) for each in result.tensors] == [
        (each.name, each.differs, each.blocks) for each in full.tensors
    ]
    assert result.fused == full.fused


@pytest.mark.parametrize("change", ["bytes", "time", "header"])
def test_files_that_may_have_changed_since_their_record_are_read(tmp_path: Path, change: str) -> None:
    model = source(tmp_path / "m")
    folder = quantized(model, tmp_path / "a", Options("nvfp4"))
    other = Path(shutil.copytree(folder, tmp_path / "b"))
    shard = other / "model.safetensors"
    content = bytearray(shard.read_bytes())
    if change == "bytes":
        content[-5] ^= 1
        shard.write_bytes(content)
    elif change == "time":
        shard.touch()
    else:
        times = shard.stat()
        at = content.index(b'"pt"')
        content[at + 1 : at + 3] = b"pq"
        shard.write_bytes(content)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = diff(folder, other, by_record=True)
    assert not any(each.by_record for each in result.tensors)
    assert len(result.differing) == (1 if change == "bytes" else 0)
    assert all(each.by_record for each in diff(folder, folder, by_record=True).tensors)


@pytest.mark.parametrize("moment", [0, 4_000_000_000])
def test_a_changed_byte_is_seen_regardless_of_times(tmp_path: Path, moment: int) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "a", Options("nvfp4"))
    other = Path(shutil.copytree(folder, tmp_path / "b"))
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (other / "model.safetensors").write_bytes(content)
    os.utime(other / "model.safetensors", (moment, moment))
    assert len(diff(folder, other).differing) == 1
