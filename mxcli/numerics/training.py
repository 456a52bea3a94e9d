"""Recipes of low-precision training as rows: how each operand of a layer's three products is quantized, and which
blocks of the model stay high. `mxcli explain` prints these rows and `mxcli training` carries them out.

A layer W [out, in] has the products Y = X W^T (fprop), dX = dY W (dgrad) and dW = dY^T X (wgrad); every operand is
quantized along the dimension that its product sums over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mxcli.errors import UsageError, did_you_mean, printable, together
from mxcli.numerics.floats import FloatFormat
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS
from mxcli.numerics.scheme import Rules, Scheme, resolve

ALL = "all"
STOCHASTIC = "stochastic"


@dataclass(frozen=True, slots=True)
class History:
    """Delayed scaling: the scale comes from the largest amax of the last `length` steps before, times 2^`margin`."""

    length: int
    margin: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """The format and rules of one operand of one product, by name; `hadamard` is the size of the transform before it,
    `history` the delay of its scale, if any."""

    format: str
    scale_rounding: str | None = None
    rounding: str | None = None
    hadamard: int | None = None
    history: History | None = None

    @property
    def is_random(self) -> bool:
        """True if its values depend on the seed."""
        return self.rounding is not None and ELEMENT_ROUNDINGS[self.rounding].is_random


Pair = tuple[Operand | None, Operand | None]
"""The operands of a product in its order; None is not quantized."""


@dataclass(frozen=True, slots=True)
class High:
    """Transformer blocks that are not quantized: the `first` and `last`, or the last `last_percent` %, rounded up."""

    first: int = 0
    last: int = 0
    last_percent: int = 0

    @property
    def words(self) -> str:
        """The blocks in words; "none" without any."""
        counts = [f"the {end} {'block' if n == 1 else f'{n} blocks'}" for end, n in self._ends if n]
        shares = [f"the last {self.last_percent} % of blocks, rounded up"] if self.last_percent else []
        return " and ".join(counts + shares) or "none"

    @property
    def is_any(self) -> bool:
        """True if there are any, in a model of one block or more."""
        return bool(self.first or self.last or self.last_percent)

    @property
    def _ends(self) -> tuple[tuple[str, int], ...]:
        return ("first", self.first), ("last", self.last)


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """Operands of the products (X, W), (dY, W) and (dY, X), and the blocks that are not quantized."""

    name: str
    fprop: Pair
    dgrad: Pair
    wgrad: Pair
    high: High
    meaning: str
    source: str

    @property
    def pairs(self) -> Mapping[str, Pair]:
        """The operands by the name of the product."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def history(self) -> History | None:
        """The history of its delayed scales, if any."""
        return next((each.history for pair in self.pairs.values() for each in pair if each and each.history), None)

    @property
    def transform(self) -> int:
        """The largest Hadamard transform of wgrad's operands, which tokens must be a multiple of; 1: there is none."""
        return max(each.hadamard or 1 if each else 1 for each in self.wgrad)


_MXFP8 = Operand("mxfp8_e4m3", "rceil")
_MXFP8_FLOOR = Operand("mxfp8_e4m3", "floor")
_NVFP4 = Operand("nvfp4")
_NVFP4_2D = Operand("nvfp4_2d")
_NVFP4_RANDOM = Operand("nvfp4", rounding=STOCHASTIC)
_MXFP4 = Operand("mxfp4_e2m1", "rceil")
_MXFP4_2D = Operand("e2m1:e8m0:32x32", "rceil")
_MXFP4_RANDOM = Operand("mxfp4_e2m1", "rceil", STOCHASTIC)
_E4M3_1X128 = Operand("fp8_e4m3_1x128", "amax")
_E4M3_128X128 = Operand("fp8_e4m3_128x128", "amax")
_E4M3 = Operand("fp8_e4m3", "amax")
_E5M2 = Operand("fp8_e5m2", "amax")
_HISTORY = History(1024)
_E4M3_DELAYED = replace(_E4M3, history=_HISTORY)
_E5M2_DELAYED = replace(_E5M2, history=_HISTORY)

