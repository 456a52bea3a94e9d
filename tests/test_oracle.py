"""The oracle against the golden vectors, ml_dtypes, torch, and the formulas read literally."""

import functools
import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

GOLDEN = Path(__file__).parent / "data" / "golden"
ROUNDINGS = ("nearest-even", "half-away", "half-toward-zero", "toward-zero")
FLOATS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
GENERIC = [f"e{x}m{y}" for x in range(1, 8) for y in range(7) if x + y <= 7]
RULES = ("floor", "ceil", "rceil", "even", "nearest", "ct-even1")
REGIONS = {"tensor": (None, None), "channel": (1, None), "1x128": (1, 128), "128x128": (128, 128)}
RNG = np.random.default_rng

F32 = npt.NDArray[np.float32]


def float32(*values: float) -> F32:
    return np.array(values, dtype=np.float32)


def nvfp4(x: npt.NDArray[Any], variant: str = "te", **options: Any) -> oracle.OracleResult:
    return oracle.quantize(x, element="e2m1", scale="e4m3", block=(1, 16), variant=variant, **options)


# --- Golden vectors ----------------------------------------------------------------------------------------


@functools.cache
def golden(stem: str) -> tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]:
    """Tensors and case descriptions of one golden file; bfloat16 through ml_dtypes."""
    path = GOLDEN / f"{stem}.safetensors"
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    return load_file(path), json.loads(metadata["json"])["cases"]


ADAPTIVE = sorted(path.stem for path in GOLDEN.glob("nvfp4_adaptive__*.safetensors"))
QUANTIZED = sorted(path.stem for path in GOLDEN.glob("*__*.safetensors") if path.stem not in ADAPTIVE)
CASES = [(stem, case) for stem in QUANTIZED for case in golden(stem)[1]]


def golden_options(stem: str) -> dict[str, Any]:
    """The arguments of ``quantize`` that a golden file's name stands for."""
    name, rule = stem.split("__")
    match name.split("_"):
        case ["mx", *element]:
            return {"element": element[-1].removeprefix("mx"), "rule": rule}
        case ["fp8", element]:
            return {"element": element, "scale": "fp32", "block": REGIONS[rule]}
        case ["nvfp4", *shape]:
            block = (16, 16) if shape == ["2d16"] else (1, 16)
            recipe = {"variant": rule, "tensor_scale": shape != ["noglobal"]}
            return {"element": "e2m1", "scale": "e4m3", "block": block, **recipe}
    raise ValueError(stem)


@pytest.mark.parametrize(("stem", "case"), CASES)
def test_golden_case(stem: str, case: str) -> None:
    tensors = {
        name.removeprefix(f"{case}."): tensor for name, tensor in golden(stem)[0].items() if name.startswith(f"{case}.")
    }
    x = tensors.pop("x")
    options = golden_options(stem)
    result = oracle.quantize(x, **options)
    actual = {
        "codes": result.codes,
        "scales": result.scales,
        "deq": result.dequantized,
        "global_encode": result.tensor_encode,
        "global_decode": result.tensor_decode,
    }
    if "codes_torchao" in tensors:
        torchao = oracle.quantize(x, **options, byte0="torchao")
        np.testing.assert_array_equal(torchao.scales, tensors["scales"])
        actual |= {"codes_torchao": torchao.codes, "deq_torchao": torchao.dequantized}
    nan_block = np.isnan(result.arguments) if result.scale == "e8m0" else np.zeros(x.shape, dtype=bool)
    for name, expected in tensors.items():
        compared = ~nan_block if name.startswith("codes") else ...
        assert np.asarray(actual[name]).dtype.kind == expected.dtype.kind
        np.testing.assert_array_equal(np.asarray(actual[name])[compared], expected[compared], err_msg=name)


@pytest.mark.parametrize("stem", ADAPTIVE)
def test_golden_scales_that_are_tried(stem: str) -> None:
    """Blocks that the reference decides; the sign of a zero code is not compared."""
    tensors, cases = golden(stem)
    for case in cases:
        x, codes, scales, where = (tensors[f"{case}.{part}"] for part in ("x", "codes", "scales", "compare"))
        result = nvfp4(x, stem.split("__")[1])
        assert result.tensor_decode == tensors[f"{case}.tensor_scale"].item()
        np.testing.assert_array_equal(result.scales[where], scales[where])
        ours, theirs = (np.where(each == 8, 0, each).reshape(*where.shape, 16)[where] for each in (result.codes, codes))
        np.testing.assert_array_equal(ours, theirs, err_msg=case)


