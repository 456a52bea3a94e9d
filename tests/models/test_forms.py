"""One trained model in other files and types: what is measured depends on its values alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models import wanted
from models.measuring import layer, report, run, total, weight
from models.store import Models
from mxcli.files.checkpoint import open_checkpoint

pytestmark = [pytest.mark.network, pytest.mark.slow]

LINEARS = 210
SAMPLED = "model.layers.7.mlp.down_proj.weight"


def _report_of(path: Path) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(run("report", path, "--format", "nvfp4", "--json", "-q"))
    return {key: value for key, value in printed.items() if key != "source"}


def test_shards_say_what_one_file_says(models: Models) -> None:
    whole, shards = models.smollm2("bf16"), models.smollm2("shards")
    assert len(list(shards.glob("model-0000?-of-00003.safetensors"))) == 3
    told = _report_of(whole)
    assert len(told["layers"]) == LINEARS
    assert _report_of(shards / "model.safetensors.index.json") == told


def test_a_pickle_says_what_safetensors_say(models: Models) -> None:
    told, pickled = report(models.smollm2("bf16"), "nvfp4"), report(models.smollm2("bin"), "nvfp4")
    assert pickled.counts == {**told.counts, "tied": 1}
    assert {layer.name: layer for layer in pickled.layers} == {layer.name: layer for layer in told.layers}
    assert [(layer.name, layer.decision) for layer in pickled.kept][-1] == ("lm_head.weight", "tied")
    assert total(pickled, "scale_exponent_histogram") == total(told, "scale_exponent_histogram")
    assert total(pickled, "mse") == pytest.approx(total(told, "mse"), rel=1e-12)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4", "mxint8"])
def test_binary32_says_what_bfloat16_says(models: Models, format: str) -> None:
    """Of values that both hold."""
    narrow, wide = (report(models.smollm2(form), format, include=("*layers.2?",)) for form in ("bf16", "fp32"))
    assert len(wide.layers) == LINEARS // 3
    assert {layer.dtype for layer in wide.layers} == {"F32"}
    assert [(layer.name, layer.metrics) for layer in wide.layers] == [(x.name, x.metrics) for x in narrow.layers]
    assert wide.sum == narrow.sum


# The values that were rounded to bfloat16 first give 31.51: they lie halfway between E4M3 codes more often.
@pytest.mark.parametrize(("format", "sqnr_db"), [("mxfp8_e4m3", 31.53), ("mxfp4_e2m1", 18.51), ("nvfp4", 20.47)])
def test_binary16(models: Models, format: str, sqnr_db: float) -> None:
    checkpoint = open_checkpoint(models.smollm2("fp16"))
    told = report(checkpoint, format)
    assert {layer.dtype for layer in told.layers} == {"F16"}
    assert round(total(told, "sqnr_db"), 2) == sqnr_db
    x = weight(checkpoint, SAMPLED)
    wanted.assert_metrics(layer(told, SAMPLED).metrics, x, wanted.expected(x, format))
