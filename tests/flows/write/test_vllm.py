"""vLLM's own code that matches layers with our configuration, where vLLM is installed; it needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts.targets import targets_of
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


class RowParallelLinear:
    """A class of vLLM's linear layers."""


class RoutedExperts:
    """The class of vLLM's routed experts."""


TARGETED = [
    ("model.layers.0.self_attn.qkv_proj", RowParallelLinear, True),
    ("language_model.model.layers.1.mlp.gate_up_proj", RowParallelLinear, True),
    ("model.layers.1.mlp.down_proj", RowParallelLinear, True),
    ("model.layers.1.mlp.experts.0.gate_proj", RoutedExperts, True),
    ("model.layers.1.mlp.experts.0.None", RoutedExperts, True),
    ("vision_tower.layers.1.mlp.gate_up_proj", RowParallelLinear, False),
    ("model.layers.1.mlp.gate", RowParallelLinear, False),
]


@pytest.mark.parametrize(("name", "kind", "expected"), TARGETED)
def test_targets_name_fused_layers_and_experts(name: str, kind: type, expected: bool) -> None:
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    parts += ["mlp.down_proj", *(f"mlp.experts.{expert}.{part}" for expert in (0, 1) for part in ("gate_proj", "w2"))]
    modules = [f"model.layers.{layer}.{part}" for layer in (0, 1) for part in parts]
    plain = [f"vision_tower.layers.{layer}.mlp.{part}_proj" for layer in (0, 1) for part in ("gate", "up")]
    targets = targets_of(modules, plain)
    assert (matching.find_matched_target(name, kind(), targets, FUSED) is not None) is expected
