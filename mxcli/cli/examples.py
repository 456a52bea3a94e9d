"""Worked examples for `mxcli explain`, computed by the kernel each time they are shown."""

from __future__ import annotations

import numpy as np

from mxcli.backends import cpu
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.floats import E8M0
from mxcli.numerics.formats import FORMATS, BlockFormat
from mxcli.numerics.hadamard import Transform, find_hadamard
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES, MantissaScaleRule
from mxcli.numerics.metric_formulas import Measurement
from mxcli.numerics.metrics import Metric
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, ElementRounding, PowerOfTwoScaleRule
from mxcli.numerics.scheme import Rules, resolve, scale_rules
from mxcli.output.explanation import Row
from mxcli.output.numbers import decimal, power_of_two
from mxcli.output.screen import Screen
from mxcli.output.table import Column, aligned

_FULL = Screen()
_AMAXES = (150.0, 957.0)
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MIXED = (957.0, 150.0, -3.0, 0.001)
_OUTLIER = (8.0, 0.3, -0.5, 0.2, 0.6, -0.3, 0.4, 0.7, -0.2, 0.5, 0.1, -0.6, 0.3, 0.8, -0.4, 0.2)
_NARROW_BLOCK, _NARROW_TENSOR_AMAX = (5.0, -3.1, 0.7, 0.02), 12.0


def worked_example(row: Row) -> list[str]:
    """Return lines that show the row at work; none for rows without an example."""
    if isinstance(row, PowerOfTwoScaleRule):
        return _scale_rules(row)
    if isinstance(row, MantissaScaleRule):
        return _binary32_rules(row) if row.scale == "fp32" else _narrow_rules(row)
    if isinstance(row, ElementRounding):
        return _roundings(row)
    if isinstance(row, Transform):
        return _transform()
    if isinstance(row, Metric):
        return _metric(row)
    return _block(row) if isinstance(row, BlockFormat) else []


def _scale_rules(shown: PowerOfTwoScaleRule) -> list[str]:
    fmt = FORMATS["mxfp8_e4m3"]
    lines: list[str] = []
    for amax in _AMAXES:
        rows = []
        for name in scale_rules(fmt):
            q, values = _quantized((amax,), fmt, scale_rounding=name)
            byte = int(q.scales[0, 0])
            saturated = "yes" if q.stats and q.stats.saturated else "no"
            rows.append(
                [
                    _marked(name, shown.name),
                    f"{byte}",
                    power_of_two(E8M0.value(byte)),
                    decimal(values[0]),
                    saturated,
                ]
            )
        columns = [
            Column("rule", right=False),
            Column("scale byte"),
            Column("scale"),
            Column("amax becomes"),
            Column("saturated"),
        ]
        headline = f"Example: a block of {fmt.name} (element max {decimal(fmt.element.max)}) with amax {decimal(amax)}"
        lines += ["", *_titled(headline, columns, rows)]
    return lines[1:]


def _narrow_rules(shown: MantissaScaleRule) -> list[str]:
    fmt = FORMATS["nvfp4"]
    rows = []
    for name in _mantissa_rules(shown):
        q, values = _quantized(_NARROW_BLOCK, fmt, scale_rounding=name, tensor_amax=_NARROW_TENSOR_AMAX)
        code = int(q.scales[0, 0])
        scale = f"0x{code:02x} = {decimal(fmt.scale.value(code))}"
        rows.append([_marked(name, shown.name), decimal(q.tensor_scale or 1.0), scale, *map(decimal, values)])
    columns = [
        Column("recipe", right=False),
        Column("tensor scale"),
        Column("block scale"),
        *map(_value_column, _NARROW_BLOCK),
    ]
    return _titled(
        f"Example: a block of {fmt.name} in a tensor with amax {decimal(_NARROW_TENSOR_AMAX)}", columns, rows
    )


def _binary32_rules(shown: MantissaScaleRule) -> list[str]:
    fmt = FORMATS["fp8_e4m3"]
    rows = []
    for name in _mantissa_rules(shown):
        q, values = _quantized(_MIXED, fmt, scale_rounding=name)
        rows.append([_marked(name, shown.name), decimal(float(q.scales[0, 0])), *map(decimal, values)])
    columns = [Column("recipe", right=False), Column("scale"), *map(_value_column, _MIXED)]
    return _titled(f"Example: a tensor in {fmt.name}", columns, rows)


