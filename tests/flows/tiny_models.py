"""Tiny model directories, written byte by byte and read back the same way, independent of the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Tensor = tuple[str, np.ndarray]
Raw = tuple[str, list[int], bytes]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "tie_word_embeddings": False,
}


def bf16(values: Any) -> Tensor:
    """Values that bfloat16 holds exactly (others are cut) as its bits."""
    return "BF16", (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Random bfloat16 values."""
    return bf16(np.random.default_rng(seed).standard_normal(shape) * scale)


def layer(prefix: str = "model.layers.0", hidden: int = 64, wide: int = 128, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of one Llama layer."""
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden // 2, hidden),
        "self_attn.v_proj": (hidden // 2, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {
        f"{prefix}.{name}.weight": noise(*shape, seed=seed + place)
        for place, (name, shape) in enumerate(shapes.items())
    }


def llama(layers: int = 1) -> dict[str, Tensor]:
    """A whole tiny Llama."""
    tensors = {"model.embed_tokens.weight": noise(32, 64, seed=100), "lm_head.weight": noise(32, 64, seed=101)}
    for number in range(layers):
        tensors |= layer(f"model.layers.{number}", seed=10 * number)
    return tensors | {"model.norm.weight": noise(64, seed=102)}


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    data = b""
    for name, (dtype, array) in tensors.items():
        content = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_model(
    folder: Path,
    tensors: Mapping[str, Any],
    config: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """A model directory; `tensors` may be given per file name, and is then indexed."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = tensors if all(name.endswith(".safetensors") for name in tensors) else {"model.safetensors": tensors}
    for name, content in shards.items():
        (folder / name).write_bytes(safetensors_bytes(content, metadata or {"format": "pt"}))
    if len(shards) > 1:
        weight_map = {tensor: name for name, content in shards.items() for tensor in content}
        index = {"metadata": {"total_size": -1}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def read_raw(path: Path) -> dict[str, Raw]:
    """Dtype, shape and bytes of every tensor of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = read_header(path)
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (
            entry["dtype"],
            entry["shape"],
            content[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for name, entry in header.items()
    }


def tree(folder: Path) -> dict[str, bytes]:
    """Content of every file of a directory by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def floats(raw: Raw) -> np.ndarray:
    """BF16 or F32 values of a raw tensor as float32."""
    dtype, shape, content = raw
    if dtype == "BF16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(content, np.float32).reshape(shape)
