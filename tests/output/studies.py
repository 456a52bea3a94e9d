"""Made-up studies for pages and plots: any number of layers, any names."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from mxcli.flows.measure.inspect import Total
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import METRICS
from mxcli.output.study import PageSource, Study, Tensor

KINDS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
PROVENANCE = PageSource(
    ("report", "made up", "--html", "page.html"),
    "0.1.0",
    {"model.safetensors": {"bytes": 1234, "fingerprint": "ab" * 32}},
)
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>.weight",
    "\"'><svg/onload=alert(3)>",
    "<!--<script>.weight",
    "\u202egnirts.thgiew\u202c",
    "\u05d0\u05d1\u05d2.\u05d3\u05d4.weight",
    "nul\x00tab\tline\nend",
    "\U0001f469\u200d\U0001f52c.layers.3.weight",
    "model.layers.0.<b>bold</b>.weight",
    "model.layers.99999999999999999999.weight",
    "model.layers." + "9" * 5000 + ".weight",
    "constructor",
    "__proto__",
    '=1+1,"quoted"',
    "x" * 4096,
    "",
)
"""Names that would do harm, or look odd, if they were anything but text."""


def metrics(rng: random.Random, *, sqnr: float = 25.0, saturated: float = 1.0) -> dict[str, Value]:
    """Return every metric of a tensor of 4096 blocks."""
    blocks, low = 4096, round(rng.gauss(-7, 1))
    elements = 32 * blocks
    mse = 10 ** (-sqnr / 10) * 1e-3
    clipped, lost = round(elements * saturated / 100), round(elements * rng.uniform(0.05, 0.09))
    found: dict[str, Value] = dict.fromkeys(METRICS)
    found |= {
        "elements": elements, "blocks": blocks, "bits_per_element": 4.25, "amax": rng.uniform(0.2, 4.0),
        "saturated": clipped, "saturated_percent": 100 * clipped / elements, "saturated_blocks": clipped // 2,
        "saturated_blocks_percent": 50 * clipped / blocks, "underflowed": lost,
        "underflowed_percent": 100 * lost / elements, "scale_underflowed_blocks": 0, "nonfinite": 0, "nan_blocks": 0,
        "zero_blocks": 0, "mse": mse, "rmse": math.sqrt(mse), "sqnr_db": sqnr, "relative_error": 10 ** (-sqnr / 20),
        "max_abs_error": rng.uniform(0.01, 0.2), "binades_available": 3.585,
        "binades_used": rng.uniform(2.9, 3.5), "scale_exponent_min": low, "scale_exponent_max": low + 3,
        "scale_exponent_histogram": {str(low + at): n for at, n in enumerate((16, 1700, 2300, 80))},
        "block_sqnr_histogram": {str(round(sqnr) + at - 3): n for at, n in enumerate((9, 400, 1500, 1687, 480, 20))},
        "block_sqnr_db": {"p0": sqnr - 4.0, "p1": sqnr - 3.0, "p50": sqnr, "p99": sqnr + 3.0},
        "worst_blocks": [],
    }  # fmt: skip
    return found


def study(
    layers: int = 4, recipes: Sequence[str] = ("mxfp4_e2m1 floor",), names: Sequence[str] = (), seed: int = 1
) -> Study:
    """A model with this many layers, and tensors with further names, under every scheme."""
    rng = random.Random(seed)
    measured = []
    for layer in range(layers):
        for at, kind in enumerate(KINDS):
            depth = math.sin(layer / 9 + at) + rng.gauss(0, 0.25)
            found = tuple(
                metrics(rng, sqnr=19.5 + depth - 0.4 * at + 0.7 * step, saturated=max(0.0, 2 + depth - 1.2 * step))
                for step in range(len(recipes))
            )
            measured.append(tensor(f"model.layers.{layer}.{kind}.weight", found))
    measured += [tensor(name, tuple(metrics(rng) for _ in recipes)) for name in names]
    sums = tuple({"tensors": len(measured), **metrics(rng)} for _ in recipes)
    kept = (Tensor("model.norm.weight", "BF16", (4096,), "norm", "kept", "kept: norm, normalization", ()),)
    elements = 131072 * len(measured) + 4096
    return Study(
        verb="compare" if len(recipes) > 1 else "report",
        source="a model made up",
        total=Total(len(measured) + 1, elements, 2 * elements),
        by_dtype={"BF16": Total(len(measured) + 1, elements, 2 * elements)},
        schemes=tuple(recipes),
        rules=("mxfp4_e2m1: e2m1 elements, e8m0 scales by 1x32; scale rounding floor", "non-finite input: saturate"),
        measured=tuple(measured),
        kept=kept,
        sums=sums,
        by="role",
        groups={"weight": sums},
        counts={"quantized": len(measured), "padded": 0, "kept": 1, "tied": 0},
        findings=("SQNR is 19.5 dB over all tensors.",),
        notes=(),
        unfinished=0,
    )


def tensor(name: str, found: tuple[Mapping[str, Value], ...]) -> Tensor:
    """A weight that was quantized."""
    best = max(range(len(found)), key=lambda at: float(str(found[at]["sqnr_db"]))) if len(found) > 1 else None
    return Tensor(name, "BF16", (4096, 32), "weight", "quantized", "quantized: weight, linear layer", found, best)
