from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import Tensors, changed, found, quantized, source, verified

from mxcli.backends.cpu import Cpu
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import Arrangement, arrange
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import open_floats

FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SHORT = {"dynamic": False, "num_bits": 8, "type": "float"}
ATTENTION = "model.layers.0.self_attn"
QUARK_CACHE = {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}


def with_cache(folder: Path, names: tuple[str, str], options: Options, **settings: Any) -> Path:
    """A quantized checkpoint with scales of the KV cache."""

    def add(tensors: Tensors) -> None:
        tensors |= {f"{ATTENTION}.{name}": ("F32", np.full(1, 0.5, np.float32)) for name in names}

    return changed(quantized(source(folder / "m"), folder / "q", options), folder / "cached", add, **settings)


def arranged(folder: Path, options: Options) -> Arrangement:
    checkpoint = open_floats(folder, requantize=True)
    return arrange(checkpoint, make_plan(checkpoint, options))


def notes_on_cache(arrangement: Arrangement) -> list[str]:
    return [note for note in arrangement.notes if "KV cache" in note]


def test_compressed_tensors_keeps_its_cache_scheme(tmp_path: Path) -> None:
    names = ("k_scale", "v_scale")
    folder = with_cache(tmp_path, names, Options("mxfp8"), kv_cache_scheme=FP8_CACHE)
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] is None
    made = arranged(folder, Options("nvfp4"))
    settings: Any = made.configs["config.json"]["quantization_config"]
    assert settings["kv_cache_scheme"] == FP8_CACHE
    assert settings["format"] == "nvfp4-pack-quantized"
    assert notes_on_cache(made) == [
        f"The KV cache stays quantized as the source states it with its 2 scales ('{ATTENTION}.k_scale', …)."
    ]
    checkpoint = open_floats(folder, requantize=True)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, Options("nvfp4")), tmp_path / "again", backend=Cpu())
    assert "settings" not in found(verified(tmp_path / "again"))


def test_modelopt_keeps_both_settings_of_the_cache(tmp_path: Path) -> None:
    options = Options("mxfp8", layout="modelopt")
    folder = with_cache(tmp_path, ("k_proj.k_scale", "v_proj.v_scale"), options, kv_cache_scheme=SHORT)
    producer = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())
    producer["quantization"]["kv_cache_quant_algo"] = "FP8"
    (folder / "hf_quant_config.json").write_text(json.dumps(producer))
    made = arranged(folder, Options("nvfp4", layout="modelopt"))
    settings: Any = made.configs["config.json"]["quantization_config"]
    stated: Any = made.configs["hf_quant_config.json"]["quantization"]
    assert (settings["kv_cache_scheme"], stated["kv_cache_quant_algo"]) == (SHORT, "FP8")
    assert stated["quant_algo"] == "W4A16_NVFP4"


def test_quark_keeps_the_settings_of_the_cache(tmp_path: Path) -> None:
    options = Options("mxfp4", layout="quark")
    names = ("k_proj.output_scale", "v_proj.output_scale")
    folder = with_cache(tmp_path, names, options, kv_cache_quant_config=QUARK_CACHE)
    made = arranged(folder, Options("mxfp6_e3m2", layout="quark"))
    settings: Any = made.configs["config.json"]["quantization_config"]
    assert settings["kv_cache_quant_config"] == QUARK_CACHE
    assert settings["kv_cache_post_rope"] is False


@pytest.mark.parametrize("layout", ["modelopt", "torchao", "mxcli"])
def test_another_layout_says_that_the_cache_is_not_converted(tmp_path: Path, layout: str) -> None:
    folder = with_cache(tmp_path, ("k_scale", "v_scale"), Options("mxfp8"), kv_cache_scheme=FP8_CACHE)
    made = arranged(folder, Options("mxfp8", layout=layout))
    settings: Any = made.configs["config.json"]["quantization_config"]
    assert settings.get("kv_cache_scheme") is None
    assert notes_on_cache(made) == [
        f"The source states a quantized KV cache in the way of compressed-tensors, which is not converted to {layout}: "
        f"loaders keep the cache in the dtype of the model; its 2 scales ('{ATTENTION}.k_scale', …) stay in the files, "
        "unused."
    ]


def test_a_source_without_a_quantized_cache_gets_no_note(tmp_path: Path) -> None:
    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp8"))
    made = arranged(folder, Options("nvfp4"))
    settings: Any = made.configs["config.json"]["quantization_config"]
    assert settings["kv_cache_scheme"] is None
    assert notes_on_cache(made) == []
