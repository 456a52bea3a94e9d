"""Valid inputs of every kind, small."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # makes its cache folder now, and not in the first case that builds a model

from mxcli.cli.app import run

ROWS, COLUMNS = 32, 32
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": COLUMNS,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RECIPE = """format = "nvfp4"
exclude = ["@embedding"]

[[override]]
select = ["*.down_proj", "*layers.0.mlp.*"]
format = "mxfp8_e4m3"
scale_rounding = "rceil"

[[override]]
select = "*.k_proj"
keep = true
"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of input: `write` makes a valid one in a folder, and the files that match `damages` are damaged; one in
    `every` turns is of this kind."""

    name: str
    write: Callable[[Path], None]
    damages: str
    every: int = 1

    def files(self, folder: Path) -> list[Path]:
        """The files to damage."""
        return sorted(folder.glob(self.damages))


def floats(*shape: int, seed: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Reproducible values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors() -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """The tensors of a model of one layer, and some odd ones."""
    layer = "model.layers.0"
    names = [f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"]
    found = {name: floats(COLUMNS, COLUMNS, seed=at) for at, name in enumerate(names)}
    found |= {f"{layer}.mlp.{name}_proj.weight": floats(64, COLUMNS, seed=at) for at, name in enumerate(("gate", "up"))}
    found[f"{layer}.mlp.down_proj.weight"] = floats(COLUMNS, 64)
    found |= {"model.norm.weight": floats(COLUMNS), "lm_head.weight": floats(16, COLUMNS)}
    found["model.embed_tokens.weight"] = floats(16, COLUMNS, seed=9)
    return found


def safetensors_bytes(metadata: dict[str, str], arrays: Mapping[str, np.ndarray]) -> bytes:  # type: ignore[type-arg]
    """A safetensors file."""
    header: dict[str, object] = {"__metadata__": metadata}
    data = b""
    for name, x in arrays.items():
        content = x.tobytes()
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def model(folder: Path) -> None:
    """A model of one file."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"format": "pt"}, tensors()))


def indexed(folder: Path) -> None:
    """A model of two shards with an index."""
    names = list(tensors())
    halves = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in halves.items():
        (folder / file).write_bytes(safetensors_bytes({"format": "pt"}, {name: tensors()[name] for name in held}))
    size = sum(x.nbytes for x in tensors().values())
    index = {
        "metadata": {"total_size": size},
        "weight_map": {name: file for file, held in halves.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def config(folder: Path) -> None:
    """A quantized model with its configuration."""
    quantized(folder)


def gguf(folder: Path) -> None:
    """A GGUF file with settings of several types."""

    def text(content: str) -> bytes:
        return struct.pack("<Q", len(content)) + content.encode()

    settings = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    settings += text("a.list") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yy")
    settings += text("general.alignment") + struct.pack("<II", 4, 32)
    names = {"blk.0.attn_q.weight": (floats(32, 32), 0), "output_norm.weight": (floats(32), 0)}
    entries, data = b"", b""
    for name, (x, kind) in names.items():
        sizes = x.shape[::-1]
        entries += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(data))
        data += x.tobytes()
    header = b"GGUF" + struct.pack("<IQQ", 3, len(names), 3) + settings + entries
    (folder / "model.gguf").write_bytes(header + bytes(-len(header) % 32) + data)


def npy(folder: Path) -> None:
    """A NumPy array, stored column by column."""
    np.save(folder / "x.weight.npy", np.asfortranarray(floats(ROWS, COLUMNS)))


def npz(folder: Path) -> None:
    """NumPy arrays, one of them stored column by column."""
    np.savez(
        folder / "x.npz", **{"a.weight": floats(ROWS, COLUMNS), "b.weight": np.asfortranarray(floats(ROWS, COLUMNS))}
    )


def npz_deflated(folder: Path) -> None:
    """NumPy arrays, deflated."""
    np.savez_compressed(folder / "x.npz", **{"a.weight": floats(ROWS, COLUMNS), "b.weight": np.zeros((ROWS, COLUMNS))})


def pytorch(folder: Path) -> None:
    """A PyTorch checkpoint with views and values that are no tensors."""
    x = torch.from_numpy(floats(ROWS, COLUMNS))
    torch.save({"a.weight": x, "tied": x, "t.weight": x.T, "n": {"step": 3, "b.weight": x[:4]}}, folder / "x.pt")


def legacy(folder: Path) -> None:
    """A PyTorch checkpoint that is not a zip archive."""
    x = torch.from_numpy(floats(ROWS, COLUMNS))
    torch.save({"a.weight": x, "t.weight": x.T}, folder / "x.pt", _use_new_zipfile_serialization=False)


def recipe(folder: Path) -> None:
    """A model with a recipe."""
    model(folder)
    (folder / "recipe.toml").write_text(RECIPE)


def capture(folder: Path) -> None:
    """Captures of one layer."""
    layer = "model.layers.0.mlp.down_proj"
    arrays = {
        f"{layer}.x": floats(ROWS, 64),
        f"{layer}.dy": floats(ROWS, COLUMNS),
        f"{layer}.weight": floats(COLUMNS, 64),
    }
    roles = dict(zip(arrays, ("activation", "gradient", "weight"), strict=True))
    records = {
        name: {"layer": layer, "role": role, "step": 0, "rank": 0, **({} if role == "weight" else {"tokens": ROWS})}
        for name, role in roles.items()
    }
    about = json.dumps({"version": 1, "tensors": records, "layers_of_model": [layer]})
    (folder / "captures.safetensors").write_bytes(safetensors_bytes({"mxcli.capture": about}, arrays))


def with_experts(folder: Path) -> None:
    """A model with experts instead of one feed-forward network."""
    found = {name: x for name, x in tensors().items() if ".mlp." not in name}
    mlp = "model.layers.0.mlp"
    for number in range(4):
        expert = f"{mlp}.experts.{number}"
        found |= {
            f"{expert}.{name}_proj.weight": floats(COLUMNS, COLUMNS, seed=number) for name in ("gate", "up", "down")
        }
    found[f"{mlp}.gate.weight"] = floats(4, COLUMNS)
    stated = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": COLUMNS}
    counts = {"num_experts": 4, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **stated, **counts}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"format": "pt"}, found))


