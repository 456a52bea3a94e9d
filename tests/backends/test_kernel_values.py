"""The CPU kernel against literal values: thresholds, codes, and bugs of other tools."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from kernel_oracle import kernel, scheme_of, stats_of

from mxcli.backends import cpu
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import ELEMENTS
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.metrics import measured
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES
from mxcli.numerics.scheme import scale_rules

F32 = npt.NDArray[np.float32]

# Scale bytes of an amax in [1, 2), below and from a fraction on: {rule: (fraction, byte below, byte from it on)}.
NEVER = 0x800000  # the next power of two
THRESHOLDS: dict[str, dict[str, tuple[int, int, int]]] = {
    "e4m3": {
        "floor": (NEVER, 119, 120),
        "ceil": (1, 119, 120),
        "rceil": (0x600001, 119, 120),
        "even": (0x780000, 119, 120),
        "nearest": (0x280000, 118, 119),
        "ct-even1": (0x600000, 119, 120),
    },
    "e5m2": {
        "floor": (NEVER, 112, 113),
        "ceil": (1, 112, 113),
        "rceil": (0x600001, 112, 113),
        "even": (0x700000, 112, 113),
        "nearest": (0x280000, 111, 112),
        "ct-even1": (0x600000, 112, 113),
    },
    "e2m3": {
        "floor": (NEVER, 125, 126),
        "ceil": (1, 125, 126),
        "rceil": (0x700001, 125, 126),
        "even": (0x780000, 125, 126),
        "nearest": (0x340000, 124, 125),
        "ct-even1": (0x600000, 125, 126),
    },
    "e3m2": {
        "floor": (NEVER, 123, 124),
        "ceil": (1, 123, 124),
        "rceil": (0x600001, 123, 124),
        "even": (0x700000, 123, 124),
        "nearest": (0x280000, 122, 123),
        "ct-even1": (0x600000, 123, 124),
    },
    "e2m1": {
        "floor": (NEVER, 125, 126),
        "ceil": (1, 125, 126),
        "rceil": (0x400001, 125, 126),
        "even": (0x600000, 125, 126),
        "nearest": (0x100000, 124, 125),
        "ct-even1": (0x600000, 125, 126),
    },
    "int8": {
        "floor": (NEVER, 127, 128),
        "ceil": (1, 127, 128),
        "rceil": (0x7E0001, 127, 128),
        "nearest": (0x3E8000, 126, 127),
        "ct-even1": (0x600000, 127, 128),
    },
    "int6": {
        "floor": (NEVER, 127, 128),
        "ceil": (1, 127, 128),
        "rceil": (0x780001, 127, 128),
        "nearest": (0x3A0000, 126, 127),
        "ct-even1": (0x600000, 127, 128),
    },
    "int4": {
        "floor": (NEVER, 127, 128),
        "ceil": (1, 127, 128),
        "rceil": (0x600001, 127, 128),
        "nearest": (0x280000, 126, 127),
        "ct-even1": (0x600000, 127, 128),
    },
}


def quantized(values: list[float], name: str, rule: str | None = None, **choices: str) -> Quantized:
    """Quantize one row."""
    return kernel(np.array([values], np.float32), scheme_of(name, rule, **choices))


def floats(bits: list[int]) -> F32:
    return np.array(bits, np.uint32).view(np.float32)


# --- Scales ------------------------------------------------------------------------------------------------


def test_thresholds_cover_all_elements_and_rules() -> None:
    wanted = {
        (element.name, rule.name)
        for element in ELEMENTS.values()
        for rule in POWER_OF_TWO_SCALE_RULES.values()
        if rule.serves(element) and not rule.candidates
    }
    assert wanted == {(element, rule) for element, rules in THRESHOLDS.items() for rule in rules}


@pytest.mark.parametrize("element", THRESHOLDS)
def test_scales_below_at_and_above_every_threshold(element: str) -> None:
    for rule, (fraction, below, above) in THRESHOLDS[element].items():
        for exponent in (-90, -1, 0, 1, 77):
            start = (127 + exponent) << 23
            amax = floats([start + max(fraction - 1, 0), start + fraction, start + fraction + 1])
            scales = kernel(amax.reshape(3, 1), scheme_of(f"{element}:e8m0:1x32", rule)).scales[:, 0]
            expected = [below, above, above]
            assert (scales.astype(int) - exponent).tolist() == expected, (rule, exponent)


@pytest.mark.parametrize("element", THRESHOLDS)
def test_binary32_scales_hold_the_same_powers_of_two(element: str) -> None:
    for rule, (fraction, below, above) in THRESHOLDS[element].items():
        start = 127 << 23
        amax = floats([start + max(fraction - 1, 0), start + fraction])
        scales = kernel(amax.reshape(2, 1), scheme_of(f"{element}:fp32:1x32", rule)).scales[:, 0]
        assert scales.tolist() == [2.0 ** (below - 127), 2.0 ** (above - 127)], rule


def test_floor_ceil_and_rceil_of_amax_150_in_e4m3() -> None:
    scales = {rule: int(quantized([150.0], "mxfp8_e4m3", rule).scales[0, 0]) for rule in ("floor", "rceil", "ceil")}
    assert scales == {"floor": 126, "rceil": 126, "ceil": 127}


def test_floor_clips_957_to_896_and_rceil_clips_nothing() -> None:
    q = quantized([957.0], "mxfp8_e4m3", "floor")
    assert cpu.dequantize(q).tolist() == [[896.0]]
    assert (stats_of(q).saturated, stats_of(q).max_abs_error) == (1, 61.0)
    q = quantized([957.0], "mxfp8_e4m3", "rceil")
    assert cpu.dequantize(q).tolist() == [[960.0]]
    assert stats_of(q).saturated == 0


@pytest.mark.parametrize(
    ("rule", "scales"),
    [  # of amax 2^-149, 2^-126, the largest subnormal, FLT_MAX
        ("floor", [0, 0, 0, 246]),
        ("ceil", [0, 0, 0, 247]),
        ("rceil", [0, 0, 0, 247]),
        ("even", [0, 0, 0, 247]),
        ("nearest", [0, 0, 0, 246]),
        ("ct-even1", [0, 0, 0, 247]),
        ("best", [0, 0, 0, 246]),
    ],
)
def test_scales_at_the_ends_of_binary32(rule: str, scales: list[int]) -> None:
    amax = floats([0x00000001, 0x00800000, 0x007FFFFF, 0x7F7FFFFF]).reshape(4, 1)
    assert kernel(amax, scheme_of("mxfp8_e4m3", rule)).scales[:, 0].tolist() == scales


@pytest.mark.parametrize("rule", POWER_OF_TWO_SCALE_RULES)
def test_a_zero_block_has_scale_byte_0(rule: str) -> None:
    for name, element in ELEMENTS.items():
        if not POWER_OF_TWO_SCALE_RULES[rule].serves(element):
            continue
        q = quantized([0.0] * 31 + [-0.0], f"{name}:e8m0:1x32", rule)
        negative_zero = 0 if element.twos_complement else 1 << (element.bits - 1)
        assert (q.scales.tolist(), cpu.unpack(q).tolist()) == ([[0]], [[0] * 31 + [negative_zero]]), name


def test_best_breaks_ties_upward() -> None:
    assert quantized([4.0, -2.0], "mxfp4", "best").scales.tolist() == [[128]]
    assert quantized([5.0, 1.5], "mxfp4", "best").scales.tolist() == [[127]]


def test_best_clips_cheap_outliers() -> None:
    values = [7.0] + [0.5] * 31
    assert quantized(values, "mxfp4", "best").scales.tolist() == [[127]]
    assert quantized(values, "mxfp4", "rceil").scales.tolist() == [[128]]


def test_quark_never_goes_below_2_to_the_minus_126() -> None:
    for values in ([0.0, -0.0], [1e-40], [2.0**-126]):
        assert quantized(values, "mxfp4", dialect="quark").scales.tolist() == [[1]]
    assert cpu.unpack(quantized([4.0, -0.0, -0.1], "mxfp4", dialect="quark")).tolist() == [[6, 0, 0]]


def test_modelopt_signs_the_code_of_zero_only_where_the_input_is_zero() -> None:
    codes = cpu.unpack(quantized([4.0, 0.0, -0.0, 0.01, -0.01, 0.25], "mxfp4", dialect="modelopt"))
    assert codes.tolist() == [[6, 8, 8, 0, 8, 0]]


def test_binary32_scales() -> None:
    values = {"amax": 3.0 / 448, "amax-bf16": 219 * 2.0**-15, "vllm-min": 3.0 / 448}
    for rule, scale in values.items():
        assert quantized([3.0], "fp8_e4m3", rule).scales.tolist() == [[np.float32(scale)]]
    smallest = float(np.float32(1 / (448 * 512)))
    zero = {
        "amax": 1.0, "amax-eps": 2.0**-23, "amax-bf16": 2.0**-7, "amax-bf16-quotient": 1.0, "vllm-min": smallest,
        "encode": 1.0, "encode-reciprocal": 1.0,
    }  # fmt: skip
    for rule, scale in zero.items():
        assert quantized([0.0], "fp8_e4m3", rule).scales.tolist() == [[scale]]


def test_a_number_over_a_tensor_is_its_reciprocal_times_the_number_in_pytorch() -> None:
    scales = {rule: quantized([0.984375], "fp8_e4m3", rule).scales.tolist() for rule in ("encode", "encode-reciprocal")}
    assert scales == {"encode": [[9437184 * 2.0**-32]], "encode-reciprocal": [[9437183 * 2.0**-32]]}


def test_a_scale_that_bfloat16_rounds_to_zero_counts_as_zero() -> None:
    """compressed-tensors replaces scales that are 0 after rounding, which avoids division by 0."""
    q = quantized([1e-38, 0.0], "fp8_e4m3", "amax-bf16")
    assert (q.scales.tolist(), cpu.unpack(q).tolist()) == ([[2.0**-7]], [[0, 0]])


def test_nvfp4_scales() -> None:
    """T = 6: the tensor scale is 6 / 2688, a block with amax 6 has scale 448, one with amax 3 has 224."""
    q = quantized([6.0] + [0.0] * 15 + [-3.0, 0.5] + [0.0] * 14, "nvfp4")
    assert q.scales.tolist() == [[0x7E, 0x76]]
    assert (q.tensor_scale, q.tensor_encode) == (float(np.float32(1 / 448)), 448.0)
    assert cpu.unpack(q)[0, [0, 16, 17]].tolist() == [0x7, 0xF, 0x2]


# --- Elements ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ELEMENTS)
def test_codes_round_trip(name: str) -> None:
    """With all roundings; the second column sets the block's scale to 1. Two's complement never produces -2."""
    element = ELEMENTS[name]
    codes = np.arange(2**element.bits, dtype=np.uint8)
    values = np.array([element.value(int(code)) for code in codes], np.float32)
    produced = np.abs(values) <= element.max
    for rounding in ELEMENT_ROUNDINGS:
        x = np.stack([values[produced], np.full(produced.sum(), element.max, np.float32)], axis=1)
        q = kernel(x, scheme_of(f"{name}:e8m0:1x32", "floor", rounding=rounding))
        assert (q.scales == 127).all()
        np.testing.assert_array_equal(cpu.unpack(q)[:, 0], codes[produced])
        np.testing.assert_array_equal(cpu.dequantize(q)[:, 0], values[produced])
        assert stats_of(q).noise == 0


@pytest.mark.parametrize(
    ("name", "values", "codes"),
    [
        ("e4m3", [448, 464, 465, 480, -500, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9], [126, 126, 126, 126, 254, 1, 0, 2]),
        ("e5m2", [57344, 61440, 65535, -65535, 2.0**-16, 2.0**-17], [0x7B, 0x7B, 0x7B, 0xFB, 1, 0]),
        ("e2m3", [7.5, 7.75, 7.99, -7.99, 0.125, 0.0625], [0x1F, 0x1F, 0x1F, 0x3F, 1, 0]),
        ("e3m2", [28, 30, 31.9, -31.9, 0.0625, 0.03125], [0x1F, 0x1F, 0x1F, 0x3F, 1, 0]),
        (
            "e2m1",
            [6, 7, 7.99, -7, 0.5, 0.25, 0.25000006, 0.75, 1.25, 2.5, 3.5, 5],
            [7, 7, 7, 15, 1, 0, 1, 2, 2, 4, 6, 6],
        ),
        ("int8", [127 / 64, 1.999, -1.999, 1 / 64, 1 / 128, -3 / 128], [0x7F, 0x7F, 0x81, 1, 0, 0xFE]),
        ("int6", [31 / 16, 1.999, -1.999, 1 / 16, 1 / 32, -3 / 32], [0x1F, 0x1F, 0x21, 1, 0, 0x3E]),
        ("int4", [1.75, 1.99, -1.99, 0.25, 0.125, -0.375], [7, 7, 9, 1, 0, 0xE]),
    ],
)
def test_elements_are_rounded_to_even_and_saturate(name: str, values: list[float], codes: list[int]) -> None:
    """In E4M3, 464 is halfway to 480, and values above it saturate instead of becoming NaN. The scale is 1."""
    x = np.array([[value, ELEMENTS[name].max] for value in values], np.float32)
    q = kernel(x, scheme_of(f"{name}:e8m0:1x32", "floor"))
    assert (q.scales == 127).all()
    assert cpu.unpack(q)[:, 0].tolist() == codes


def test_element_roundings_of_ties() -> None:
    values = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 0.24, 6.0]
    codes = {
        "nearest-even": [0, 2, 2, 4, 4, 6, 6, 7, 0, 7],
        "half-away": [1, 2, 3, 4, 5, 6, 7, 7, 0, 7],
        "half-toward-zero": [0, 1, 2, 3, 4, 5, 6, 7, 0, 7],
        "toward-zero": [0, 1, 2, 3, 4, 5, 6, 6, 0, 7],
        "stochastic": [1, 1, 2, 3, 4, 6, 6, 7, 1, 7],
    }
    assert codes.keys() == ELEMENT_ROUNDINGS.keys()
    for rounding, expected in codes.items():
        assert cpu.unpack(quantized(values, "mxfp4", rounding=rounding)).tolist() == [expected]
        negative = quantized([-v for v in values], "mxfp4", rounding=rounding)
        assert cpu.unpack(negative).tolist() == [[8 + code for code in expected]]


def test_element_0_is_in_the_low_nibble() -> None:
    assert quantized([0.5, 1.0, 0.0, 6.0], "mxfp4").packed.tolist() == [[0x21, 0x70]]
    assert quantized([0.5, 1.0, 6.0], "mxfp4").packed.tolist() == [[0x21, 0x07]]


def test_four_6_bit_codes_share_three_bytes() -> None:
    """Codes 1, 2, 3 and 0x1F: bits 0..5, 6..11, 12..17 and 18..23 of a little-endian word."""
    word = 1 | 2 << 6 | 3 << 12 | 0x1F << 18
    assert quantized([0.125, 0.25, 0.375, 7.5], "mxfp6_e2m3").packed.tolist() == [list(word.to_bytes(3, "little"))]
    assert quantized([7.5], "mxfp6_e2m3").packed.tolist() == [[0x1F, 0, 0]]


# --- Zero, NaN and infinity --------------------------------------------------------------------------------


def every_rule() -> list[tuple[str, str]]:
    return [(name, rule) for name, row in FORMATS.items() for rule in scale_rules(row)]


@pytest.mark.parametrize(("name", "rule"), every_rule())
def test_a_zero_tensor_has_finite_scales_and_no_error(name: str, rule: str) -> None:
    q = kernel(np.zeros((16, 32), np.float32), scheme_of(name, rule))
    assert not (cpu.unpack(q) & 0x7F).any()
    assert not cpu.dequantize(q).any()
    assert np.isfinite(q.scales).all()
    assert (stats_of(q).zero_blocks, stats_of(q).nan_blocks, stats_of(q).underflowed) == (stats_of(q).blocks, 0, 0)
    assert (stats_of(q).noise, stats_of(q).signal, stats_of(q).max_rel_error) == (0, 0, 0)
    assert q.tensor_scale is None or math.isfinite(q.tensor_scale)
    metrics = measured(stats_of(q), q.format, q.shape)
    assert (metrics["sqnr_db"], metrics["relative_error"], metrics["mse"]) == (None, None, 0)


ZERO_BLOCK = dict.fromkeys(scale_rules(FORMATS["nvfp4"]), 0) | {
    "torchao": 0x08,
    "modelopt": 0x38,
    "ct": 0x20,
    "ct-bf16": 0x20,
}


@pytest.mark.parametrize("rule", scale_rules(FORMATS["nvfp4"]))
def test_a_zero_block_among_others(rule: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32)
    x[0, 16:] = 0
    q = kernel(x, scheme_of("nvfp4", rule))
    assert q.scales[0, 1] == ZERO_BLOCK[rule]
    assert not cpu.unpack(q)[0, 16:].any()
    assert not cpu.dequantize(q)[0, 16:].any()
    assert (q.scales != 0x7F).all()


@pytest.mark.parametrize(
    ("name", "scale"), [("mxfp8_e4m3", 0xFF), ("mxfp4_e2m1", 0xFF), ("mxint8", 0xFF), ("nvfp4", 0x7F)]
)
def test_nan_affects_only_its_block(name: str, scale: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 96)).astype(np.float32)
    clean = kernel(x, scheme_of(name))
    x[1, 40] = np.nan
    q = kernel(x, scheme_of(name), tensor_amax=stats_of(clean).amax)
    columns = q.format.block[1] or 1
    hit = 40 // columns
    assert np.argwhere(q.scales == scale).tolist() == [[1, hit]]
    values, others = cpu.dequantize(q), np.ones(x.shape, bool)
    others[1, hit * columns : (hit + 1) * columns] = False
    assert np.isnan(values[~others]).all()
    np.testing.assert_array_equal(values[others], cpu.dequantize(clean)[others])
    assert (stats_of(q).nan, stats_of(q).nan_blocks, stats_of(q).first_nonfinite) == (1, 1, 96 + 40)


def test_infinity_saturates_or_makes_its_block_nan() -> None:
    values = [1.0, np.inf, -np.inf] + [2.0] * 29
    q = quantized(values, "mxfp8_e4m3")
    assert (q.scales.tolist(), cpu.unpack(q)[0, :3].tolist()) == ([[254]], [0, 0x7E, 0xFE])
    assert quantized(values, "mxfp8_e4m3", "floor").scales.tolist() == [[247]]
    q = quantized(values, "mxfp8_e4m3", nonfinite="nan-block")
    assert (q.scales.tolist(), set(cpu.unpack(q)[0].tolist())) == ([[255]], {0x7F})
    assert quantized(values, "mxfp8_e4m3", dialect="microxcaling").scales.tolist() == [[255]]


def test_best_keeps_the_floor_exponent_of_an_infinity() -> None:
    assert quantized([1.0, np.inf], "mxfp8_e4m3", "best").scales.tolist() == [[247]]


@pytest.mark.parametrize("rule", scale_rules(FORMATS["nvfp4"]))
def test_infinities_keep_their_signs(rule: str) -> None:
    """With finite elements, and without, where the tensor's amax is 0."""
    for other in (0.0, 1.0):
        codes = cpu.unpack(quantized([np.inf, -np.inf, other], "nvfp4", rule))
        assert codes[0, :2].tolist() == [0x7, 0xF]


def test_vllm_tensors_below_2688_over_flt_max() -> None:
    q = quantized([1e-39, -1e-39] + [0.0] * 30, "nvfp4", "vllm")
    assert (q.scales != 0x7F).all()
    assert not cpu.dequantize(q).any()


# --- Scales rounded to powers of two -----------------------------------------------------------------------


def test_elements_are_divided_by_the_rounded_scale() -> None:
    """128x128 blocks with power-of-two FP32 scales: half an ulp of E4M3 is at most 2^-4 of a normal element."""
    x = np.random.default_rng(0).uniform(1, 7, (128, 256)).astype(np.float32)
    q = kernel(x, scheme_of("fp8_e4m3_128x128", "ue8m0"))
    assert (np.frexp(q.scales)[0] == 0.5).all()
    assert (q.scales != x.max() / 448).all()
    error = np.abs(cpu.dequantize(q) - x) / x
    assert error.max() <= 2.0**-4
    exact = kernel(x, scheme_of("fp8_e4m3_128x128", "amax"))
    assert stats_of(q).noise < 2 * stats_of(exact).noise
