"""Whole models that producers quantize, and how their files differ from ours, byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tiny_models import Raw, Tensor, read_raw, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

HIDDEN, WIDE, KEYS, VOCABULARY, LAYERS = 256, 512, 128, 128, 2
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (WIDE, HIDDEN), "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}  # fmt: skip
MATRICES = tuple(f"model.layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in SHAPES)


def _trained(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Return values spread as in trained weights: rows of different sizes, and some outliers."""
    values = random.standard_normal((rows, columns)) * 0.02 * 2.0 ** random.normal(0, 0.7, (rows, 1))
    return values * np.where(random.random((rows, columns)) < 0.002, 12.0, 1.0)


def _with_edges(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Return values with rows of zeros of either sign, ties, tiny values and every binade that scales reach."""
    values = _trained(rows, columns, random)
    values[0], values[1] = 0.0, -0.0
    values[2] = random.choice((-0.0, 0.0), columns)
    values[3] = random.integers(-24, 25, columns) / 4
    values[4] = random.integers(-24, 25, columns) / 256
    values[5] = random.standard_normal(columns) * 2.0**-120
    values[6] = random.standard_normal(columns) * 2.0**-128
    values[7] = random.integers(-3, 4, columns) * 2.0**-133
    values[8, ::2] = -0.0
    values[9, columns // 2 :] = 0.0
    values[10:42] *= 2.0 ** np.arange(-40.0, -8.0)[:, None]
    values[42:74, ::32] = 2.0 ** np.arange(-16.0, 0.0, 0.5)[:, None] * (1 + np.arange(32) / 32)[:, None]
    return values


def llama(folder: Path, dtype: str = "BF16", edges: bool = True) -> Path:
    """A whole Llama with seeded weights, in BF16 or F32; the edges are in every matrix of its first layer."""
    random = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}

    def add(name: str, values: np.ndarray) -> None:
        bits = values.astype(np.float32).view(np.uint32)
        tensors[name] = ("F32", bits.view(np.float32)) if dtype == "F32" else ("BF16", (bits >> 16).astype(np.uint16))

    add("model.embed_tokens.weight", _trained(VOCABULARY, HIDDEN, random))
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            make = _with_edges if edges and layer == 0 else _trained
            add(f"model.layers.{layer}.{name}.weight", make(*shape, random))
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{name}.weight", np.ones(HIDDEN))
    add("model.norm.weight", np.ones(HIDDEN))
    add("lm_head.weight", _trained(VOCABULARY, HIDDEN, random))
    named = {"F32": "float32", "BF16": "bfloat16"}[dtype]
    return write_model(folder, tensors, {**CONFIG, "dtype": named, "torch_dtype": named})


def ours(source: Path, output: Path, format: str, layout: str, dialect: str, **rules: str) -> dict[str, Raw]:
    """What `mxcli quantize --as` writes of a model."""
    checkpoint = open_checkpoint(source)
    options = Options(format, Rules(dialect=dialect, **rules), layout=layout)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())
    return read_raw(output / "model.safetensors")


def theirs(folder: Path) -> dict[str, Raw]:
    """All tensors of a producer's folder."""
    return {name: raw for path in sorted(folder.glob("*.safetensors")) for name, raw in read_raw(path).items()}


def differing(one: Mapping[str, Raw], other: Mapping[str, Raw]) -> dict[str, int | str]:
    """How many bytes differ in each tensor, or what else differs; nothing for equal tensors."""
    found: dict[str, int | str] = {name: "only in one" for name in one.keys() ^ other.keys()}
    for name in one.keys() & other.keys():
        (dtype, shape, content), (other_dtype, other_shape, other_content) = one[name], other[name]
        if (dtype, shape) != (other_dtype, other_shape):
            found[name] = f"{dtype} {shape}, {other_dtype} {other_shape}"
        elif content != other_content:
            pair = (np.frombuffer(each, np.uint8) for each in (content, other_content))
            found[name] = int(np.count_nonzero(np.not_equal(*pair)))
    return found
