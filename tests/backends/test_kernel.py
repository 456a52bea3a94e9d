"""The CPU kernel equals the oracle, bit for bit: all formats, scale rules, element roundings and source types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import oracle
import pytest
from kernel_oracle import (
    CHANNELS,
    DTYPES,
    SPELLED,
    assert_equals_oracle,
    default_rules,
    format_rules,
    kernel,
    scheme_of,
    stats_of,
)
from kernel_samples import SAMPLES, log_uniform, normal
from slow_cases import slow_except

from mxcli.backends import cpu
from mxcli.errors import UsageError
from mxcli.numerics.dialects import DIALECTS
from mxcli.numerics.formats import FORMATS, find_format
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import scale_rules

SLOW_TIES = ("subnormal", "ties", "mostly zero", "zero")
"""Samples with near-ties between candidate scales, which the oracle decides with exact fractions."""


def samples(name: str, rule: str, chosen: Sequence[str] = tuple(SAMPLES)) -> list[str]:
    """Return those of the samples on which the rule can be compared with the oracle.

    For rule `best`: over a block of many decades errors differ by less than binary64 resolves, and over a large block
    exact fractions take seconds.
    """
    if rule != "best":
        return list(chosen)
    rows, columns = find_format(name).block
    large = rows is None or rows * (columns or 1) > 1024
    return [sample for sample in chosen if sample != "wide range" and not (large and sample in SLOW_TIES)]


NAMED = format_rules(tuple(FORMATS))
OTHER_SPELLED = format_rules((*SPELLED, *CHANNELS))


@pytest.mark.parametrize(("name", "rule"), [*NAMED, *OTHER_SPELLED])
def test_every_format_and_rule(name: str, rule: str) -> None:
    for sample in samples(name, rule):
        assert_equals_oracle(SAMPLES[sample], scheme_of(name, rule))


@pytest.mark.parametrize(("name", "rule"), slow_except(default_rules(), NAMED))
def test_every_rounding(name: str, rule: str) -> None:
    for rounding in ELEMENT_ROUNDINGS:
        for sample in samples(name, rule):
            assert_equals_oracle(SAMPLES[sample], scheme_of(name, rule, rounding=rounding))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), OTHER_SPELLED)
def test_another_rounding_of_spelled_formats(name: str, rule: str) -> None:
    for sample in samples(name, rule):
        assert_equals_oracle(SAMPLES[sample], scheme_of(name, rule, rounding="half-away"))


@pytest.mark.parametrize(("name", "rule"), slow_except(default_rules(), NAMED))
def test_every_source_type(name: str, rule: str) -> None:
    scheme = scheme_of(name, rule)
    for dtype in ("BF16", "F16", "F64"):
        for sample in samples(name, rule, ("normal", "wide range", "rows of every size", "nonfinite")):
            with np.errstate(over="ignore"):
                assert_equals_oracle(SAMPLES[sample].astype(DTYPES[dtype]), scheme)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_all_values_of_16_bit_types(dtype: str) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype]).reshape(-1, 4)
    for name in ("e5m2:e8m0:1x4", "e4m3:fp32:1x4"):
        assert_equals_oracle(every, scheme_of(name))


def test_binary64_is_rounded_to_binary32_first() -> None:
    """1 + 2^-4 + 2^-30 is above a tie of E4M3 in binary64 and exactly on it in binary32."""
    x = np.array([[1 + 2.0**-4 + 2.0**-30, 1 + 2.0**-4, 448, 1e300]], np.float64)
    codes = cpu.unpack(assert_equals_oracle(x[:, :3], scheme_of("e4m3:e8m0:1x4")))
    assert codes.tolist() == [[0x38, 0x38, 0x7E]]
    assert_equals_oracle(x, scheme_of("e4m3:e8m0:1x4"))


@pytest.mark.parametrize(("name", "rule"), NAMED)
def test_nan_block_policy(name: str, rule: str) -> None:
    assert_equals_oracle(SAMPLES["nonfinite"], scheme_of(name, rule, nonfinite="nan-block"))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_dialect(dialect: str, name: str) -> None:
    try:
        scheme = scheme_of(name, dialect=dialect)
    except UsageError as refusal:
        assert any(words in str(refusal) for words in ("has no rule for", "does not serve"))  # noqa: PT017
        return
    lowest = scheme.choice.min_exponent
    for sample in SAMPLES:
        if lowest == -127 or sample in ("normal", "nonfinite", "ties"):
            assert_equals_oracle(SAMPLES[sample], scheme)


@pytest.mark.parametrize("rule", oracle.RECIPES)
@pytest.mark.parametrize("scale", ["e4m3", "e5m2"])
def test_tensors_from_the_smallest_to_the_largest(rule: str, scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor amax over the range of binary32, block amax down to 2^-24 of it, and zeros.

    If amax is so small that vLLM's 1 / amax * 2688 is infinite, its reference turns zero blocks into NaN.
    """
    monkeypatch.setattr(oracle, "E4M3", oracle.element_format(scale))  # the oracle's narrow scale format
    lowest = {"e4m3": -116, "e5m2": -109}[scale] if rule == "vllm" else -149
    for exponent in (*range(lowest, -90), *range(-90, 128, 8)):
        x = np.ldexp(log_uniform(-7, 0, 6, 32, seed=exponent + 200), exponent).astype(np.float32)
        x[1, ::3], x[2, :16], x[4:] = 0, 0, np.ldexp(x[4:], -17)
        x[5, ::2] = 0
        assert_equals_oracle(x + np.float32(0), scheme_of(f"e2m1:{scale}:1x16:fp32", rule))  # no -0.0