def test_golden_files_are_those_of_the_manifest() -> None:
    files = json.loads((GOLDEN / "MANIFEST.json").read_text())["files"]
    for path in GOLDEN.iterdir():
        if path.name != "MANIFEST.json":
            assert hashlib.sha256(path.read_bytes()).hexdigest() == files[path.name]["sha256"], path.name
    covered = {*QUANTIZED, *ADAPTIVE, "elements", "layout"}
    assert {path.stem for path in GOLDEN.glob("*.safetensors")} == covered


@pytest.mark.parametrize("name", [*FLOATS, "int8"])
def test_golden_elements(name: str) -> None:
    tensors, _ = golden("elements")
    fmt = oracle.element_format(name)
    np.testing.assert_array_equal(fmt.values.astype(np.float32), tensors[f"decode.{name}"])
    np.testing.assert_array_equal(oracle.encode(tensors[f"round.{name}.x"], fmt), tensors[f"round.{name}.code"])


def test_golden_layout() -> None:
    tensors, cases = golden("layout")
    for case in cases:
        if case.startswith("swizzle"):
            np.testing.assert_array_equal(oracle.swizzle(tensors[f"{case}.in"]), tensors[f"{case}.out"])
    np.testing.assert_array_equal(oracle.pack4(tensors["fp4.codes"]), tensors["fp4.packed"])
    np.testing.assert_array_equal(oracle.pack6(tensors["fp6.codes"]), tensors["fp6.packed"])


@pytest.mark.parametrize("kind", ["plain", "te_sign", "rand_sign"])
def test_golden_hadamard(kind: str) -> None:
    tensors, _ = golden("layout")
    signs = tensors.get(f"hadamard.{kind}.sign", np.ones(16))
    if kind == "te_sign":
        assert tuple(signs) == oracle.TE_SIGNS
    np.testing.assert_array_equal(oracle.hadamard_matrix(signs), tensors[f"hadamard.{kind}.H"])
    exact, random = tensors["hadamard.exact.x"], tensors["hadamard.random.x"]
    np.testing.assert_array_equal(oracle.hadamard(exact, signs), tensors[f"hadamard.{kind}.exact.y"])
    tolerance = 1e-6 * np.repeat(np.abs(random).reshape(12, 4, 16).sum(-1), 16, axis=-1)
    difference = oracle.hadamard(random, signs) - tensors[f"hadamard.{kind}.random.y"]
    assert (np.abs(difference) <= tolerance).all()


def test_golden_stochastic_rounding_points_are_between_neighbours() -> None:
    for row in json.loads((GOLDEN / "stochastic_rounding.json").read_text())["rows"]:
        grid = oracle.element_format(row["fmt"]).magnitudes
        below = grid[grid <= row["x"]][-1]
        above = grid[grid > row["x"]][:1]
        assert row["lo"] == below
        if row["p_up"] > 0:
            assert row["hi"] == above[0]
            assert row["p_up"] == pytest.approx((row["x"] - below) / (above[0] - below), rel=1e-12)


# SQNR in dB of N(0, 1) in bfloat16, for floor, rceil, ceil, even and nearest (which clips: outliers decide)
SQNR_DB = {
    "e4m3": (30.68, 31.49, 31.49, 31.18, 20.66),
    "e5m2": (25.36, 25.52, 25.52, 25.52, 19.92),
    "e2m3": (30.92, 30.93, 28.76, 30.96, 20.94),
    "e3m2": (25.36, 25.52, 25.52, 25.52, 19.92),
    "e2m1": (18.79, 18.76, 16.82, 19.01, 17.63),
    "int8": (41.30, 41.28, 35.56, None, 21.75),
}


@functools.cache
def normal_bfloat16() -> npt.NDArray[Any]:
    return RNG(0).standard_normal((1024, 1024)).astype(ml_dtypes.bfloat16)


def sqnr_db(x: npt.NDArray[Any], y: F32) -> float:
    signal, error = x.astype(np.float64), y - x.astype(np.float64)
    return 10 * math.log10((signal**2).sum() / (error**2).sum())


