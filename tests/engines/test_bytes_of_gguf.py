"""Blocks of gguf's quantizer and of llama.cpp's are ours, byte for byte; the file that gguf writes is read right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lazy import Lazy, needs
from planted import verified
from tiny_models import floats, read_raw

from engines.originals import LAYERS, VOCABULARY, llama
from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

pytestmark = [pytest.mark.slow, needs("gguf", "xllamacpp")]
gguf: Any = Lazy("gguf")
xllamacpp: Any = Lazy("xllamacpp")

HEADS, KEY_HEADS = 4, 2
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
Quantize = Callable[[np.ndarray], np.ndarray]


def by_gguf(values: np.ndarray) -> np.ndarray:
    blocks: np.ndarray = gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    return blocks


def by_llama_cpp(values: np.ndarray) -> np.ndarray:
    """Return the blocks that llama.cpp's own library makes of a matrix."""
    (library,) = Path(xllamacpp.__file__).parent.glob("*.so")
    quantize = ctypes.CDLL(str(library)).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, columns = values.shape
    blocks = np.zeros((rows, columns // 32 * 17), np.uint8)
    kind = int(gguf.GGMLQuantizationType.MXFP4)
    assert quantize(kind, values.ctypes.data, blocks.ctypes.data, 0, rows, columns, None) == blocks.size
    return blocks


def as_llama_cpp_orders(name: str, values: np.ndarray) -> np.ndarray:
    """Return a matrix with its rows as llama.cpp has them: halves of a rotation side by side."""
    heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(name)
    if heads is None:
        return values
    pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def originals(source: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Return each tensor of a source by its name in GGUF: the part of that name that says what it is, and values."""
    names = {f"blk.{layer}.{key}": (f"model.layers.{layer}.{name}", key) for layer in range(LAYERS)
             for key, name in NAMES.items()}  # fmt: skip
    names |= {key: (name, key) for key, name in OTHERS.items()}
    tensors = read_raw(source / "model.safetensors")
    return {f"{key}.weight": (part, floats(tensors[f"{name}.weight"])) for key, (name, part) in names.items()}


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("quantize", [by_gguf, by_llama_cpp])
def test_every_byte(tmp_path: Path, quantize: Quantize, dtype: str) -> None:
    source = llama(tmp_path / "m", dtype, without=("tiny",))
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options("mxfp4", Rules(dialect="gguf", nonfinite="error"), layout="gguf"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    (file,) = (tmp_path / "q").glob("*.gguf")
    theirs = originals(source)
    stored = {each.name: each for each in gguf.GGUFReader(file).tensors if each.tensor_type.name == "MXFP4"}
    assert len(stored) == 7 * LAYERS
    for name, tensor in stored.items():
        expected = quantize(as_llama_cpp_orders(*theirs[name]))
        assert tensor.data.tobytes() == expected.tobytes(), name


def test_a_file_of_gguf_is_sound_and_has_the_values_that_gguf_decodes(tmp_path: Path) -> None:
    source, path = llama(tmp_path / "m", without=("tiny",)), tmp_path / "theirs.gguf"
    kind = gguf.GGMLQuantizationType.MXFP4
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": 256, "feed_forward_length": 512,
        "head_count": HEADS, "head_count_kv": KEY_HEADS, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0,
        "vocab_size": VOCABULARY,
    }  # fmt: skip
    for key, number in numbers.items():
        getattr(writer, f"add_{key}")(number)
    decoded = {}
    for name, (part, values) in originals(source).items():
        if name.startswith("blk.") and values.ndim == 2:
            blocks = by_gguf(as_llama_cpp_orders(part, values))
            writer.add_tensor(name, blocks, raw_dtype=kind)
            decoded[name] = (part, gguf.quants.dequantize(blocks, kind))
        else:
            writer.add_tensor(name, values)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    for result in (verified(path), verified(path, source)):
        assert result.is_sound
    assert {each.provenance.scheme.dialect.name for each in result.weights if each.provenance} == {"gguf"}
    dequantize_checkpoint(open_checkpoint(path), tmp_path / "d", backend=Cpu())
    restored = read_raw(tmp_path / "d" / "model.safetensors")
    for name, (part, values) in decoded.items():
        _, layer, _, _ = name.split(".")
        ours_again = floats(restored[f"model.layers.{layer}.{NAMES[part]}.weight"])
        np.testing.assert_array_equal(as_llama_cpp_orders(part, ours_again), values)
