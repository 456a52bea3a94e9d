"""auto-round's checkpoints beside those of its exporter, and the way to them and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clean_outputs import assert_clean
from conversions import MOE, converted, moe, raw, refusals
from lazy import needs
from tiny_models import llama, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

MODELS = {"dense": (llama, {}), "experts": (moe, {"config": MOE})}


def quantized(folder: Path, options: Options, model: str = "dense") -> Path:
    tensors, more = MODELS[model]
    source = open_checkpoint(write_model(folder.with_name(f"{folder.name}-plain"), tensors(), **more))
    quantize_checkpoint(source, make_plan(source, options), folder, backend=Cpu())
    assert_clean(folder)
    return folder


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "fp8_e4m3_128x128"])
def test_compressed_tensors_and_auto_round_return_every_byte(tmp_path: Path, format: str, model: str) -> None:
    first = quantized(tmp_path / "q", Options(format, layout="ct"), model)
    converted(first, tmp_path / "a", "auto-round")
    settings = json.loads((tmp_path / "a" / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["block_name_to_quantize"]) == ("auto-round", "model.layers")
    converted(tmp_path / "a", tmp_path / "back", "ct")
    assert raw(tmp_path / "back") == raw(first)
    assert (tmp_path / "back" / "config.json").read_text() == (first / "config.json").read_text()


def test_nvfp4_without_scales_of_inputs_is_refused(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", Options("nvfp4", layout="ct"))
    reasons = refusals(first, "auto-round")
    assert len(reasons) == 1 or all("has none" in reason for reason in reasons)
    assert "loaders of the layout auto-round take a stored scale of the inputs of each nvfp4 layer" in reasons[0]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_its_values_are_those_of_the_codes(tmp_path: Path, format: str) -> None:
    """The same codes under other names have the same values."""
    folders = {layout: quantized(tmp_path / layout, Options(format, layout=layout)) for layout in ("ct", "auto-round")}
    for layout, folder in folders.items():
        dequantize_checkpoint(open_checkpoint(folder), tmp_path / f"d-{layout}", backend=Cpu())
        assert_clean(tmp_path / f"d-{layout}")
    assert raw(tmp_path / "d-ct") == raw(tmp_path / "d-auto-round")


@pytest.mark.slow
@needs("auto_round", "transformers", "tokenizers")
@pytest.mark.parametrize(("scheme", "format"), [("MXFP4", "mxfp4"), ("MXFP8", "mxfp8")])
def test_bytes_and_settings_of_its_exporter(tmp_path: Path, scheme: str, format: str) -> None:
    import torch
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=512, **sizes)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w1")
    rounding = AutoRound(model, tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True, device_map="cpu")
    rounding.quantize_and_save(str(tmp_path / "theirs"), format="auto_round")
    (theirs,) = (path.parent for path in (tmp_path / "theirs").rglob("model.safetensors"))
    source = open_checkpoint(tmp_path / "m")
    options = Options(format, Rules(dialect="auto-round", nonfinite="error"), layout="auto-round")
    quantize_checkpoint(source, make_plan(source, options), tmp_path / "ours", backend=Cpu())
    assert raw(tmp_path / "ours") == raw(theirs)
    written, stated = (_settings(folder) for folder in (tmp_path / "ours", theirs))
    assert {key: written[key] for key in stated if key in written} == {
        key: each for key, each in stated.items() if key in written
    }
    assert set(stated) - set(written) <= {"enable_quanted_input", "iters", "seqlen", "nsamples", "model_free"}


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return settings