@pytest.mark.parametrize("name", SQNR_DB)
def test_sqnr_of_normal_data(name: str) -> None:
    x = normal_bfloat16()
    for rule, expected in zip(("floor", "rceil", "ceil", "even", "nearest"), SQNR_DB[name], strict=True):
        if expected is not None:
            result = oracle.quantize(x, element=name, rule=rule)
            tolerance = 0.1 if rule == "nearest" else 0.05
            assert sqnr_db(x, result.dequantized) == pytest.approx(expected, abs=tolerance), rule


def test_sqnr_of_normal_data_in_nvfp4() -> None:
    x = normal_bfloat16()
    assert sqnr_db(x, nvfp4(x).dequantized) == pytest.approx(20.45, abs=0.05)


# --- Elements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e2m3", ml_dtypes.float6_e2m3fn),
        ("e3m2", ml_dtypes.float6_e3m2fn),
        ("e2m1", ml_dtypes.float4_e2m1fn),
    ],
)
def test_elements_agree_with_ml_dtypes(name: str, dtype: Any) -> None:
    """Every code, every finite bfloat16 and float16, every midpoint of codes and its float32 neighbours."""
    fmt = oracle.element_format(name)
    codes = np.arange(2**fmt.bits, dtype=np.uint8)
    np.testing.assert_array_equal(fmt.values, codes.view(dtype).astype(np.float64))
    halves = [np.arange(2**16, dtype=np.uint16).view(t) for t in (ml_dtypes.bfloat16, np.float16)]
    middle = ((fmt.magnitudes[1:] + fmt.magnitudes[:-1]) / 2).astype(np.float32)
    near = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))]
    x = np.concatenate([h.astype(np.float32) for h in (*halves, *near, *(-n for n in near))])
    x = x[~np.isnan(x)]
    clamped = np.clip(x, -fmt.max, fmt.max).astype(np.float32)
    np.testing.assert_array_equal(oracle.encode(x, fmt), clamped.astype(dtype).view(np.uint8))


def formula(value: float, fmt: oracle.Element) -> int:
    """Magnitude code: q = round_half_even(a 2^(m-e)) at e = max(floor(log2 a), 1 - bias), saturating."""
    bias = (1 << (fmt.bits - 2 - fmt.mantissa_bits)) - 1
    a = Fraction(abs(value))
    e: int = max(math.frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
    q = round(a * Fraction(2) ** (fmt.mantissa_bits - e))
    return min(((e - (1 - bias)) << fmt.mantissa_bits) + q, len(fmt.magnitudes) - 1)


@pytest.mark.parametrize("name", GENERIC)
def test_generic_elements_follow_the_formula(name: str) -> None:
    fmt = oracle.element_format(name)
    grid = fmt.magnitudes
    middle = (grid[1:] + grid[:-1]) / 2
    values = np.concatenate([grid, middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), [4 * fmt.max]])
    codes = oracle.encode(values, fmt)
    assert codes.tolist() == [formula(value, fmt) for value in values.tolist()]
    np.testing.assert_array_equal(oracle.encode(-values, fmt), codes + fmt.sign_bit)


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_integers_are_symmetric_twos_complement(name: str) -> None:
    fmt = oracle.element_format(name)
    step, top = 2.0**-fmt.mantissa_bits, 2 ** (fmt.bits - 1) - 1
    assert fmt.max == top * step
    assert fmt.values[top + 1] == -2
    values = np.arange(-4 * top, 4 * top) / 2 * step
    expected = np.clip([round(v / step) for v in values], -top, top) % 2**fmt.bits
    np.testing.assert_array_equal(oracle.encode(values, fmt), expected)
    assert not oracle.encode([-0.0, -step / 4], fmt).any()


@pytest.mark.parametrize("name", [*GENERIC, "int4", "int8"])
def test_every_rounding_keeps_every_value(name: str) -> None:
    fmt = oracle.element_format(name)
    codes = np.arange(2**fmt.bits)
    produced = codes[np.abs(fmt.values) <= fmt.max]
    for rounding in ROUNDINGS:
        np.testing.assert_array_equal(oracle.encode(fmt.values[produced], fmt, rounding), produced)


