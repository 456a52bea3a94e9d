"""AMD Quark's exported checkpoints of whole models are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from tiny_models import floats

from engines.originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("quark", "torch", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
quark: Any = Lazy("quark.torch")


def produced(source: Path, output: Path, scheme: str) -> Path:
    """What Quark exports of a model that it quantized with one of its schemes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    template = quark.LLMTemplate(
        model_type="llama", kv_layers_name=None, q_layer_name=None, exclude_layers_name=["lm_head"]
    )
    data = torch.utils.data.DataLoader([torch.arange(3, 19)], batch_size=1)
    quantizer = quark.ModelQuantizer(template.get_config(scheme=scheme))
    model = quantizer.freeze(quantizer.quantize_model(model, data))
    with torch.no_grad():
        quark.export_safetensors(model, str(output))
    return output


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(
    ("scheme", "format"),
    [
        ("mxfp4", "mxfp4"),
        ("mxfp6_e3m2", "mxfp6_e3m2"),
        ("mxfp6_e2m3", "mxfp6_e2m3"),
        ("fp8", "fp8_e4m3"),
        ("ptpc_fp8", "fp8_e4m3_channel"),
    ],
)
def test_every_byte(tmp_path: Path, scheme: str, format: str, dtype: str) -> None:
    zeros = ("zeros", "negative zeros") if "fp8" in scheme and dtype == "BF16" else ()
    source = llama(tmp_path / "m", dtype, without=("tiny", *zeros), equal_amax=True)
    exported = theirs(produced(source, tmp_path / "theirs", scheme))
    expected = {name: raw for name, raw in exported.items() if not name.endswith(".input_scale")}
    rule = "amax-eps" if dtype == "F32" and "fp8" in scheme else None
    assert differing(expected, ours(source, tmp_path / "ours", format, "quark", "quark", rule)) == {}


def test_rows_of_zeros_have_another_fp8_scale(tmp_path: Path) -> None:
    source = llama(tmp_path / "m", without=("negative zeros", "tiny"))
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    expected = theirs(produced(source, tmp_path / "theirs", "ptpc_fp8"))[name]
    found = ours(source, tmp_path / "ours", "fp8_e4m3_channel", "quark", "quark")[name]
    assert [floats(raw)[0] for raw in (expected, found)] == [2.0**-23, 2.0**-7]
    assert expected[2][2:] == found[2][2:]
