"""The rules of transformers are what it does, on a CPU: tiny models in every layout that it has rules of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.loaders.engine import ENGINES
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
pytestmark = [pytest.mark.slow, needs("accelerate", "compressed_tensors", "torch", "transformers")]

COMMON = {"vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": False, "num_hidden_layers": 1}
DENSE = {
    "even": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1},
    "odd": {"hidden_size": 576, "intermediate_size": 768, "num_attention_heads": 9, "num_key_value_heads": 3},
    "uneven": {"hidden_size": 384, "intermediate_size": 512, "num_attention_heads": 6, "num_key_value_heads": 3},
}
"""Llamas with heads of 64: only `even` has whole blocks of 128; `uneven` has keys of 192 rows."""
MOE = {"moe": 128, "large moe": 256}
"""Qwen3-MoE models of a width of 128, by the width of their experts."""
NEAR = {"compressed-tensors": 0.1, "fp8": 0.02, "mxcli": 0.1, "modelopt": 0.1, "torchao": 0.2}
"""Relative errors of logits: of rounding the inputs too, where loaders do that; a wrong scale gives more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, sizes in DENSE.items():
        config = transformers.LlamaConfig(**COMMON, **sizes, head_dim=64)
        folders[name] = _saved(transformers.LlamaForCausalLM, config, tmp_path_factory.mktemp("dense"))
    for name, width in MOE.items():
        config = transformers.Qwen3MoeConfig(
            **COMMON, hidden_size=128, intermediate_size=256, moe_intermediate_size=width, num_attention_heads=2,
            num_key_value_heads=2, head_dim=64, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[],
        )  # fmt: skip
        folders[name] = _saved(transformers.Qwen3MoeForCausalLM, config, tmp_path_factory.mktemp("moe"))
    return folders


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def logits(folder: Path, dtype: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model(torch.tensor([[1, 2, 3, 4, 5]])).logits.float()


def outcome(quantized: Path, plain: Path, near: float) -> str:
    """What transformers does with a checkpoint: refuses it, or loads it as it dequantizes or wrongly."""
    dequantize_checkpoint(open_checkpoint(quantized), plain, backend=Cpu())
    expected = logits(plain, torch.float32)
    try:
        found = logits(quantized, torch.bfloat16)
    except (RuntimeError, ValueError):
        return "refuses"
    return "loads" if (found - expected).norm() / expected.norm() < near else "loads wrongly"


CASES = [
    *(("compressed-tensors", name, "even") for name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8_e4m3")),
    *(("compressed-tensors", name, "even") for name in ("fp8_e4m3_channel", "fp8_e4m3_128x128")),
    *(("compressed-tensors", "fp8_e4m3_128x128", model) for model in ("small", "odd", "uneven", "moe", "large moe")),
    *(("compressed-tensors", name, "moe") for name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8_e4m3")),
    *(("fp8", "fp8_e4m3_128x128", model) for model in ("even", "small", "odd", "uneven", "large moe")),
    *(("fp8", name, model) for name in ("mxfp8", "fp8_e4m3", "e4m3:e8m0:128x128") for model in ("even", "moe")),
    *(("modelopt", name, "small") for name in ("nvfp4", "mxfp4", "mxfp8", "fp8_e4m3_channel")),
    *(("mxcli", name, "small") for name in ("nvfp4", "mxfp8", "mxint8")),
    *(("torchao", name, "small") for name in ("nvfp4", "mxfp4", "mxfp6", "mxfp8_e5m2", "fp8_e4m3_channel")),
]


@pytest.mark.parametrize(("layout", "format", "model"), CASES)
def test_transformers_does_what_its_rules_say(
    models: dict[str, Path], tmp_path: Path, layout: str, format: str, model: str
) -> None:
    version = transformers.__version__
    if version != ENGINES["transformers"].version:
        pytest.skip(f"the rules are of {ENGINES['transformers']}, not {version}")
    checkpoint = open_checkpoint(models[model])
    plan = make_plan(checkpoint, Options(format, layout=layout))
    written = quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    (verdict,) = (each for each in written.arrangement.loaders if each.engine.name == "transformers")
    expected = {"loads at a loss": "loads"}.get(verdict.outcome, verdict.outcome)
    assert outcome(tmp_path / "q", tmp_path / "plain", NEAR[layout]) == expected, verdict.reason