def test_roundings_differ_on_ties_only() -> None:
    fmt = oracle.element_format("e2m1")
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 0.24, 7.0, math.inf]
    codes = {
        "nearest-even": [0, 2, 2, 4, 4, 6, 6, 7, 0, 7, 7],
        "half-away": [1, 2, 3, 4, 5, 6, 7, 7, 0, 7, 7],
        "half-toward-zero": [0, 1, 2, 3, 4, 5, 6, 7, 0, 7, 7],
        "toward-zero": [0, 1, 2, 3, 4, 5, 6, 6, 0, 7, 7],
    }
    for rounding, expected in codes.items():
        assert oracle.encode(x, fmt, rounding).tolist() == expected
        assert oracle.encode(np.negative(x), fmt, rounding).tolist() == [8 + code for code in expected]


# --- Power-of-two scales -----------------------------------------------------------------------------------


def exponent_by_bits(bits: int, fmt: oracle.Element, rule: str) -> int:
    """The rules as integer arithmetic on the bits of the binary32 amax."""
    ratio = np.array([bits], dtype=np.uint32).view(np.float32) / np.float32(fmt.max)
    r = int(ratio.view(np.uint32)[0])
    biased, fraction = bits >> 23, bits & 0x7FFFFF
    match rule:
        case "rceil":
            exponent = -127 if r <= 0x400000 else (r >> 23) - 127 + ((r & 0x7FFFFF) > 0)
        case "nearest":
            exponent = -127 if r <= 0x400000 else ((r + 0x400000) >> 23) - 127
        case "floor" | "ceil":
            exponent = biased - 127 - fmt.emax + (rule == "ceil" and fraction > 0)
        case "even" | "ct-even1":
            mantissa_bits = fmt.mantissa_bits if rule == "even" else 1
            exponent = ((bits + (1 << (22 - mantissa_bits))) >> 23) - 127 - fmt.emax
    return min(max(exponent, -127), 127)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", [*FLOATS, "int8", "int4", "e1m2", "e3m0"])
def test_scale_rules_by_bits(name: str, rule: str) -> None:
    fmt = oracle.element_format(name)
    if rule == "even" and name.startswith("int"):
        with pytest.raises(ValueError, match="not defined"):
            oracle.scale_exponents(float32(1), fmt, rule)
        return
    powers = np.arange(0, 256)[:, None] << 23
    fractions = np.array([0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000])
    fractions = np.append(fractions, [0x700001, 0x77FFFF, 0x780000, 0x7DFFFF, 0x7E0000, 0x7E0001, 0x7FFFFF])
    random = RNG(1).integers(0, 0x7F800000, 2000)
    bits = np.concatenate([(powers + fractions).ravel(), random]).astype(np.uint32)
    bits = bits[bits <= 0x7F800000]
    actual = oracle.scale_exponents(bits.view(np.float32), fmt, rule)
    assert actual.tolist() == [exponent_by_bits(b, fmt, rule) for b in bits.tolist()]


def squared_error(block: F32, fmt: oracle.Element, exponent: int) -> Fraction:
    values = oracle.decode(oracle.encode(np.ldexp(block.astype(np.float64), -exponent), fmt), fmt)
    scale = Fraction(2) ** exponent
    return sum(
        ((Fraction(x) - Fraction(v) * scale) ** 2 for x, v in zip(block.tolist(), values.tolist(), strict=True)),
        Fraction(0),
    )


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "int4"])
def test_best_has_the_least_squared_error_and_prefers_the_larger_scale(name: str) -> None:
    fmt = oracle.element_format(name)
    random = RNG(2).standard_normal((60, 8)).astype(np.float32)
    small_integers = RNG(3).integers(-9, 10, (60, 8)).astype(np.float32)
    edges = np.outer(float32(0, 1e-45, 2.0**-126, 2.0**127, 1), np.ones(8, dtype=np.float32))
    x = np.concatenate([random, small_integers, edges])
    result = oracle.quantize(x, element=name, block=(1, 8), rule="best")
    for block, byte in zip(x, result.scales[:, 0].tolist(), strict=True):
        floor = int(oracle._unclamped_exponents(np.abs(block).max(keepdims=True), fmt, "floor")[0])
        candidates = [min(max(floor + shift, -127), 127) for shift in (-1, 0, 1)]
        assert byte - 127 == min(candidates, key=lambda e: (squared_error(block, fmt, e), -e))


