"""Metrics as rows: what each key of a report means and how it is computed. `mxcli explain` prints these rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mxcli.numerics import metric_formulas as formulas
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.metric_columns import PageColumn, TextColumn
from mxcli.numerics.metric_formulas import Measurement, Value
from mxcli.numerics.stats import Stats

KNOWN, ESTIMATED, OF_SAMPLE = "known", "estimated", "of the sample"
"""Kinds of metrics of a sample: known from lengths alone; a mean or ratio, estimated for the whole tensor; a count, an
extreme or a distribution, which holds for the sample only."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A key of a report: its unit, meaning and formula, how to compute it, and which direction is better.

    `of` returns None where the value does not exist (no elements, no signal, an exact result). `number`: it is one
    number, by which tensors can be ordered, compared and limited, not a histogram or list. `exact` is its limit as the
    error vanishes, if it does not exist without error. `sampled` is its kind where only a sample of the tensor was
    read: KNOWN, ESTIMATED or OF_SAMPLE. `text` and `page` are its columns there, if any; `noise`: its cells say `exact`
    where there is no error.
    """

    name: str
    unit: str
    meaning: str
    formula: str
    of: Callable[[Measurement], Value]
    better: str = "neither"
    source: str = "mxcli"
    number: bool = True
    exact: float | None = None
    sampled: str = OF_SAMPLE
    text: TextColumn | None = None
    page: PageColumn | None = None
    noise: bool = False


_B4 = "Pretraining Large Language Models with NVFP4, appendix B.4"

METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric("elements", "elements", "elements of the tensor", "n", lambda m: m.stats.elements, sampled=KNOWN),
        Metric(
            "blocks", "blocks", "blocks that share a scale", "number of scales", lambda m: m.stats.blocks, sampled=KNOWN
        ),
        Metric(
            "bits_per_element",
            "bits",
            "stored bits of an element, scales included",
            "code bits + (blocks * scale bits + tensor scale bits) / elements",
            formulas.bits_per_element,
            "low",
            sampled=KNOWN,
            text=TextColumn("bits per\nelement"),
        ),
        Metric("amax", "", "largest finite magnitude", "max |x|", lambda m: m.stats.amax, text=TextColumn("amax")),
        Metric(
            "saturated",
            "elements",
            "finite elements whose scaled magnitude exceeded the element's largest value and was clamped",
            "count(|x / scale| > element max)",
            lambda m: m.stats.saturated,
            "low",
        ),
        Metric(
            "saturated_percent",
            "% of elements",
            "share of saturated elements",
            "100 * saturated / elements",
            lambda m: formulas.percent(m.stats.saturated, m.stats.elements),
            "low",
            sampled=ESTIMATED,
            text=TextColumn("saturated\n% of elements", place=3, drop=1),
            page=PageColumn(4, "saturated", "elements", "%", compared="saturated"),
        ),
        Metric(
            "saturated_blocks",
            "blocks",
            "blocks with at least one saturated element",
            "count of blocks",
            lambda m: m.stats.saturated_blocks,
            "low",
        ),
        Metric(
            "saturated_blocks_percent",
            "% of blocks",
            "share of blocks with a saturated element",
            "100 * saturated_blocks / blocks",
            lambda m: formulas.percent(m.stats.saturated_blocks, m.stats.blocks),
            "low",
            sampled=ESTIMATED,
            text=TextColumn("saturated\n% of blocks"),
            page=PageColumn(5, "saturated", "blocks", "%"),
        ),
        Metric(
            "underflowed",
            "elements",
            "elements that are not zero but whose code is",
            "count(x != 0 and code magnitude = 0)",
            lambda m: m.stats.underflowed,
            "low",
        ),
        Metric(
            "underflowed_percent",
            "% of elements",
            "share of underflowed elements",
            "100 * underflowed / elements",
            lambda m: formulas.percent(m.stats.underflowed, m.stats.elements),
            "low",
            sampled=ESTIMATED,
            text=TextColumn("underflowed\n% of elements", place=4, drop=3),
            page=PageColumn(6, "underflowed", "elements", "%", compared="underflowed"),
        ),
        Metric(
            "scale_underflowed_blocks",
            "blocks",
            "blocks lost because the scale itself became zero or was clamped at its format's largest value",
            "count(amax > 0 and (scale = 0 or scale argument > scale max))",
            lambda m: m.stats.scale_underflowed_blocks,
            "low",
        ),
        Metric(
            "subnormal_percent",
            "% of elements",
            "share of elements on the element format's subnormals (none in integer formats)",
            "100 * count(0 < |code value| < smallest normal) / elements",
            formulas.subnormal_percent,
            "low",
            sampled=ESTIMATED,
        ),
        Metric(
            "nonfinite",
            "elements",
            "NaN and infinities met in the input",
            "count(NaN) + count(infinite)",
            lambda m: m.stats.nan + m.stats.infinite,
            "low",
        ),
        Metric(
            "nan_blocks", "blocks", "blocks that became NaN", "count(scale is NaN)", lambda m: m.stats.nan_blocks, "low"
        ),
        Metric("zero_blocks", "blocks", "blocks of zeros only", "count(amax = 0)", lambda m: m.stats.zero_blocks),
        Metric("mse", "", "mean squared error", "mean((y - x)^2)", formulas.mse, "low", sampled=ESTIMATED),
        Metric(
            "rmse",
            "",
            "root of the mean squared error",
            "sqrt(mse)",
            lambda m: formulas.root(formulas.mse(m)),
            "low",
            sampled=ESTIMATED,
        ),
        Metric(
            "sqnr_db",
            "dB",
            "signal to quantization noise; absent when there is no noise (exact) or no signal",
            "10 log10(sum x^2 / sum (y - x)^2)",
            formulas.sqnr_db,
            "high",
            exact=math.inf,
            sampled=ESTIMATED,
            text=TextColumn("SQNR\ndB", place=1),
            page=PageColumn(1, "error", "SQNR", "dB", compared="SQNR"),
            noise=True,
        ),
        Metric(
            "relative_error",
            "",
            "error norm over signal norm",
            "||y - x|| / ||x||",
            formulas.relative_error,
            "low",
            exact=0.0,
            sampled=ESTIMATED,
            text=TextColumn("relative\nerror", place=2, drop=2),
            page=PageColumn(3, "error", "relative"),
            noise=True,
        ),
        Metric(
            "cosine",
            "",
            "cosine between input and output",
            "x . y / (||x|| ||y||)",
            formulas.cosine,
            "high",
            exact=1.0,
            sampled=ESTIMATED,
        ),
        Metric(
            "max_abs_error", "", "largest error of an element", "max |y - x|", lambda m: m.stats.max_abs_error, "low"
        ),
        Metric(
            "max_rel_error",
            "",
            "largest error of a nonzero element relative to it (1 where one underflowed)",
            "max |y - x| / |x|",
            lambda m: m.stats.max_rel_error,
            "low",
        ),
        Metric(
            "bias",
            "",
            "mean error; a block's terms are added in binary32, so that about six digits remain where they cancel",
            "mean(y - x)",
            lambda m: m.stats.error / m.stats.measured if m.stats.measured else None,
            sampled=ESTIMATED,
            text=TextColumn("bias"),
        ),
        Metric(
            "shrunk_percent",
            "% of length",
            "relative shrinkage of the output along the input: a bias that the mean error, in which signs cancel, "
            "hides; rounding to the nearest shortens, stochastic rounding does not, and what saturates does under "
            "either",
            "-100 * sum x (y - x) / sum x^2",
            lambda m: formulas.percent(0.0 - m.stats.cross, m.stats.signal),
            exact=0.0,
            sampled=ESTIMATED,
            text=TextColumn("shrunk\n%"),
        ),
        Metric(
            "binades_available",
            "binades",
            "binades the element format can represent",
            "log2(element max / smallest positive)",
            lambda m: m.format.element.binades,
            source="Recipes for Pre-training LLMs with MXFP8, table 1",
            sampled=KNOWN,
        ),
        Metric(
            "binades_used",
            "binades",
            "binades the chosen scales leave reachable: from the largest code of a block down to the smallest positive "
            "value, averaged over blocks that have a nonzero code",
            "mean over blocks of log2(value of the largest code / smallest positive)",
            formulas.binades_used,
            "high",
            _B4,
            sampled=ESTIMATED,
            text=TextColumn("binades\nused"),
            page=PageColumn(9, "binades", "used"),
        ),
        Metric(
            "scale_exponent_min",
            "exponent",
            "smallest exponent of the block scales in use (zero scales left out)",
            "min floor(log2 scale)",
            formulas.extreme_exponent(min),
            page=PageColumn(7, "scale exponent", "least"),
        ),
        Metric(
            "scale_exponent_max",
            "exponent",
            "largest exponent of the block scales in use",
            "max floor(log2 scale)",
            formulas.extreme_exponent(max),
            page=PageColumn(8, "scale exponent", "most"),
        ),
        Metric(
            "scale_exponent_histogram",
            "blocks",
            "blocks by exponent of their scale",
            "count by floor(log2 scale)",
            formulas.scale_exponent_histogram,
            number=False,
        ),
        Metric(
            "element_exponent_histogram",
            "elements",
            "elements by binade of their code's value",
            "count by floor(log2 |code value|)",
            formulas.element_exponent_histogram,
            number=False,
        ),
        Metric(
            "code_use_percent",
            "% of codes",
            "share of the format's finite codes that occur",
            "100 * distinct codes / finite codes",
            formulas.code_use_percent,
            "high",
        ),
        Metric(
            "block_sqnr_db",
            "dB",
            "quantiles over blocks of a block's SQNR, to within 0.13 dB (p0 exactly); absent: exact",
            "quantiles of 10 log10(sum x^2 / sum (y - x)^2)",
            formulas.block_sqnr_db,
            "high",
            number=False,
            page=PageColumn(2, "error", "worst block", "dB", meaning="SQNR of the worst block"),
            noise=True,
        ),
        Metric(
            "block_sqnr_histogram",
            "blocks",
            "blocks that are not zero by their SQNR in whole dB, to within 0.13 dB; `exact`: without noise",
            "count by floor(10 log10(sum x^2 / sum (y - x)^2))",
            formulas.block_sqnr_histogram,
            number=False,
        ),
        Metric(
            "block_dynamic_range",
            "binades",
            "quantiles over blocks of largest over smallest nonzero magnitude, to within 0.17 binades (p0 exactly)",
            "quantiles of log2(amax / smallest nonzero)",
            formulas.block_dynamic_range,
            number=False,
        ),
        Metric(
            "worst_blocks",
            "",
            "the blocks with most error: batch index, first row and column, sum of squared errors, share of the total",
            "largest sum (y - x)^2",
            formulas.worst_blocks,
            number=False,
        ),
    )
}


NUMBERS: dict[str, Metric] = {name: metric for name, metric in METRICS.items() if metric.number}
"""The metrics that are one number."""


def measured(
    stats: Stats,
    row: BlockFormat,
    shape: tuple[int, ...] | None = None,
    tensors: int = 1,
    metrics: Mapping[str, Metric] = METRICS,
) -> dict[str, Value]:
    """Return the metrics (all of them) of one tensor, or of a sum of `tensors` (`shape` None); None where a value does
    not exist or is not finite."""
    m = Measurement(stats, row, shape, tensors)
    values = {name: metric.of(m) for name, metric in metrics.items()}
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def number_of(metrics: Mapping[str, Value], name: str) -> float | None:
    """Return a metric that is one number; None where it is absent or something else."""
    value = metrics[name]
    return value if isinstance(value, (int, float)) else None


def judged_number(metrics: Mapping[str, Value], name: str) -> float | None:
    """Return the number to judge by: the metric, or what it tends to where the result is exact (an SQNR is infinite);
    None where there is neither."""
    if metrics.get(name) is None and metrics.get("mse") == 0:
        return METRICS[name].exact
    return number_of(metrics, name)


@dataclass(frozen=True, slots=True)
class Objective:
    """The harm that a format does to one tensor: what it is, its formula, and the noun it is spoken of with."""

    name: str
    of: str
    meaning: str
    formula: str
    source: str = "mxcli"


WEIGHT_ERROR = Objective(
    "weight-error",
    "weights",
    "what `mxcli recommend` keeps low without captured activations: the squared error of a tensor relative to its "
    "squared norm, which is 10^(-SQNR/10), added up over tensors, each counting the same however large it is. A tensor "
    "that is kept adds nothing. For inputs whose features are independent and equally large it is the output error.",
    "sum over tensors of sum (y - x)^2 / sum x^2",
)
OUTPUT_ERROR = Objective(
    "output-error",
    "outputs",
    "what `mxcli recommend --captures` keeps low: the squared error that quantized weights cause in the output of "
    "their layer, relative to the output's squared norm, added up over layers, each counting the same. Activations X "
    "are not quantized. It is computed in binary64 on the CPU from the scaled-back weights; of more than 1,024 "
    "captured rows 1,024 are drawn with a fixed seed. Weights without captured input count as in weight-error.",
    "sum over layers of ||X (W - Y)^T||^2 / ||X W^T||^2",
)
LOSS = Objective(
    "loss",
    "the loss",
    "what `mxcli recommend` keeps low with a --text, or captured inputs and gradients of all layers: the change of the "
    "model's loss in nats per token, estimated to second order for each layer by itself, with the empirical Fisher "
    "matrix for the Hessian. Of more than 4,096 captured tokens 4,096 are drawn. `mxcli evaluate` measures the loss.",
    "sum over layers of 1/2 mean over tokens of (n dY . X (Y - W)^T)^2, n tokens in the mean loss",
    "Hassibi and Stork, Optimal Brain Surgeon, 1992; Kunstner et al., Limitations of the empirical Fisher, 2019",
)
OBJECTIVES: dict[str, Objective] = {row.name: row for row in (WEIGHT_ERROR, OUTPUT_ERROR, LOSS)}
