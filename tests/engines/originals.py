"""Whole models that producers quantize, and how their files differ from ours, byte by byte."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def _trained(rows: int, columns: int, random: np.random.Generator, spread: float = 0.02) -> np.ndarray:
    """Return values spread as in trained weights: rows of different sizes, and some outliers."""
    values = random.standard_normal((rows, columns)) * spread * 2.0 ** random.normal(0, 0.7, (rows, 1))
    return values * np.where(random.random((rows, columns)) < 0.002, 12.0, 1.0)


def _zeros(values: np.ndarray, random: np.random.Generator) -> None:
    values[0] = 0.0
    values[9, values.shape[1] // 2 :] = 0.0


def _negative_zeros(values: np.ndarray, random: np.random.Generator) -> None:
    values[1] = -0.0
    values[2] = random.choice((-0.0, 0.0), values.shape[1])
    values[8, ::2] = -0.0


def _ties(values: np.ndarray, random: np.random.Generator) -> None:
    steps = random.integers(-24, 25, (2, values.shape[1]))
    values[3], values[4] = steps[0] / 4, steps[1] / 256
    values[3, 0], values[4, 0] = 6.0, 6 / 64


def _tiny(values: np.ndarray, random: np.random.Generator) -> None:
    columns = values.shape[1]
    values[5] = random.standard_normal(columns) * 2.0**-120
    subnormal = random.standard_normal(columns) * 2.0**-128
    values[6] = np.copysign(np.maximum(np.abs(subnormal), 2.0**-132), subnormal)
    values[7] = random.integers(-3, 4, columns) * 2.0**-133


def _binades(values: np.ndarray, random: np.random.Generator) -> None:
    values[10:42] *= 2.0 ** np.arange(-40.0, -8.0)[:, None]
    values[42:74, ::32] = (2.0 ** np.arange(-16.0, 0.0, 0.5) * (1 + np.arange(32) / 32))[:, None]


EDGES = {"zeros": _zeros, "negative zeros": _negative_zeros, "ties": _ties, "tiny": _tiny, "binades": _binades}


def llama(
    folder: Path, dtype: str = "BF16", without: Collection[str] = (), equal_amax: bool = False, spread: float = 0.02
) -> Path:
    """A whole Llama with seeded weights in BF16 or F32: values as trained, and in its first layer the edges too.

    With `equal_amax` the layers that loaders fuse would have the same tensor scale on their own.
    """
    random = np.random.default_rng(7)
    tensors: dict[str, Tensor] = {}

    def add(name: str, values: np.ndarray) -> None:
        bits = values.astype(np.float32).view(np.uint32)
        tensors[name] = ("F32", bits.view(np.float32)) if dtype == "F32" else ("BF16", (bits >> 16).astype(np.uint16))

    add("model.embed_tokens.weight", _trained(VOCABULARY, HIDDEN, random))
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            values = _trained(*shape, random, spread)
            for edge, make in EDGES.items():
                if layer == 0 and edge not in without:
                    make(values, random)
            if equal_amax:
                values[-1, -1] = 8.0
            add(f"model.layers.{layer}.{name}.weight", values)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{name}.weight", np.ones(HIDDEN))
    add("model.norm.weight", np.ones(HIDDEN))
    add("lm_head.weight", _trained(VOCABULARY, HIDDEN, random))
    named = {"F32": "float32", "BF16": "bfloat16"}[dtype]
    return write_model(folder, tensors, {**CONFIG, "dtype": named, "torch_dtype": named})


def ours(
    source: Path, output: Path, format: str, layout: str, dialect: str, scale_rounding: str | None = None
) -> dict[str, Raw]:
    """What `mxcli quantize --as` writes of a model."""
    checkpoint = open_checkpoint(source)
    options = Options(format, Rules(dialect=dialect, nonfinite="error", scale_rounding=scale_rounding), layout=layout)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())
    return read_raw(output / "model.safetensors")


def theirs(folder: Path) -> dict[str, Raw]:
    """All tensors that a producer wrote in a folder or below."""
    return {name: raw for path in sorted(folder.rglob("*.safetensors")) for name, raw in read_raw(path).items()}


def differing(one: Mapping[str, Raw], other: Mapping[str, Raw]) -> dict[str, int | str]:
    """How many bytes differ in each tensor, or what else differs; nothing for equal tensors."""
    found: dict[str, int | str] = dict.fromkeys(one.keys() ^ other.keys(), "only in one")
    for name in one.keys() & other.keys():
        (dtype, shape, content), (other_dtype, other_shape, other_content) = one[name], other[name]
        if (dtype, shape) != (other_dtype, other_shape):
            found[name] = f"{dtype} {shape}, {other_dtype} {other_shape}"
        elif content != other_content:
            pair = (np.frombuffer(each, np.uint8) for each in (content, other_content))
            found[name] = int(np.count_nonzero(np.not_equal(*pair)))
    return found
