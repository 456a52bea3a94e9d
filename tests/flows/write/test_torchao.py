"""torchao's own files come back as it decodes them, ours are theirs byte for byte, and transformers loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import noise, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.layouts import LAYOUTS
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.flows.write.restore import plain_view
from mxcli.numerics.scheme import Rules

FOLDERS = Path(__file__).parents[2] / "data" / "layouts"
TWO_LEVELS, ONE_LEVEL = "nvfp4", "e2m1:e4m3:1x16"
# The folder, and what it takes to write the same bytes.
MADE = {
    "mxfp4": ("torchao", "mxfp4", "rceil"),
    "mxfp4-plain-even": ("torchao-plain", "mxfp4", "even"),
    "mxfp4-plain-floor": ("torchao-plain", "mxfp4", "floor"),
    "mxfp4-plain-rceil": ("torchao-plain", "mxfp4", "rceil"),
    "mxfp6-e2m3-plain-floor": ("torchao-plain", "mxfp6_e2m3", "floor"),
    "mxfp6-e3m2-plain-floor": ("torchao-plain", "mxfp6_e3m2", "floor"),
    "mxfp8": ("torchao", "mxfp8", "rceil"),
    "mxfp8-e5m2": ("torchao", "mxfp8_e5m2", "rceil"),
    "mxfp8-plain-floor": ("torchao-plain", "mxfp8", "floor"),
    "mxfp8-plain-rceil": ("torchao-plain", "mxfp8", "rceil"),
    "nvfp4-plain": ("torchao-plain", TWO_LEVELS, None),
    "nvfp4-plain-onelevel": ("torchao-plain", ONE_LEVEL, None),
    "nvfp4-weightonly": ("torchao", TWO_LEVELS, None),
}


def quantized(source: Path, output: Path, options: Options) -> Path:
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())
    return output


def plain(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    checkpoint = plain_view(open_checkpoint(folder)).checkpoint(Cpu())
    infos = checkpoint.tensors.values()
    return {info.name: (info.dtype, list(info.shape), read(checkpoint, info).tobytes()) for info in infos}


def header(path: Path) -> dict[str, str]:
    content = path.read_bytes()
    said: dict[str, str] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    return said


def test_every_folder_is_covered() -> None:
    assert {f"torchao-{name}" for name in MADE} == {path.name for path in FOLDERS.glob("torchao-*")}


@pytest.mark.parametrize("name", MADE)
def test_torchao_is_read_as_it_decodes_itself(name: str) -> None:
    folder = FOLDERS / f"torchao-{name}"
    assert plain(folder) == read_raw(folder / "dequantized.safetensors")


@pytest.mark.parametrize("name", MADE)
def test_torchao_is_written_byte_for_byte(tmp_path: Path, name: str) -> None:
    layout, format, rule = MADE[name]
    options = Options(format, Rules(scale_rounding=rule, dialect="torchao", nonfinite="error"), layout=layout)
    written = quantized(FOLDERS / "toy.safetensors", tmp_path / "q", options) / "model.safetensors"
    theirs = FOLDERS / f"torchao-{name}" / "model.safetensors"
    assert read_raw(written) == read_raw(theirs)
    ours, said = header(written), header(theirs)
    assert ours.keys() == said.keys() | {"format"}
    for key, text in said.items():
        found = json.loads(ours[key])
        if layout == "torchao-plain" and format.startswith("mx") and key != "tensor_names":
            # torchao's casts do not say how inputs are quantized, without which its MX layers do not run.
            assert found["_data"].pop("act_quant_kwargs")["_type"] == "QuantizeTensorToMXKwargs"
            found["_data"]["act_quant_kwargs"] = None
        assert found == json.loads(text)
    config = json.loads((FOLDERS / f"torchao-{name}" / "config.json").read_text())
    if "quantization_config" in config:
        found = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
        assert found == config["quantization_config"] | {"modules_to_not_convert": []}


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("torchao")
    pytest.importorskip("accelerate")
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch: Any) -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(torch: Any, transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


def assert_loads_as_we_decode(folder: Path, torch: Any, transformers: Any, *classes: str) -> None:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    state = model.state_dict()
    assert {type(tensor).__name__ for tensor in state.values()} == {"Tensor", *classes}
    for name, (_, shape, content) in plain(folder).items():
        tensor = state[name] if type(state[name]) is torch.Tensor else state[name].dequantize()
        assert (list(tensor.shape), tensor.dtype) == (shape, torch.bfloat16), name
        assert tensor.contiguous().view(torch.int16).numpy().tobytes() == content, name


@pytest.mark.parametrize("format", LAYOUTS["torchao"].formats)
@pytest.mark.parametrize("layout", ["torchao", "torchao-plain"])
def test_transformers_loads_it(
    tmp_path: Path, source: Path, torch: Any, transformers: Any, layout: str, format: str
) -> None:
    kind = {"mx": "MXTensor", "fp": "Float8Tensor"}.get(format[:2], "NVFP4Tensor")
    options = Options(format, layout=layout, on_indivisible="keep")
    assert_loads_as_we_decode(quantized(source, tmp_path / "q", options), torch, transformers, kind)


def test_transformers_loads_mixed_formats_and_kept_layers(
    tmp_path: Path, source: Path, torch: Any, transformers: Any
) -> None:
    overrides = (
        Override("*.mlp.*", "mxfp8"),
        Override("*.o_proj", "fp8_e4m3_channel"),
        Override("*down_proj", keep=True),
    )
    folder = quantized(source, tmp_path / "q", Options("nvfp4", overrides=overrides, layout="torchao"))
    assert_loads_as_we_decode(folder, torch, transformers, "MXTensor", "NVFP4Tensor", "Float8Tensor")


@pytest.mark.parametrize(("format", "granularity"), [("fp8_e4m3", "PerTensor"), ("fp8_e4m3_channel", "PerRow")])
def test_fp8_is_what_torchao_makes(tmp_path: Path, torch: Any, format: str, granularity: str) -> None:
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    name, (dtype, bits) = "a.weight", noise(32, 64)
    layer = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)})
    layer.a.weight.data = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    config = quantization.Float8WeightOnlyConfig(granularity=getattr(quantization, granularity)())
    quantization.quantize_(layer, config)
    tensors, metadata = flatten_tensor_state_dict(layer.state_dict())
    # torchao divides amax in the dtype of the weight.
    options = Options(
        format, Rules(scale_rounding="amax-bf16-scale", dialect="torchao", nonfinite="error"), layout="torchao"
    )
    written = quantized(write_model(tmp_path / "m", {name: (dtype, bits)}), tmp_path / "q", options)
    raw = read_raw(written / "model.safetensors")
    assert raw.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert raw[key][1:] == (list(tensor.shape), tensor.view(torch.uint8).numpy().tobytes()), key
    assert header(written / "model.safetensors")[name] == metadata[name]