_NVFP4_PAPER = "Pretraining Large Language Models with NVFP4"
_NVFP4_TRAINING = TrainingRecipe(
    "nvfp4",
    (_NVFP4, _NVFP4_2D),
    (_NVFP4_RANDOM, _NVFP4_2D),
    (replace(_NVFP4_RANDOM, hadamard=16), replace(_NVFP4, hadamard=16)),
    High(last_percent=15),
    "weights in 16x16 blocks, which have the same codes in fprop and dgrad; activations and gradients in 1x16 blocks; "
    "gradients rounded stochastically; a random Hadamard transform of 16 tokens on both operands of wgrad, which "
    "cancels in the product; the last 15 % of the blocks high (the paper: 15 or 16 % of the linear layers, most or all "
    "of them at the end: 8 of 52 blocks, 10 of 62)",
    f"{_NVFP4_PAPER}, section 4 and appendix A; Transformer Engine 2.15, NVFP4BlockScaling",
)

TRAINING_RECIPES: dict[str, TrainingRecipe] = {
    row.name: row
    for row in (
        TrainingRecipe(
            "mxfp8",
            (_MXFP8, _MXFP8),
            (_MXFP8, _MXFP8),
            (_MXFP8, _MXFP8),
            High(),
            "E4M3 for weights, activations and gradients, each in blocks of 32 along the summed dimension, scales "
            "rounded up so that nothing saturates; no block stays high",
            "Recipes for Pre-training LLMs with MXFP8, section 3",
        ),
        TrainingRecipe(
            "mxfp8_floor",
            (_MXFP8_FLOOR, _MXFP8_FLOOR),
            (_MXFP8_FLOOR, _MXFP8_FLOOR),
            (_MXFP8_FLOOR, _MXFP8_FLOOR),
            High(),
            "`mxfp8` with scales rounded down, as the OCP specification has them: what the paper saw diverge",
            "Recipes for Pre-training LLMs with MXFP8, section 3.1; OCP MX v1.0, section 6.3",
        ),
        _NVFP4_TRAINING,
        replace(
            _NVFP4_TRAINING,
            name="nvfp4_nearest",
            dgrad=(_NVFP4, _NVFP4_2D),
            wgrad=(replace(_NVFP4, hadamard=16), replace(_NVFP4, hadamard=16)),
            meaning="`nvfp4` without stochastic rounding: gradients too are rounded to nearest even",
            source=f"{_NVFP4_PAPER}, figure 4 and appendix E.3",
        ),
        replace(
            _NVFP4_TRAINING,
            name="nvfp4_plain_wgrad",
            wgrad=(_NVFP4_RANDOM, _NVFP4),
            meaning="`nvfp4` without the Hadamard transform of wgrad's operands",
            source=f"{_NVFP4_PAPER}, figure 4 and appendix E.4",
        ),
        replace(
            _NVFP4_TRAINING,
            name="nvfp4_1d_weights",
            fprop=(_NVFP4, _NVFP4),
            dgrad=(_NVFP4_RANDOM, _NVFP4),
            meaning="`nvfp4` with weights in 1x16 blocks too: a smaller error, and other codes in dgrad than in fprop",
            source=f"{_NVFP4_PAPER}, figure 4 and appendix E.5",
        ),
        TrainingRecipe(
            "mxfp4",
            (_MXFP4, _MXFP4_2D),
            (_MXFP4_RANDOM, _MXFP4_2D),
            (replace(_MXFP4_RANDOM, hadamard=32), replace(_MXFP4, hadamard=32)),
            High(last_percent=15),
            "`nvfp4` with MXFP4 in its place and a Hadamard transform as long as its blocks, 32; that weights have "
            "blocks of 32x32 and scales round up is read into the paper, which does not say it",
            f"{_NVFP4_PAPER}, section 5",
        ),
        TrainingRecipe(
            "fp8_subchannel",
            (_E4M3_1X128, _E4M3_128X128),
            (_E4M3_1X128, _E4M3_128X128),
            (_E4M3_1X128, _E4M3_1X128),
            High(first=1, last=1),
            "E4M3 under FP32 scales: weights in blocks of 128x128, activations and gradients in blocks of 128 along "
            "the summed dimension; the first and the last block high. That the scales of some layers' operands are "
            "powers of two there is left out",
            "Stable and scalable FP8 Deep Learning Training on Blackwell (GTC 2025), sub-channel recipe; DeepSeek-V3",
        ),
        TrainingRecipe(
            "fp8_current",
            (_E4M3, _E4M3),
            (_E5M2, _E4M3),
            (_E5M2, _E4M3),
            High(first=1, last=1),
            "one FP32 scale per tensor from its own amax: E4M3 for weights and activations, E5M2 for gradients; the "
            "first and the last block high",
            "Stable and scalable FP8 Deep Learning Training on Blackwell (GTC 2025), results; Transformer Engine 2.15, "
            "Float8CurrentScaling",
        ),
        TrainingRecipe(
            "fp8_delayed",
            (_E4M3_DELAYED, _E4M3_DELAYED),
            (_E5M2_DELAYED, _E4M3_DELAYED),
            (_E5M2_DELAYED, _E4M3_DELAYED),
            High(),
            "one FP32 scale per tensor from the largest amax of the 1,024 steps before, and 1 before the first step, "
            "so that what has grown since saturates: E4M3 for weights and activations, E5M2 for gradients; no block "
            "stays high",
            "Stable and scalable FP8 Deep Learning Training on Blackwell (GTC 2025); Transformer Engine 2.15, "
            "DelayedScaling (amax_history_len 1024, amax_compute_algo max, margin 0)",
        ),
    )
}