def test_nonfinite_blocks_with_power_of_two_scales() -> None:
    x = np.ones((3, 32), dtype=np.float32)
    x[0, 3], x[1, 4], x[1, 5] = np.nan, np.inf, -np.inf
    for rule, byte in (("floor", 127 + 120), ("rceil", 254), ("nearest", 254), ("best", 127 + 121)):
        result = oracle.quantize(x, element="e4m3", rule=rule)
        assert result.scales[:2, 0].tolist() == [255, byte]
        assert np.isnan(result.dequantized[0]).all()
        assert (result.codes[0] == 0x7F).all()
        assert result.codes[1, 4:6].tolist() == [0x7E, 0xFE]
        assert (result.codes[1, 6:] == 0).all()
        strict = oracle.quantize(x, element="e4m3", rule=rule, nonfinite="nan-block")
        assert strict.scales[:2, 0].tolist() == [255, 255]
        np.testing.assert_array_equal(strict.scales[2], result.scales[2])


def test_flush_zeroes_blocks_of_subnormals_only() -> None:
    x = np.zeros((2, 32), dtype=np.float32)
    x[:, 0], x[:, 1], x[1, 2] = 1e-39, -1e-39, 2.0**-126
    flushed = oracle.quantize(x, element="int8", rule="ceil", flush_subnormal_blocks=True)
    kept = oracle.quantize(x, element="int8", rule="ceil")
    assert not flushed.codes[0].any()
    assert flushed.scales[0, 0] == 0
    assert kept.codes[0].any()
    np.testing.assert_array_equal(flushed.codes[1], kept.codes[1])
    assert oracle.quantize(x, element="e4m3", flush_subnormal_blocks=True).codes[0, :3].tolist() == [
        0,
        0x80,
        0,
    ]


# --- Scales with a mantissa --------------------------------------------------------------------------------

ZERO_BLOCK = {"te": 0, "paper": 0, "vllm": 0, "torchao": 0x08, "modelopt": 0x38, "ct": 0x20, "ct-bf16": 0x20}


@pytest.mark.parametrize("variant", ZERO_BLOCK)
def test_nvfp4_zeros(variant: str) -> None:
    keeps_negative_zero = variant in ("torchao", "paper", "vllm")
    x = np.zeros((2, 32), dtype=np.float32)
    x[:, 1], x[1, 16:] = -0.0, -1e-3
    x[1, 31] = 1
    for tensor in (x[:1], x):
        result = nvfp4(tensor, variant)
        assert result.scales[0].tolist() == [ZERO_BLOCK[variant]] * 2
        assert result.codes[0, :3].tolist() == [0, 8 * keeps_negative_zero, 0]
        assert (result.dequantized[0] == 0).all()
    assert (result.codes[1, 16:31] == 8).all()
    zero = nvfp4(x[:1], variant)
    if variant in ("torchao", "modelopt"):
        assert (zero.tensor_encode, zero.tensor_decode) == (None, 1)
    without = nvfp4(x, variant, tensor_scale=False)
    assert (without.tensor_encode, without.tensor_decode) == (None, None)


@pytest.mark.parametrize("variant", oracle.RECIPES)
def test_nvfp4_nonfinite(variant: str) -> None:
    x = RNG(4).standard_normal((1, 64)).astype(np.float32)
    clean = nvfp4(x, variant, tensor_amax=3)
    x[0, 3], x[0, 20], x[0, 21] = np.nan, np.inf, -np.inf
    result = nvfp4(x, variant, tensor_amax=3)
    assert result.scales[0, :2].tolist() == [0x7F, 0x7E]
    assert np.isnan(result.dequantized[0, :16]).all()
    assert result.codes[0, 20:22].tolist() == [7, 15]
    np.testing.assert_array_equal(result.codes[0, 32:], clean.codes[0, 32:])
    assert nvfp4(x, variant, tensor_amax=3, nonfinite="nan-block").scales[0, 1] == 0x7F
    finite_amax = float(np.abs(x[np.isfinite(x)]).max())
    np.testing.assert_array_equal(nvfp4(x, variant).codes, nvfp4(x, variant, tensor_amax=finite_amax).codes)