def experts(folder: Path) -> None:
    """A quantized model with experts, with its configuration and record."""
    quantized(folder, write=with_experts)


def quantized(folder: Path, *more: str, write: Callable[[Path], None] = model) -> None:
    """A quantized model; raises RuntimeError if it cannot be made."""
    source = folder / "source"
    source.mkdir()
    write(source)
    made = folder / "made"
    code = run(["quantize", str(source), "--format", "nvfp4", "-o", str(made), *more])
    if code:
        raise RuntimeError(f"the valid input cannot be made: exit code {code}")
    for path in made.iterdir():
        path.rename(folder / path.name)
    made.rmdir()
    for path in source.iterdir():
        path.unlink()
    source.rmdir()


def record(folder: Path) -> None:
    """A quantized model with its record."""
    quantized(folder)


def progress(folder: Path) -> None:
    """One of two shares of an output, and both shares, with the progress of their runs."""
    source = folder / "source"
    source.mkdir()
    model(source)
    for made, share in (("made", "1/2"), ("both", "1/2"), ("both", "2/2")):
        words = ["--max-shard-size", "6K", "--shard-range", share]
        code = run(["quantize", str(source), "--format", "nvfp4", "-o", str(folder / made), *words])
        if code:
            raise RuntimeError(f"the valid input cannot be made: exit code {code}")


def causal(folder: Path) -> None:
    """A model that transformers loads."""
    ones = {
        f"model.layers.0.{name}_layernorm.weight": np.ones(COLUMNS, np.float32) for name in ("input", "post_attention")
    }
    words = {name: floats(256, COLUMNS) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 256}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"format": "pt"}, tensors() | ones | words))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("safetensors", model, "*.safetensors"),
        Kind("gguf", gguf, "*.gguf"),
        Kind("npy", npy, "*.npy"),
        Kind("npz", npz, "*.npz"),
        Kind("npz-deflated", npz_deflated, "*.npz"),
        Kind("pt", pytorch, "*.pt"),
        Kind("pt-legacy", legacy, "*.pt"),
        Kind("index", indexed, "*.index.json"),
        Kind("config", config, "config.json"),
        Kind("recipe", recipe, "recipe.toml"),
        Kind("capture", capture, "*.safetensors"),
        Kind("record", record, "mxcli.json"),
        Kind("quantized", quantized, "model*"),
        Kind("experts", experts, "config.json", every=4),
        Kind("progress", progress, "*/*progress*"),
        Kind("causal", causal, "*", every=40),
    )
}