@pytest.mark.parametrize(("name", "rule"), NAMED)
def test_finite_data_never_becomes_nan(name: str, rule: str) -> None:
    for exponent in (-149, -140, -133, -127, -120, -116, 0, 120):
        x = np.ldexp(normal(4, 64), exponent).astype(np.float32)
        x[1:3], x[3, ::2] = 0, 0
        q = kernel(x, scheme_of(name, rule))
        assert stats_of(q).nan_blocks == 0
        assert np.isfinite(q.scales).all()
        assert np.isfinite(cpu.dequantize(q)).all()


@pytest.mark.parametrize("rule", oracle.RECIPES)
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_2d", "int8:e4m3:1x32:fp32"])
def test_shared_tensor_scale(rule: str, name: str) -> None:
    if rule not in scale_rules(find_format(name)):
        return
    for amax in (0.0, 0.25, 4.0, 1000.0):
        assert_equals_oracle(normal(33, 70), scheme_of(name, rule), tensor_amax=amax)


@pytest.mark.parametrize("name", [*FORMATS, *SPELLED])
def test_dequantized_types(name: str) -> None:
    x = np.concatenate([SAMPLES["normal"], SAMPLES["wide range"], SAMPLES["nonfinite"][:3]])
    q = assert_equals_oracle(x, scheme_of(name))
    y = cpu.dequantize(q)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(cpu.dequantize(q, "F64"), y.astype(np.float64), strict=True)
        np.testing.assert_array_equal(cpu.dequantize(q, "F16"), y.astype(np.float16), strict=True)
        bfloat16 = cpu.dequantize(q, "BF16").view(DTYPES["BF16"])
        np.testing.assert_array_equal(bfloat16.astype(np.float32), y.astype(DTYPES["BF16"]).astype(np.float32))


def test_unsupported_types() -> None:
    with pytest.raises(UsageError, match="type F8_E4M3 is not one the kernel reads: F32, BF16, F16, F64"):
        cpu.quantize(np.zeros(4, np.uint8), "F8_E4M3", scheme_of("mxfp8"))
    q = assert_equals_oracle(normal(2, 32), scheme_of("mxfp8"))
    with pytest.raises(UsageError, match="dequantized type I8 is not"):
        cpu.dequantize(q, "I8")
    with pytest.raises(UsageError, match="--threads 0 is not a positive number"):
        cpu.dequantize(q, threads=0)