@pytest.mark.parametrize("variant", oracle.RECIPES)
def test_nvfp4_infinity_among_zeros(variant: str) -> None:
    x = np.zeros((1, 16), dtype=np.float32)
    x[0, 5] = -np.inf
    result = nvfp4(x, variant)
    assert result.codes[0].tolist() == [0] * 5 + [15] + [0] * 10
    assert result.scales[0, 0] == (0 if variant == "vllm" else 0x7E)


def test_ct_bf16_equals_bfloat16_tensor_arithmetic() -> None:
    weight = torch.from_numpy(RNG(5).standard_normal((8, 64)).astype(np.float32)).to(torch.bfloat16)
    encode_scale = (2688.0 / weight.abs().amax()).float()  # a reciprocal times 2688, each rounded to bfloat16
    block_amax = weight.unflatten(-1, (-1, 16)).abs().amax(-1)
    scale = ((block_amax / torch.tensor(6, dtype=torch.bfloat16)).float() * encode_scale).clamp(max=448)
    scale = scale.to(torch.float8_e4m3fn)
    quotient = weight.float() / (scale.float() / encode_scale).repeat_interleave(16, -1)
    result = nvfp4(weight.float().numpy(), "ct-bf16")
    assert result.tensor_encode == encode_scale.item()
    np.testing.assert_array_equal(result.scales, scale.view(torch.uint8).numpy())
    np.testing.assert_array_equal(result.arguments, quotient.numpy())


def test_fp8_nonfinite_and_vanishing_scales() -> None:
    x = np.ones((4, 8), dtype=np.float32)
    x[0, 0], x[1, 0], x[3] = np.nan, -np.inf, 1e-45
    result = oracle.quantize(x, element="e4m3", scale="fp32", block=(1, None))
    assert np.isnan(result.scales[0, 0])
    assert np.isnan(result.dequantized[0]).all()
    assert result.scales[1, 0] == oracle.FLT_MAX / np.float32(448)
    assert result.codes[1, 0] == 0xFE
    assert result.scales[3, 0] == 1
    counts = oracle.statistics(x, result)
    assert (counts["nan_blocks"], counts["nonfinite"], counts["scale_underflowed_blocks"]) == (1, 2, 1)


# --- Shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["e8m0", "e4m3", "fp32"])
def test_shapes(scale: str) -> None:
    x = RNG(6).standard_normal((2, 3, 37, 45)).astype(np.float32)
    run = functools.partial(oracle.quantize, element="e2m1", scale=scale, tensor_amax=5)
    whole = run(x, block=(16, 32))
    assert whole.scales.shape == (2, 3, 3, 2)
    np.testing.assert_array_equal(run(x[1, 2], block=(16, 32)).scales, whole.scales[1, 2])
    padded = run(np.pad(x[1, 2], [(0, 11), (0, 19)]), block=(16, 32))
    np.testing.assert_array_equal(padded.scales, whole.scales[1, 2])
    np.testing.assert_array_equal(padded.dequantized[:37, :45], whole.dequantized[1, 2])
    columns, rows = run(x[0, 0], block=(16, 1)), run(x[0, 0].T, block=(1, 16))
    np.testing.assert_array_equal(columns.codes, rows.codes.T)
    np.testing.assert_array_equal(columns.scales, rows.scales.T)
    row = run(x[0, 0, 0])
    assert row.codes.shape == (45,)
    np.testing.assert_array_equal(row.scales, run(x[0, 0, :1]).scales)
    assert run(x[:, :, :0]).scales.shape == (2, 3, 0, 2)


def test_only_exactly_widening_inputs_are_accepted() -> None:
    with pytest.raises(TypeError, match="float64"):
        oracle.quantize(np.zeros(32), element="e2m1")


def test_signs_of_zeros() -> None:
    x = float32(0.0, -0.0, 0.1, -0.1, 4)
    signs = {"signed": [0, 8, 0, 8], "unsigned": [0, 0, 0, 0]}
    signs |= {"plus-for-zero": [0, 0, 0, 8], "minus-for-zero": [8, 8, 0, 8]}
    for zeros, expected in signs.items():
        assert oracle.quantize(x, element="e2m1", zeros=zeros).codes[:4].tolist() == expected


# --- Statistics --------------------------------------------------------------------------------------------


