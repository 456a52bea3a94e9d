"""What a recommendation keeps low, as rows: the harm of a format to a tensor, summed over tensors. `mxcli explain`
prints these rows."""

from __future__ import annotations

from dataclasses import dataclass


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
OBJECTIVES: dict[str, Objective] = {row.name: row for row in (WEIGHT_ERROR, OUTPUT_ERROR)}
