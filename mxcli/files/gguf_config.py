"""The config.json of a model, from the header of its GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from mxcli.errors import RefusedError, printable, together
from mxcli.files.gguf import Scalar
from mxcli.files.gguf_metadata import DEFAULT_ROPE_BASE, head_sizes, rope_factors
from mxcli.files.gguf_model import FAMILIES, ROPE_FACTORS, Family
from mxcli.files.tensors import Array, TensorInfo

ARCHITECTURE = "general.architecture"
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_BIASED = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
"""Settings of models without other biases, and the modules of a layer that have them with it."""
_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16"}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
LLAMA_3_FACTORS = (8.0, 32.0, 16.0, 4.0)
"""Factors of rope scaling of kind llama3 that models have, with the other numbers as in all of them."""


@dataclass(frozen=True, slots=True)
class Stated:
    """A number of config.json and the key of the header, after its architecture, that states it."""

    key: str
    header: str
    kind: type = int
    required: bool = True


NUMBERS = (
    Stated("num_hidden_layers", "block_count"),
    Stated("hidden_size", "embedding_length"),
    Stated("intermediate_size", "feed_forward_length"),
    Stated("num_attention_heads", "attention.head_count"),
    Stated("num_key_value_heads", "attention.head_count_kv", required=False),
    Stated("head_dim", "attention.key_length", required=False),
    Stated("max_position_embeddings", "context_length"),
    Stated("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
    Stated("rope_theta", "rope.freq_base", float, required=False),
)
OF_EXPERTS = (
    Stated("num_experts", "expert_count"),
    Stated("num_experts_per_tok", "expert_used_count"),
    Stated("moe_intermediate_size", "expert_feed_forward_length"),
)
_ALL_HAVE_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""What the architectures with experts have in common."""
_COMPARED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size")
"""Numbers of which a config.json next to the file must have the same."""
TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
Header = Mapping[str, Scalar]
Values = Callable[[TensorInfo], Array]


def config_of(
    header: Header, tensors: Mapping[str, TensorInfo], stated: Mapping[str, object] | None, values: Values
) -> dict[str, object]:
    """Return the config.json of the model in a GGUF file: the one `stated` next to it, if it is of this model, else
    one of the header's settings; `values` reads a tensor.

    Raises RefusedError with every reason why neither describes it.
    """
    architecture = str(header.get(ARCHITECTURE, ""))
    if stated is not None and "model_type" in stated:
        problems = list(_differences(stated, header, architecture))
        if problems:
            raise together(RefusedError, "The config.json next to the file is of another model", problems)
        return dict(stated)
    family = next((row for row in FAMILIES.values() if row.architecture == architecture), None)
    if family is None:
        known = ", ".join(dict.fromkeys(row.architecture for row in FAMILIES.values()))
        raise RefusedError(
            f"its architecture is '{printable(architecture)}', and names and order of rows are known for {known}"
        )
    return _made(family, header, tensors, values)


def _differences(stated: Mapping[str, object], header: Header, architecture: str) -> Iterator[str]:
    """Yield why a config.json does not describe a file."""
    family = FAMILIES.get(str(stated["model_type"]))
    if family is None:
        known = ", ".join(FAMILIES)
        yield (
            f"the model_type in config.json is '{printable(stated['model_type'])}', and names and order of rows are "
            f"known for {known}"
        )
        return
    if architecture and architecture != family.architecture:
        yield (
            f"the model_type in config.json is '{printable(stated['model_type'])}', and the architecture of the file "
            f"'{printable(architecture)}'"
        )
        return
    for row in NUMBERS:
        found = header.get(f"{architecture}.{row.header}")
        if row.key in _COMPARED and found is not None and stated.get(row.key, found) != found:
            yield f"{row.key} is {printable(stated[row.key])} in config.json, and {printable(found)} in the file"