def test_statistics_of_a_small_tensor() -> None:
    x = np.zeros((2, 8), dtype=np.float32)
    x[0, :6] = 4, 3, 0.125, -7, 0.5, -2.5  # scale 1: the 0.125 vanishes, -7 becomes -6, -2.5 becomes -2
    x[1, :3] = 8, np.nan, np.inf
    stats = oracle.statistics(x, oracle.quantize(x, element="e2m1", block=(1, 8), rule="floor"))
    assert {key: value for key, value in stats.items() if isinstance(value, int)} == {
        "elements": 16,
        "blocks": 2,
        "saturated": 1,
        "saturated_blocks": 1,
        "underflowed": 1,
        "scale_underflowed_blocks": 0,
        "subnormal": 1,
        "nonfinite": 2,
        "nan_blocks": 1,
    }
    noise, power = 0.125**2 + 1 + 0.25, 16 + 9 + 0.125**2 + 49 + 0.25 + 6.25
    assert stats["amax"] == 8
    assert stats["mse"] == noise / 8
    assert stats["rmse"] == pytest.approx(math.sqrt(noise / 8))
    assert stats["relative_error"] == pytest.approx(math.sqrt(noise / power))
    assert stats["sqnr_db"] == pytest.approx(10 * math.log10(power / noise))
    assert stats["cosine"] == pytest.approx((16 + 9 + 42 + 0.25 + 5) / math.sqrt(power * (16 + 9 + 36 + 0.25 + 4)))
    assert (stats["max_abs_error"], stats["max_rel_error"], stats["bias"]) == (1, 1, (1 + 0.5 - 0.125) / 8)
    assert stats["code_histogram"].tolist() == [3, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert stats["scale_exponent_histogram"] == {0: 1}
    np.testing.assert_array_equal(stats["block_error_energy"], [[noise], [np.nan]])
    np.testing.assert_array_equal(stats["block_sqnr_db"], [[stats["sqnr_db"]], [np.nan]])
    np.testing.assert_array_equal(stats["block_dynamic_range"], [[np.log2(7 / 0.125)], [np.nan]])


def test_statistics_of_nothing() -> None:
    for x in (np.zeros((2, 32), dtype=np.float32), np.full((1, 32), np.nan, dtype=np.float32)):
        stats = oracle.statistics(x, oracle.quantize(x, element="e4m3"))
        assert (stats["mse"], stats["relative_error"], stats["cosine"], stats["binades_used"]) == (0, 0, 1, 0)
        assert stats["sqnr_db"] == math.inf
        assert np.isnan(stats["block_sqnr_db"]).all()


def test_binades_used_when_the_two_largest_values_are_out_of_reach() -> None:
    """The NVFP4 paper's example (appendix B.4): amax just above 3 rounds the scale up to 1."""
    x = np.zeros((2, 32), dtype=np.float32)
    x[0, 0] = 3.0625
    stats = oracle.statistics(x, oracle.quantize(x, element="e2m1", rule="rceil"))
    assert stats["binades_used"] == pytest.approx(math.log2(3 / 0.5))
    assert stats["binades_available"] == pytest.approx(math.log2(6 / 0.5))


def test_scale_underflow_is_distinguished() -> None:
    x = np.ones((1, 48), dtype=np.float32)
    x[0, 16:32], x[0, 33:] = 1e-7, 1e-4
    stats = oracle.statistics(x, nvfp4(x))
    assert (stats["scale_underflowed_blocks"], stats["underflowed"], stats["saturated"]) == (1, 15, 16)
    large = x[:, :16] * 3000
    clamped = oracle.statistics(large, nvfp4(large, tensor_scale=False))
    assert (clamped["scale_underflowed_blocks"], clamped["saturated_blocks"]) == (1, 1)
    assert oracle.statistics(large, nvfp4(large))["scale_underflowed_blocks"] == 0


def test_statistics_of_an_overflowing_reconstruction_are_infinite() -> None:
    x = np.full((1, 32), oracle.FLT_MAX) * float32(1, -1).repeat(16)
    stats = oracle.statistics(x, oracle.quantize(x, element="e2m1"))
    assert (stats["mse"], stats["sqnr_db"]) == (math.inf, -math.inf)
    assert math.isnan(stats["bias"])
