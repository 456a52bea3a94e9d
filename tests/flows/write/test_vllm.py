"""vLLM's own code that matches layers with our configuration, where vLLM is installed; it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.quantize import quantize_checkpoint

matching = pytest.importorskip(
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    reason="vLLM is not installed: its rules are tested as they are written down",
    exc_type=ImportError,
)
SAMPLE = Path(__file__).parents[3] / "samples" / "tiny-llama"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_layers_that_stay_plain_are_ignored_and_no_others(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(SAMPLE)
    options = Options("nvfp4", selection=(Rule(False, "*layers.1.self_attn.*"),))
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), tmp_path / "q", backend=Cpu())
    ignore = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    ignored = {
        name: matching.should_ignore_layer(name, ignore, FUSED)
        for name in (
            "model.layers.0.self_attn.qkv_proj",
            "model.layers.1.self_attn.qkv_proj",
            "model.layers.1.self_attn.o_proj",
            "model.layers.1.mlp.gate_up_proj",
            "lm_head",
        )
    }
    assert ignored == {
        "model.layers.0.self_attn.qkv_proj": False,
        "model.layers.1.self_attn.qkv_proj": True,
        "model.layers.1.self_attn.o_proj": True,
        "model.layers.1.mlp.gate_up_proj": False,
        "lm_head": True,
    }
