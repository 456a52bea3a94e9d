"""Reports on a trained Llama: all of its linear layers in every format, against the oracle and numbers known before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dear import slow_but

import mxcli
from models import wanted
from models.measuring import fused_amax, layer, report, total, weight
from models.store import Models
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.flows.measure.inspect import Total, inspect_checkpoint
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.reencodings import REENCODINGS

pytestmark = pytest.mark.network

LINEARS, LINEAR_ELEMENTS = 210, 106_168_320
SAMPLED = ("model.layers.7.self_attn.q_proj.weight", "model.layers.22.mlp.down_proj.weight")

# SQNR in dB and relative error of the 210 layers together, computed with torch in another program before mxcli was.
KNOWN = {
    ("mxfp8_e4m3", "rceil"): (31.51, 0.0266),
    ("mxfp8_e4m3", "floor"): (30.26, 0.0307),
    ("mxfp8_e5m2", "floor"): (25.29, 0.0544),
    ("mxfp6_e2m3", "rceil"): (30.85, 0.0287),
    ("mxfp6_e2m3", "floor"): (30.86, 0.0287),
    ("mxfp6_e3m2", "floor"): (25.29, 0.0544),
    ("mxfp4_e2m1", "rceil"): (18.51, 0.1187),
    ("mxfp4_e2m1", "floor"): (18.59, 0.1177),
    ("mxfp4_e2m1", "even"): (18.87, 0.1139),
    ("mxfp4_e2m1", "ceil"): (16.80, 0.1446),
    ("nvfp4", "te"): (20.47, 0.0947),
    ("e2m1:e4m3:1x16", "te"): (20.47, 0.0948),
}
BITS = {
    "mxfp8_e4m3": 8.25,
    "mxfp8_e5m2": 8.25,
    "mxfp6_e2m3": 6.25,
    "mxfp6_e3m2": 6.25,
    "mxfp4_e2m1": 4.25,
    "mxint8": 8.25,
    "nvfp4": 4.5,
    "nvfp4_2d": 4.03125,
    "fp8_e4m3": 8.0001,
    "fp8_e5m2": 8.0001,
    "fp8_e4m3_channel": 8.0469,
    "fp8_e5m2_channel": 8.0469,
    "fp8_e4m3_1x128": 8.2708,
    "fp8_e5m2_1x128": 8.2708,
    "fp8_e4m3_128x128": 8.0023,
    "fp8_e5m2_128x128": 8.0023,
}
FEW = ("mxfp8_e4m3", "mxint8", "nvfp4", "fp8_e4m3_1x128")
"""A format of each kind; `test_rules.py` has fewer layers in all formats."""
PADDED = {"fp8_e4m3_1x128": 180, "fp8_e5m2_1x128": 180}
"""Six of the seven layers of a block have rows of 576, four and a half blocks of 128."""


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Checkpoint:
    return open_checkpoint(models.smollm2("bf16"))


def test_the_model_is_the_one_that_was_measured(models: Models) -> None:
    digest = hashlib.sha256((models.smollm2("bf16") / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


def test_inspect(checkpoint: Checkpoint) -> None:
    found = inspect_checkpoint("smollm2", checkpoint)
    assert found.total == Total(272, 134_515_008, 269_030_016)
    assert found.by_role == {
        "weight": Total(LINEARS, LINEAR_ELEMENTS, 2 * LINEAR_ELEMENTS),
        "embedding": Total(1, 49152 * 576, 2 * 49152 * 576),
        "norm": Total(61, 61 * 576, 2 * 61 * 576),
    }
    assert found.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert found.dialect is None


@pytest.mark.parametrize(
    ("format", "rule"),
    slow_but(
        [
            ("mxfp8_e4m3", "rceil"),
            ("mxfp6_e2m3", "floor"),
            ("mxfp4_e2m1", "even"),
            ("mxfp4_e2m1", "ceil"),
            ("nvfp4", "te"),
        ],
        KNOWN,
    ),
)
def test_known_numbers(checkpoint: Checkpoint, format: str, rule: str) -> None:
    whole = report(checkpoint, format, rule)
    sqnr_db, relative_error = KNOWN[format, rule]
    assert round(total(whole, "sqnr_db"), 2) == sqnr_db
    assert round(total(whole, "relative_error"), 4) == relative_error


def test_no_format_is_forgotten() -> None:
    assert wanted.FORMATS.keys() == FORMATS.keys()


@pytest.mark.parametrize("format", slow_but(FEW, wanted.FORMATS))
def test_every_format(checkpoint: Checkpoint, format: str) -> None:
    rule = "amax" if format.startswith("fp8") else None
    whole = report(checkpoint, format, rule)
    padded = PADDED.get(format, 0)
    assert whole.counts == {"quantized": LINEARS - padded, "padded": padded, "kept": 62, "tied": 0}
    assert whole.unfinished == 0
    assert total(whole, "elements") == LINEAR_ELEMENTS
    assert total(whole, "bits_per_element") == pytest.approx(BITS[format], abs=1e-4)
    parts: list[Mapping[str, Any]] = [layer.metrics for layer in whole.layers]
    for key in ("blocks", "saturated", "underflowed", "zero_blocks"):
        assert total(whole, key) == sum(part[key] for part in parts), key
    squares = sum(part["mse"] * part["elements"] for part in parts)
    assert total(whole, "mse") == pytest.approx(squares / LINEAR_ELEMENTS, rel=1e-9)
    for name in SAMPLED:
        x = weight(checkpoint, name)
        result = wanted.expected(x, format, tensor_amax=fused_amax(checkpoint, name))
        wanted.assert_metrics(layer(whole, name).metrics, x, result)


@pytest.mark.parametrize("target", REENCODINGS)
@pytest.mark.parametrize(
    ("format", "inexact"),
    slow_but(
        [("mxfp6_e3m2", 0), ("mxint8", 42_954_837)],
        [
            ("mxfp4_e2m1", 0),
            ("mxfp6_e2m3", 0),
            ("mxfp6_e3m2", 0),
            ("mxfp8_e4m3", 0),
            ("mxfp8_e5m2", 0),
            ("mxint8", 42_954_837),  # E4M3 has four significant bits, INT8 seven
        ],
    ),
)
def test_which_weights_are_fp8_operands_exactly(checkpoint: Checkpoint, format: str, inexact: int, target: str) -> None:
    """Of 106 million weights in MX formats with floating elements none has to be rounded again."""
    lost = 0
    for info in checkpoint.tensors.values():
        if info.role == "weight":
            x = torch.from_numpy(np.array(read(checkpoint, info))).view(torch.bfloat16)
            lost += mxcli.quantize(x, format).reencode(target)[1]
    assert lost == inexact
