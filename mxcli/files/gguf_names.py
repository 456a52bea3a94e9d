"""Checkpoints with the names, dtypes and row order that their tensors have in a GGUF file, and the other way round."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint, read
from mxcli.files.gguf import read_settings, shape_of_blocks
from mxcli.files.gguf_config import config_of
from mxcli.files.gguf_metadata import HeadSizes, head_sizes, rope_factors
from mxcli.files.gguf_model import FAMILIES, ROPE_FACTORS, halved, outline_of
from mxcli.files.models.known import known_model
from mxcli.files.outline import Destination
from mxcli.files.roles import role_of
from mxcli.files.structure import tied_by_config
from mxcli.files.tensors import IN_MEMORY, Array, TensorInfo, byte_count


def named_as_gguf(source: Checkpoint) -> Checkpoint:
    """Return a plain checkpoint as a GGUF file holds it; a tensor is read, and its rows reordered, when it is read.

    Raises RefusedError for a model whose names in GGUF files are not known.
    """
    kind = (source.config or {}).get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = "it has no config.json with a model_type" if kind is None else f"its model_type is '{printable(kind)}'"
        raise RefusedError(
            f"{printable(source.where)}: cannot be compared with a GGUF file: {what}, and the names of its tensors in "
            f"GGUF files are known for {', '.join(FAMILIES)} only. Compare with a GGUF file of the same model."
        )
    aliases = {alias: replace(source.tensors[name], name=alias) for alias, name in _ties(source)}
    try:
        outline = outline_of(source.config, (aliases | dict(source.tensors)).values())
    except (RefusedError, InputError) as error:
        headline = f"{printable(source.where)}: cannot be compared with a GGUF file"
        raise together(RefusedError, headline, [f"{headline}: {reason}" for reason in error.reasons]) from error
    found: dict[str, tuple[TensorInfo, Destination]] = {}
    for name, info in source.tensors.items():
        target = outline.targets[name]
        if target is not None:
            found[target.name] = info, target
    tensors = {name: _as_stored(name, target.dtype, info) for name, (info, target) in found.items()}
    first = next(iter(source.tensors.values()))
    for name, values in outline.constants.items():
        tensors[name] = _as_stored(name, "F32", replace(first, shape=values.shape))

    def decode(info: TensorInfo) -> Array:
        if info.name in outline.constants:
            return outline.constants[info.name]
        stored, target = found[info.name]
        return target.of(read(source, stored), stored.dtype)

    decoders: dict[Path, Callable[[TensorInfo], Array]] = dict.fromkeys(source.files, decode)
    return replace(
        source,
        tensors=tensors,
        tied={
            one.name: other.name
            for alias, name in source.tied.items()
            if (one := outline.targets.get(alias)) is not None and (other := outline.targets.get(name)) is not None
        },
        decoders=decoders,
        stored=source.stored or source,
    )


def _ties(source: Checkpoint) -> list[tuple[str, str]]:
    """Return the aliases that are not stored, with the names of what they stand for."""
    return [
        (alias, name) for alias, name in source.tied.items() if alias not in source.tensors and name in source.tensors
    ]


def _as_stored(name: str, dtype: str, info: TensorInfo) -> TensorInfo:
    role = role_of(name, info.shape, dtype)
    return TensorInfo(name, dtype, info.shape, role, info.file, IN_MEMORY, byte_count(dtype, info.shape))


_OF_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""Names of modules in GGUF files and in checkpoints of Hugging Face, of a model and of each of its layers; those of
stacks of experts are of all experts together."""
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,9})\.)?(?P<module>[a-z_]+)(?P<ending>\.(?:weight|bias))")


@dataclass(frozen=True, slots=True)
class HuggingFaceNames:
    """The tensors of a GGUF file as Hugging Face has them: the configuration of the model, and the name and order of
    rows of each tensor by its name in the file (None: left out, since loaders compute it)."""

    config: dict[str, object]
    targets: Mapping[str, Destination | None]


def hugging_face_names(source: Checkpoint) -> HuggingFaceNames:
    """Return the names in Hugging Face of the tensors of a GGUF file, quantized ones by their weights.

    Raises RefusedError with every reason why they are not known.
    """
    stored = source.stored or source
    header = read_settings(source.files[0])
    config = config_of(header, stored.tensors, source.config, partial(read, stored))
    family, sizes = FAMILIES[str(config["model_type"])], head_sizes(config)
    targets: dict[str, Destination | None] = {}
    problems = []
    for name, info in source.tensors.items():
        try:
            if name == ROPE_FACTORS:
                _check_factors(config, sizes, read(source, info))
                targets[name] = None
            else:
                rows = family.interleaved_rope
                targets[name] = _hugging_face_target(info, sizes if rows else None)
        except ValueError as fault:
            problems.append(f"{printable(name)}: {fault}.")
    if problems:
        raise together(RefusedError, "Names of Hugging Face are not known", problems)
    return HuggingFaceNames(config, targets)


def _check_factors(config: Mapping[str, object], sizes: HeadSizes, found: Array) -> None:
    made = rope_factors(config, sizes)
    if made is None or made.shape != found.shape or not np.allclose(made, found, rtol=1e-6, atol=0):
        raise ValueError("they are not the factors that the rope scaling in config.json makes")


def _hugging_face_target(info: TensorInfo, sizes: HeadSizes | None) -> Destination:
    """Return the name of a tensor, with its rows of heads in halves if `sizes` are given. Raises ValueError if it has
    none."""
    match = _NAME.fullmatch(info.name)
    modules = _OF_MODEL if match is None or match["layer"] is None else _OF_LAYER
    if match is None or match["module"] not in modules:
        raise ValueError("no tensor of this name is known")
    prefix = "" if match["layer"] is None else f"model.layers.{int(match['layer'])}."
    name = f"{prefix}{modules[match['module']]}{match['ending']}"
    if sizes is None or match["module"] not in ("attn_q", "attn_k"):
        return Destination(name, info.dtype)
    heads = sizes.heads if match["module"] == "attn_q" else sizes.key_heads
    shape = shape_of_blocks(info.block_type, info.shape) if info.block_type else info.shape
    if shape[0] != heads * sizes.size or sizes.size % 2:
        raise ValueError(f"its {shape[0]:,} rows are not {heads:,} heads of {sizes.size:,}, an even number")
    return Destination(name, info.dtype, partial(halved, heads=heads))


def named_as_hugging_face(source: Checkpoint) -> Checkpoint:
    """Return a plain checkpoint from a GGUF file with the names, order of rows and configuration of Hugging Face; the
    rows of a tensor are put in order when it is read.

    Raises RefusedError with every reason why they are not known.
    """
    known = hugging_face_names(source)
    found = {
        target.name: (info, target)
        for name, info in source.tensors.items()
        if (target := known.targets[name]) is not None
    }

    def decode(info: TensorInfo) -> Array:
        stored, target = found[info.name]
        return target.of(read(source, stored), stored.dtype)

    model = known_model(known.config)
    tensors = model.with_roles({name: _as_stored(name, info.dtype, info) for name, (info, _) in found.items()})
    return replace(
        source,
        tensors=tensors,
        config=known.config,
        model=model,
        tied=tied_by_config(tensors, known.config)[0],
        decoders=dict.fromkeys(source.files, decode),
        stored=source.stored or source,
    )