def _made(family: Family, header: Header, tensors: Mapping[str, TensorInfo], values: Values) -> dict[str, object]:
    name = family.architecture
    numbers = (*NUMBERS, *(OF_EXPERTS if family.experts else ()))
    missing = [f"{name}.{row.header}" for row in numbers if row.required]
    missing = [key for key in missing if not _is_number(header.get(key))]
    problems = (
        [f"its header does not state {', '.join(missing)}, and there is no config.json next to it"] if missing else []
    )
    if header.get(f"{name}.expert_count") and not family.experts:
        problems.append("it has experts, and the names of experts in it are not known")
    if _EMBEDDING not in tensors:
        problems.append(f"it has no {_EMBEDDING}")
    if problems:
        raise together(RefusedError, "what its config.json needs is not known", problems)
    found: dict[str, object] = {"architectures": [_CLASSES[family.model_type]], "model_type": family.model_type}
    for row in numbers:
        number = header.get(f"{name}.{row.header}")
        if _is_number(number):
            found[row.key] = _shortest(number) if row.kind is float else number
    if family.interleaved_rope and "head_dim" not in found and _is_number(header.get(f"{name}.rope.dimension_count")):
        found["head_dim"] = header[f"{name}.rope.dimension_count"]
    embedding = tensors[_EMBEDDING]
    found |= {
        "hidden_act": "silu",
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": _HEAD not in tensors,
        **_biases(family, tensors),
        **(_ALL_HAVE_EXPERTS if family.experts else {}),
        "dtype": _TORCH_DTYPES.get(embedding.dtype, "float32"),
        "rope_theta": found.get("rope_theta", DEFAULT_ROPE_BASE),
    }
    tokens = {key: header.get(f"tokenizer.ggml.{each}") for key, each in TOKENS.items()}
    found |= {key: number for key, number in tokens.items() if number is not None}
    return found | _rope_scaling(name, header, found, tensors, values)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shortest(number: float) -> float:
    """Return a number of binary32 as the one with the fewest digits that is the same in binary32."""
    return float(str(np.float32(number)))


def _biases(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return the settings of biases. Raises RefusedError for biases of some projections that no setting describes."""
    if family.biased:
        return {}
    found: dict[str, object] = {}
    for key, modules in _BIASED.items():
        there = [module for module in modules if f"blk.0.{module}.bias" in tensors]
        if there and len(there) < len(modules):
            raise RefusedError(f"it has biases of {', '.join(there)} without others, which config.json cannot state")
        found |= {key: True} if there else {}
    return found


def _rope_scaling(
    name: str, header: Header, config: Mapping[str, object], tensors: Mapping[str, TensorInfo], values: Values
) -> dict[str, object]:
    """Return the scaling of the rotary embedding. Raises RefusedError for one that the header does not state in
    full."""
    prefix = f"{name}.rope.scaling."
    stated = {key.removeprefix(prefix): value for key, value in header.items() if key.startswith(prefix)}
    stated.pop("finetuned", None)
    kind = stated.get("type", "none")
    if ROPE_FACTORS in tensors:
        return {"rope_scaling": _llama_3(config, values(tensors[ROPE_FACTORS]))}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn") or stated.keys() - {"type", "factor", "original_context_length"}:
        shown = ", ".join(f"{key} {printable(value)}" for key, value in stated.items())
        raise RefusedError(f"its rope scaling ({shown}) has no known form in config.json")
    scaling = {"rope_type": kind, "factor": stated.get("factor", 1.0)}
    if "original_context_length" in stated:
        scaling["original_max_position_embeddings"] = stated["original_context_length"]
    return {"rope_scaling": scaling}


def _llama_3(config: Mapping[str, object], factors: Array) -> dict[str, object]:
    """Return the scaling whose factors of frequencies a file holds. Raises RefusedError if none of the usual ones
    is it."""
    for factor in LLAMA_3_FACTORS:
        scaling: dict[str, object] = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        made = rope_factors({**config, "rope_scaling": scaling}, head_sizes(config))
        if made is not None and made.shape == factors.shape and np.allclose(made, factors, rtol=1e-6, atol=0):
            return scaling
    raise RefusedError(
        f"its {ROPE_FACTORS} are not the factors of a usual rope scaling of kind llama3: put the model's config.json "
        "next to it"
    )
