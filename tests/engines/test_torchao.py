"""transformers with torchao loads models of more kinds than one: experts, biases and tied heads, weight by weight.

tests/flows/write/test_torchao.py compares files and loads a plain model in every format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

pytestmark = [pytest.mark.slow, needs("accelerate", "torch", "torchao", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Qwen2": {},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = getattr(transformers, f"{request.param}Config")(**SIZES | FAMILIES[request.param])
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    return Path(folder)


def state_of(folder: Path) -> dict[str, Any]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    state: dict[str, Any] = model.state_dict()
    return state


@pytest.mark.parametrize(
    ("layout", "format"), [*(("torchao", format) for format in LAYOUTS["torchao"].formats), ("torchao-plain", "mxfp8")]
)
def test_every_weight_is_what_it_was_dequantized_to(source: Path, tmp_path: Path, layout: str, format: str) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format, layout=layout, on_indivisible="keep"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "plain", backend=Cpu())
    state, plain = state_of(tmp_path / "q"), state_of(tmp_path / "plain")
    assert state.keys() == plain.keys()
    assert sum(type(tensor) is not torch.Tensor for tensor in state.values()) >= 8
    for name, tensor in state.items():
        values = tensor if type(tensor) is torch.Tensor else tensor.dequantize()
        assert torch.equal(values, plain[name]), name
