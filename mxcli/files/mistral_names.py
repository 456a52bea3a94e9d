"""Mistral's own checkpoints with the names, order of rows and configuration of Hugging Face."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.gguf_metadata import HeadSizes
from mxcli.files.gguf_model import halved
from mxcli.files.gguf_names import HuggingFaceNames
from mxcli.files.outline import Destination
from mxcli.files.plain import read_json_object
from mxcli.files.tensors import TensorInfo

PARAMS = "params.json"
_OF_MODEL = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
"""Names of modules in Mistral's files and in checkpoints of Hugging Face, of a model and of each of its layers."""
_NAME = re.compile(r"(?:layers\.(?P<layer>\d{1,9})\.)?(?P<module>[a-z_]+(?:\.w[\dqkvo])?)\.weight")
_OF_CACHE = re.compile(r"\.attention\.(kv?|q|v)_fake_quantizer\.qscale_act$")
"""Scales of the quantized KV cache and of queries, which belong to no weight."""
_NUMBERS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "head_dim": "head_dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "vocab_size": "vocab_size",
}
"""Numbers of a config.json, and the keys of params.json that state them; all are required."""
_POSITIONS = ("max_position_embeddings", "max_seq_len")
_OTHERS = {
    "moe": "experts",
    "vision_encoder": "an image encoder",
    "multimodal": "an encoder",
    "yarn": "scaled rotations",
}
"""Keys of params.json of models that have more than the layers of a Mistral."""
DEFAULT_POSITIONS, DEFAULT_ROPE_BASE = 128_000, 10_000.0


def hugging_face_names_of_mistral(source: Checkpoint) -> HuggingFaceNames:
    """Return the names in Hugging Face of the tensors of a checkpoint of Mistral, quantized ones by their weights.

    Raises RefusedError with every reason why they are not known, InputError if params.json cannot be read.
    """
    path = source.root / PARAMS
    if not path.is_file():
        raise RefusedError(f"there is no {PARAMS} next to it")
    params = read_json_object(path)
    config = config_of_params(params)
    sizes = HeadSizes(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"])
    targets: dict[str, Destination | None] = {}
    problems: list[str] = []
    for name, info in source.tensors.items():
        try:
            targets[name] = None if _OF_CACHE.search(name) else _target(info, sizes)
        except ValueError as fault:
            problems.append(f"{printable(name)}: {fault}.")
    if problems:
        raise together(RefusedError, "Names of Hugging Face are not known", problems)
    return HuggingFaceNames({**config, "dtype": _dtype_of(params)}, targets)


def config_of_params(params: Mapping[str, object]) -> dict[str, Any]:
    """Return the config.json of the model that a params.json describes. Raises RefusedError for one of other layers,
    InputError for a number that is missing."""
    other = next((f"{key}, {what}" for key, what in _OTHERS.items() if params.get(key)), None)
    if other is not None:
        raise RefusedError(f"{PARAMS} states {other}, and the names of such models are not known")
    found: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    for key, own in _NUMBERS.items():
        number = params.get(own)
        if not isinstance(number, int | float) or isinstance(number, bool) or number <= 0:
            raise InputError(f"{PARAMS}: {own} is {printable(number)}; a number is needed.")
        found[key] = number
    positions = next((params[key] for key in _POSITIONS if isinstance(params.get(key), int)), DEFAULT_POSITIONS)
    window = params.get("sliding_window")
    return found | {
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rope_theta": params.get("rope_theta", DEFAULT_ROPE_BASE),
        "sliding_window": window if isinstance(window, int) else None,
        "tie_word_embeddings": params.get("tied_embeddings") is True,
    }


def _dtype_of(params: Mapping[str, object]) -> str:
    stated = params.get("dtype")
    return stated if isinstance(stated, str) else "bfloat16"


def _target(info: TensorInfo, sizes: HeadSizes) -> Destination:
    """Return the name of a tensor, with the rows of its heads in halves. Raises ValueError if it has none."""
    match = _NAME.fullmatch(info.name)
    modules = _OF_MODEL if match is None or match["layer"] is None else _OF_LAYER
    if match is None or match["module"] not in modules:
        raise ValueError("no tensor of this name is known")
    prefix = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
    name = f"{prefix}{modules[match['module']]}.weight"
    if match["module"] not in ("attention.wq", "attention.wk"):
        return Destination(name, info.dtype)
    heads = sizes.heads if match["module"] == "attention.wq" else sizes.key_heads
    if info.shape[0] != heads * sizes.size or sizes.size % 2:
        raise ValueError(f"its {info.shape[0]:,} rows are not {heads:,} heads of {sizes.size:,}, an even number")
    return Destination(name, info.dtype, partial(halved, heads=heads))
