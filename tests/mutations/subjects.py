"""Outputs to damage: small models with the structure of trained ones, quantized for every layout."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from command_line import CAPTURES, SAMPLE
from tiny_models import LLAMA, Tensor, bf16, read_raw, write_model

from mutations.outputs import Output
from mxcli.cli.app import run

LAYERS = 3
_CARRIED = {
    "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False}),
    "tokenizer.json": json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}),
    "tokenizer_config.json": json.dumps({"model_max_length": 128, "tokenizer_class": "PreTrainedTokenizerFast"}),
}


def called(*words: object) -> tuple[int, str, str]:
    """Run mxcli in this process; return its exit code, stdout and stderr."""
    out, said = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        code = run([str(word) for word in words])
    return code, out.getvalue(), said.getvalue()


def matrix(random: np.random.Generator, *shape: int, std: float = 0.02) -> Tensor:
    """A weight as trained ones are: the size of rows and columns varies, and a few values stand out."""
    rows, columns = shape[-2:]
    values = random.standard_normal(shape) * std
    values = values * np.exp(0.3 * random.standard_normal((rows, 1))) * np.exp(0.2 * random.standard_normal(columns))
    flat = values.reshape(-1)
    flat[random.choice(flat.size, 6, replace=False)] *= random.uniform(5, 15, 6)
    return bf16(values)


def norm(random: np.random.Generator, size: int) -> Tensor:
    return bf16(1 + 0.1 * random.standard_normal(size))


def _attention(random: np.random.Generator, at: str, hidden: int, keys: int) -> dict[str, Tensor]:
    parts = {"q": (hidden, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, hidden)}
    return {f"{at}.self_attn.{part}_proj.weight": matrix(random, *shape) for part, shape in parts.items()}


def _norms(random: np.random.Generator, at: str, hidden: int) -> dict[str, Tensor]:
    return {f"{at}.{name}.weight": norm(random, hidden) for name in ("input_layernorm", "post_attention_layernorm")}


def _ends(random: np.random.Generator, hidden: int, vocabulary: int) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": matrix(random, vocabulary, hidden, std=0.05),
        "lm_head.weight": matrix(random, vocabulary, hidden),
        "model.norm.weight": norm(random, hidden),
    }


def llama(folder: Path, seed: int, hidden: int = 128, wide: int = 256, keys: int = 64) -> Path:
    """A dense model whose embedding is longer than 1 MiB."""
    random = np.random.default_rng(seed)
    vocabulary = 5 * 2**17 // hidden
    tensors = _ends(random, hidden, vocabulary)
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        tensors |= _attention(random, at, hidden, keys) | _norms(random, at, hidden)
        tensors |= {f"{at}.mlp.{part}_proj.weight": matrix(random, wide, hidden) for part in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = matrix(random, hidden, wide)
    config = {
        **LLAMA,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": keys // 32,
        "head_dim": 32,
        "vocab_size": vocabulary,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    return write_model(folder, tensors, config, _CARRIED)


def mixtral(folder: Path, seed: int, hidden: int = 128, wide: int = 128, experts: int = 4) -> Path:
    """A model with experts, each in tensors of its own."""
    random = np.random.default_rng(seed)
    vocabulary = 256
    tensors = _ends(random, hidden, vocabulary)
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        tensors |= _attention(random, at, hidden, hidden) | _norms(random, at, hidden)
        tensors[f"{at}.block_sparse_moe.gate.weight"] = matrix(random, experts, hidden)
        for expert in range(experts):
            for part, shape in {"w1": (wide, hidden), "w2": (hidden, wide), "w3": (wide, hidden)}.items():
                tensors[f"{at}.block_sparse_moe.experts.{expert}.{part}.weight"] = matrix(random, *shape)
    config = {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocabulary,
    }
    return write_model(folder, tensors, config, _CARRIED)


def gpt_oss(folder: Path, seed: int, hidden: int = 128, wide: int = 128, experts: int = 4) -> Path:
    """A model whose experts are stacked."""
    random = np.random.default_rng(seed)
    vocabulary = 256
    tensors = _ends(random, hidden, vocabulary)
    for number in range(LAYERS):
        at = f"model.layers.{number}"
        tensors |= _attention(random, at, hidden, hidden) | _norms(random, at, hidden)
        tensors |= {f"{at}.self_attn.{part}_proj.bias": bf16(random.standard_normal(hidden) * 0.1) for part in "qkvo"}
        tensors[f"{at}.self_attn.sinks"] = bf16(random.standard_normal(4))
        tensors[f"{at}.mlp.router.weight"] = matrix(random, experts, hidden)
        tensors[f"{at}.mlp.router.bias"] = bf16(random.standard_normal(experts) * 0.1)
        tensors[f"{at}.mlp.experts.gate_up_proj"] = matrix(random, experts, hidden, 2 * wide)
        tensors[f"{at}.mlp.experts.gate_up_proj_bias"] = bf16(random.standard_normal((experts, 2 * wide)) * 0.1)
        tensors[f"{at}.mlp.experts.down_proj"] = matrix(random, experts, wide, hidden)
        tensors[f"{at}.mlp.experts.down_proj_bias"] = bf16(random.standard_normal((experts, hidden)) * 0.1)
    config = {
        **LLAMA,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "vocab_size": vocabulary,
        "layer_types": ["full_attention"] * LAYERS,
    }
    return write_model(folder, tensors, config, _CARRIED)


def sample(folder: Path, seed: int) -> Path:
    """The trained sample (independent of the seed)."""
    shutil.copytree(SAMPLE, folder)
    return folder


@dataclass(frozen=True)
class Subject:
    """An output to damage: its model, layout, format, and further options of quantize."""

    name: str
    model: Callable[[Path, int], Path]
    layout: str
    format: str
    options: tuple[str, ...] = ()
    sharded: bool = True
    other_rule: tuple[str, ...] = ("--scale-rounding", "floor")

    def quantized(self, model: Path, folder: Path, *more: str) -> Path:
        words = ["quantize", str(model), "--layout", self.layout, "--format", self.format, "-o", str(folder), "-q"]
        words += [*self.options, *more, "--device", "cpu", "--threads", "1"]
        words += ["--max-shard-size", "1500K"] if self.sharded else []
        code, _, said = called(*words)
        if code != 0:
            raise AssertionError(f"{self.name}: {' '.join(words)} exits with {code}: {said}")
        return folder

    def build(self, folder: Path, seed: int) -> Output:
        """Write the model, its output, and outputs of another seed and of another rule, to mix in."""
        model = self.model(folder / "model", seed)
        others = {}
        if self.model is not sample:
            others["seed"] = self.quantized(self.model(folder / "other-model", seed + 1), folder / "other-seed")
        if self.other_rule:
            others["rule"] = self.quantized(model, folder / "other-rule", *self.other_rule)
        return Output(self.quantized(model, folder / "output"), model, others)


WHOLE_TILES = partial(llama, keys=128)
"""Rows in multiples of 128: swizzled scales have no padding, in which damage would change nothing."""
SUBJECTS = {
    row.name: row
    for row in (
        Subject("ct-nvfp4", llama, "compressed-tensors", "nvfp4", other_rule=("--as", "modelopt")),
        Subject("ct-mxfp4", llama, "compressed-tensors", "mxfp4"),
        Subject("ct-mxfp8", llama, "compressed-tensors", "mxfp8"),
        Subject("ct-fp8-channel", llama, "compressed-tensors", "fp8_e4m3_channel", other_rule=()),
        Subject("ct-fp8-tensor", llama, "compressed-tensors", "fp8_e4m3", sharded=False, other_rule=()),
        Subject("ct-experts", mixtral, "compressed-tensors", "nvfp4", other_rule=("--as", "modelopt")),
        Subject(
            "ct-w4a4",
            sample,
            "compressed-tensors",
            "nvfp4",
            ("--captures", str(CAPTURES)),
            sharded=False,
            other_rule=("--as", "modelopt"),
        ),
        Subject("modelopt-nvfp4", llama, "modelopt", "nvfp4", other_rule=("--as", "compressed-tensors")),
        Subject("modelopt-mxfp8", llama, "modelopt", "mxfp8", sharded=False),
        Subject(
            "fp8-128x128", partial(llama, hidden=256, wide=512, keys=128), "fp8", "fp8_e4m3_128x128", other_rule=()
        ),
        Subject("fp8-mxfp8", llama, "fp8", "mxfp8", sharded=False),
        Subject("gpt-oss", gpt_oss, "gpt-oss", "mxfp4"),
        Subject("quark-mxfp4", llama, "quark", "mxfp4"),
        Subject("quark-mxfp6", llama, "quark", "mxfp6", sharded=False),
        Subject("torchao-mxfp8", WHOLE_TILES, "torchao", "mxfp8", sharded=False),
        Subject("torchao-nvfp4", WHOLE_TILES, "torchao", "nvfp4", other_rule=("--as", "modelopt")),
        Subject("gguf-mxfp4", llama, "gguf", "mxfp4", sharded=False),
        Subject("gguf-nvfp4", llama, "gguf", "nvfp4", sharded=False, other_rule=("--as", "modelopt")),
        Subject("mxcli-mxint8", llama, "mxcli", "mxint8"),
        Subject("mxcli-nvfp4", llama, "mxcli", "nvfp4", sharded=False, other_rule=("--as", "modelopt")),
        Subject("mxcli-mxfp6", llama, "mxcli", "mxfp6_e3m2"),
        Subject("mlx-mxfp4", llama, "mlx", "mxfp4"),
        Subject("comfy-nvfp4", WHOLE_TILES, "comfy", "nvfp4", sharded=False, other_rule=("--as", "modelopt")),
        Subject("torchao-plain-nvfp4", WHOLE_TILES, "torchao-plain", "nvfp4", other_rule=("--as", "modelopt")),
        Subject("auto-round-mxfp4", llama, "auto-round", "mxfp4"),
    )
}


def tied(folder: Path, seed: int) -> Path:
    """A dense model whose head is its embedding."""
    llama(folder, seed)
    tensors = {
        name: (dtype, np.frombuffer(data, np.uint16).reshape(shape))
        for name, (dtype, shape, data) in read_raw(folder / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    return write_model(folder, tensors, config)


def _variant(name: str, layout: str, format: str, *options: str, model: Callable[[Path, int], Path] = llama) -> Subject:
    return Subject(name, model, layout, format, options, sharded=layout != "gguf", other_rule=())


VARIANTS = {
    row.name: row
    for row in (
        _variant("rule of compressed-tensors", "compressed-tensors", "nvfp4", "--as", "compressed-tensors"),
        _variant("rule of modelopt", "compressed-tensors", "nvfp4", "--as", "modelopt"),
        _variant("floor", "compressed-tensors", "mxfp4", "--scale-rounding", "floor"),
        _variant("floor, 8 bits", "modelopt", "mxfp8", "--scale-rounding", "floor"),
        _variant("even", "quark", "mxfp4", "--scale-rounding", "even"),
        _variant("Hadamard", "mxcli", "nvfp4", "--hadamard", "16"),
        _variant("toward zero", "mxcli", "mxfp8", "--rounding", "toward-zero"),
        _variant("two dimensions", "mxcli", "nvfp4_2d"),
        _variant("e5m2", "mxcli", "fp8_e5m2_channel"),
        _variant("a mixture", "compressed-tensors", "nvfp4", "--exclude", "*.down_proj"),
        _variant("first layer plain", "compressed-tensors", "mxfp8", "--exclude", "*.layers.0.*"),
        _variant("head quantized", "compressed-tensors", "mxfp8", "--include", "lm_head.weight"),
        _variant("tied", "compressed-tensors", "nvfp4", model=tied),
        _variant("tied gguf", "gguf", "mxfp4", model=tied),
        _variant("experts, 8 bits", "compressed-tensors", "mxfp8", model=mixtral),
        _variant("experts of modelopt", "modelopt", "nvfp4", model=mixtral),
    )
}
"""Sound outputs of other rules and models, none of which may be called damaged."""