def _roundings(shown: ElementRounding) -> list[str]:
    fmt = FORMATS["mxfp4_e2m1"]
    rows = []
    for name in ELEMENT_ROUNDINGS:
        _, values = _quantized((*_TIES, fmt.element.max), fmt, rounding=name)
        rows.append([_marked(name, shown.name), *map(decimal, values[: len(_TIES)])])
    columns = [Column("rounding", right=False), *map(_value_column, _TIES)]
    return _titled(f"Example: values halfway between two codes of {fmt.element.name}, with scale 1", columns, rows)


def _transform() -> list[str]:
    """Show one large value among small ones, with and without the transform."""
    fmt, rows = FORMATS["nvfp4"], []
    for what, hadamard in (("no transform", None), ("hadamard-16", find_hadamard(16))):
        x = np.array([[*_OUTLIER]], np.float32)
        q = cpu.quantize(x, "F32", resolve(fmt, Rules(hadamard=hadamard)), threads=1)
        assert q.stats is not None
        rows.append([what, *map(decimal, cpu.dequantize(q)[0, :5].tolist()), str(q.stats.underflowed)])
    columns = [Column("", right=False), *map(_value_column, _OUTLIER[:5]), Column("underflowed\nof 16")]
    return _titled(f"Example: a block of {fmt.name}, its first five values", columns, rows)


def _block(fmt: BlockFormat) -> list[str]:
    q, values = _quantized(_MIXED, fmt)
    scale = float(q.scales[0, 0]) if fmt.scale.bits == 32 else fmt.scale.value(int(q.scales[0, 0]))
    tensor = f", tensor scale {decimal(q.tensor_scale)}" if q.tensor_scale is not None else ""
    lines = _titled(
        f"Example: a block with {q.scheme.scale_rule.name}",
        [*map(_value_column, _MIXED)],
        [[*map(decimal, values)]],
    )
    return [*lines, f"  scale {power_of_two(scale)}{tensor}"]


def _metric(metric: Metric) -> list[str]:
    fmt = FORMATS["mxfp8_e4m3"]
    q, _ = _quantized(_MIXED, fmt, scale_rounding="floor")
    assert q.stats is not None
    value = metric.of(Measurement(q.stats, fmt, q.shape))
    shown = ", ".join(decimal(x) for x in _MIXED)
    return [
        f"Example: a block of {fmt.name} holding {shown} and {q.shape[1] - len(_MIXED)} zeros, scale rounding floor:",
        f"  {metric.name} = {'absent' if value is None else decimal(value) if isinstance(value, float) else value}",
    ]


def _quantized(
    values: tuple[float, ...],
    fmt: BlockFormat,
    *,
    tensor_amax: float | None = None,
    scale_rounding: str | None = None,
    rounding: str | None = None,
) -> tuple[Quantized, list[float]]:
    """Quantize a block of the values followed by zeros; return it and the decoded values."""
    rows, columns = fmt.block
    x = np.zeros((rows or 1, columns or 32), np.float32)
    x[0, : len(values)] = values
    scheme = resolve(fmt, Rules(scale_rounding=scale_rounding, rounding=rounding))
    q = cpu.quantize(x, "F32", scheme, tensor_amax=tensor_amax, threads=1)
    return q, [float(y) for y in cpu.dequantize(q, threads=1)[0, : len(values)]]


def _mantissa_rules(shown: MantissaScaleRule) -> list[str]:
    return [rule.name for rule in MANTISSA_SCALE_RULES.values() if rule.scale == shown.scale]


def _marked(name: str, shown: str) -> str:
    return f"{'>' if name == shown else ' '} {name}"


def _value_column(value: float) -> Column:
    return Column(decimal(value))


def _titled(headline: str, columns: list[Column], rows: list[list[str]]) -> list[str]:
    return [
        f"{headline}, as the kernel computes it:",
        *(f"  {line}" for line in aligned(columns, rows, _FULL)),
    ]
