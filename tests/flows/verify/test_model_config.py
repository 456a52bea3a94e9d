from __future__ import annotations

import json
from pathlib import Path

import pytest
from planted import found, quantized, source, values, verified
from tiny_models import LLAMA, llama

from mxcli.flows.plan.plan import Options

CONFIG = {**LLAMA, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_scaling": {"factor": 2.0}}


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("rope_theta", 1.0, "rope_theta is 1.0"),
        ("rms_norm_eps", 1.0, "rms_norm_eps is 1.0"),
        ("hidden_act", "gelu", 'hidden_act is "gelu"'),
        ("rope_scaling", {"factor": 8.0}, "rope_scaling.factor is 8.0"),
        ("transformers_version", "9", None),
        ("an_added_key", 7, None),
    ],
)
def test_a_changed_value_is_another_model(tmp_path: Path, key: str, value: object, shown: str | None) -> None:
    model = source(tmp_path / "m", llama(), CONFIG)
    folder = quantized(model, tmp_path / "q", Options("nvfp4"))
    (folder / "mxcli.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    result = verified(folder, model)
    assert values(result, "model_config") == ([] if shown is None else [shown])
    assert ("model_config" in found(result)) == (shown is not None)