def find_training(names: str) -> list[TrainingRecipe]:
    """Return the recipes named, separated by commas (`all`: every one); raises UsageError with every unknown name."""
    wanted = list(dict.fromkeys(word.strip().lower() for word in names.split(",") if word.strip()))
    known = ", ".join((*TRAINING_RECIPES, ALL))
    problems = [
        f"unknown training recipe '{printable(name)}': known are {known}.{did_you_mean(name, TRAINING_RECIPES)}"
        for name in wanted
        if name not in TRAINING_RECIPES and name != ALL
    ]
    if problems or not wanted:
        raise together(UsageError, "Training recipes", problems or [f"no training recipe named: known are {known}."])
    return list(TRAINING_RECIPES.values()) if ALL in wanted else [TRAINING_RECIPES[name] for name in wanted]


def rules_of(operand: Operand, seed: int = 0) -> Scheme:
    """Return the recipe that kernels take; the signs of the transform are Transformer Engine's fixed ones where it has
    any."""
    return resolve(
        operand.format,
        Rules(
            scale_rounding=operand.scale_rounding,
            rounding=operand.rounding,
            seed=seed,
            hadamard=None if operand.hadamard is None else find_hadamard(operand.hadamard),
        ),
    )


def high_blocks(high: High, blocks: int) -> frozenset[int]:
    """Return the indices of the blocks, out of `blocks`, that are not quantized."""
    last = max(high.last, -(-blocks * high.last_percent // 100))
    return frozenset(at for at in range(blocks) if at < high.first or at >= blocks - last)


def delayed_amax(earlier: Sequence[float], element: FloatFormat, history: History) -> float:
    """Return the amax that a step's scale is made from, given those of the tensor at the steps before, oldest first.

    It is the largest of the last `length` that are not zero, times 2^margin; where there is none the scale is 1, which
    is that of the element's maximum (Transformer Engine 2.15, DelayedScaling).
    """
    seen = [amax for amax in earlier if amax > 0][-history.length :]
    return max(seen) * 2.0**history.margin if seen else element.max
