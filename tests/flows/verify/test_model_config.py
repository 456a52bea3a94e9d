from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def without(config: dict[str, Any], path: str) -> dict[str, Any]:
    key, _, rest = path.partition(".")
    if rest:
        return {**config, key: without(config[key], rest)}
    return {name: value for name, value in config.items() if name != key}


@pytest.mark.parametrize(
    ("keys", "added", "shown"),
    [
        (["rope_theta"], {}, "rope_theta"),
        (["rms_norm_eps", "hidden_act"], {}, "hidden_act, rms_norm_eps"),
        (["hidden_size"], {}, "hidden_size"),
        (["rope_scaling.factor"], {}, "rope_scaling.factor"),
        (["rope_scaling"], {}, "rope_scaling"),
        (["rope_theta", "rope_scaling"], {"rope_parameters": {"rope_theta": 10000.0, "factor": 2.0}}, None),
        (["hidden_act"], {"text_config": {"hidden_act": "silu"}}, None),
        (["transformers_version"], {}, None),
        (["torch_dtype"], {"dtype": "bfloat16"}, None),
        (["bos_token_id"], {}, None),
    ],
)
@pytest.mark.parametrize("recorded", [True, False])
def test_a_removed_key_is_reported(
    tmp_path: Path, keys: list[str], added: dict[str, object], shown: str | None, recorded: bool
) -> None:
    source_config = {**CONFIG, "transformers_version": "5", "torch_dtype": "bfloat16", "bos_token_id": None}
    model = source(tmp_path / "m", llama(), source_config)
    folder = quantized(model, tmp_path / "q", Options("nvfp4"))
    if not recorded:
        (folder / "mxcli.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for key in keys:
        config = without(config, key)
    (folder / "config.json").write_text(json.dumps({**config, **added}))
    result = verified(folder, model)
    check, other = ("lost_setting", "left_out_setting") if recorded else ("left_out_setting", "lost_setting")
    assert values(result, check) == ([] if shown is None else [f"lacks {shown}, which the source states"])
    assert other not in found(result)
