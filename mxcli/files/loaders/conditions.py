"""Conditions of loader rules: partial blocks, experts, fused sets, devices, models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mxcli.files.loaders.model_types import EXPERTS_APART, RENAMED_ON_LOAD, STACKS
from mxcli.files.loaders.rule import Condition, Loading, Place
from mxcli.files.loaders.tensor_parallel import uncut
from mxcli.files.models.names import is_expert, names_of_model, title_of_model
from mxcli.files.models.served import SERVED
from mxcli.numerics.blocks import grid_shape

if TYPE_CHECKING:
    from mxcli.files.layouts.layout import Weight

_CONFIG, CLASS_NAME = "config.json", "_class_name"
GROUP = 128
"""Values of an input that engines quantize together for FP8 by blocks."""
_OWN_NAME = re.compile(r"model\.(language_model|vision_tower|visual|audio_tower|multi_modal_projector)\.")
"""The beginnings of names that transformers itself gives."""
_MLP = re.compile(r"\.(ffn_|mlp\.)")
_SHARED = ".shared_expert."
Places = Sequence[Place]


def _each(describe: Callable[[Weight], str | None]) -> Callable[[Loading, Sequence[Weight]], Places]:
    """Return a function that finds the weights of which `describe` returns a value."""

    def places(loading: Loading, weights: Sequence[Weight]) -> Places:
        return [Place(weight.name, value) for weight in weights if (value := describe(weight)) is not None]

    return places


def _partial_inputs(weight: Weight) -> str | None:
    columns = weight.shape[-1]
    return f"{columns:,} inputs in groups of {GROUP}" if columns % GROUP else None


def _has_unequal_blocks(weight: Weight) -> bool:
    """Return whether some dimension has several blocks, the last of them partial."""
    sizes = zip(weight.shape[-2:], weight.format.block, strict=True)
    return any(block is not None and length > block and length % block > 0 for length, block in sizes)


def _divides_into_grid(weight: Weight) -> bool:
    """Return whether a weight divides into as many equal blocks as it has scales."""
    grid = grid_shape(weight.format, weight.shape)[-2:]
    return all(length % count == 0 for length, count in zip(weight.shape[-2:], grid, strict=True))


def _uneven(weight: Weight, *, fits: bool) -> str | None:
    if not _has_unequal_blocks(weight) or _divides_into_grid(weight) != fits:
        return None
    return f"{list(weight.shape)} ends in a partial block of {weight.format.block_name}"


LATENT = "kv_a_proj_with_mqa"
"""A member of a set that SGLang joins without cutting it, so that its blocks may be partial."""


def _fused_rows(loading: Loading, weights: Sequence[Weight], *, last: bool) -> Iterator[Place]:
    """Yield members of fused sets that end within a block of rows; the last one of a set only if `last`."""
    by_name = {weight.name: weight for weight in weights}
    for key, members in loading.fused.items():
        quantized = [by_name[name] for name in members if name in by_name]
        if last and LATENT in key:
            continue
        for weight in quantized if last else quantized[:-1]:
            rows = weight.format.block[0] or 1
            if len(quantized) > 1 and rows > 1 and weight.shape[-2] % rows:
                yield Place(weight.name, f"{weight.shape[-2]:,} rows in blocks of {rows}")


def _torn(loading: Loading, weights: Sequence[Weight]) -> Iterator[Place]:
    formats = {weight.name: weight.format.name for weight in loading.weights}
    own = {weight.name for weight in weights}
    for key, members in loading.fused.items():
        found = {name: formats.get(name, "plain") for name in members}
        if len(set(found.values())) > 1 and not own.isdisjoint(found):
            yield Place(key, ", ".join(f"{name.split('.')[-2]} {format}" for name, format in found.items()))


def _unshared(loading: Loading, weights: Sequence[Weight]) -> Places:
    own = {weight.name for weight in weights}
    shown = (key for key in loading.unshared if key not in loading.fused or not own.isdisjoint(loading.fused[key]))
    return [Place(key, "different scales") for key in shown]


def _expert(weight: Weight) -> str | None:
    return "an expert" if is_expert(weight.name) else None


def _expert_of_several_blocks(weight: Weight) -> str | None:
    grid = grid_shape(weight.format, weight.shape)
    several = any(count > 1 for count in grid)
    return f"an expert of {' x '.join(map(str, grid))} blocks" if is_expert(weight.name) and several else None


def _partial(weight: Weight) -> str | None:
    partial = any(length % GROUP for length in weight.shape[-2:])
    return f"{list(weight.shape)} in blocks of {weight.format.block_name}" if partial else None


def _mlp(key: str, value: object) -> Callable[[Loading, Sequence[Weight]], Places]:
    """Return a function that finds the weights of MLPs in models with a setting."""

    def places(loading: Loading, weights: Sequence[Weight]) -> Places:
        if loading.config.get(key) != value:
            return []
        return [Place(weight.name, "of an MLP") for weight in weights if _MLP.search(weight.name)]

    return places


def _plain_experts(loading: Loading, weights: Sequence[Weight]) -> Places:
    return [Place(name, "a plain expert") for name in loading.plain if is_expert(name)]


def of_models(*types: str) -> Condition:
    """Return the condition that a model is of one of some types."""

    def places(loading: Loading, weights: Sequence[Weight]) -> Places:
        found = loading.config.get("model_type")
        return [Place(_CONFIG, f"model_type is {found}")] if found in types and weights else []

    return Condition(f"model_type is {' or '.join(types)}", places)


def of_other_models(*types: str) -> Condition:
    """Return the condition that a model is of none of some types."""

    def places(loading: Loading, weights: Sequence[Weight]) -> Places:
        found = loading.config.get("model_type")
        return [] if found in types or not weights else [Place(_CONFIG, f"model_type is {found or 'not stated'}")]

    return Condition("model_type is another one", places)


def both(one: Condition, other: Condition) -> Condition:
    """Return the condition that two hold, at the places of the first."""

    def places(loading: Loading, weights: Sequence[Weight]) -> Places:
        return one.places(loading, weights) if other.places(loading, weights) else []

    return Condition(f"{one.meaning} and {other.meaning}", places, of_weights=one.of_weights)


def _renamed(loading: Loading, weights: Sequence[Weight]) -> Places:
    if loading.config.get("model_type") not in RENAMED_ON_LOAD:
        return []
    return [
        Place(weight.name, "has another name in memory")
        for weight in weights
        if not _OWN_NAME.match(weight.name) and not weight.variant.endswith(", described as in memory")
    ]


def _split_stacks(loading: Loading, weights: Sequence[Weight]) -> Places:
    if loading.config.get("model_type") not in STACKS:
        return []
    return [Place(weight.name, "an expert") for weight in weights if is_expert(weight.name)]


def _plain_stacks(loading: Loading, weights: Sequence[Weight]) -> Places:
    """Return the layers with a shared expert of which no single expert is quantized."""
    if loading.config.get("model_type") not in EXPERTS_APART or not weights:
        return []
    names = [*(weight.name for weight in loading.weights), *loading.plain]
    layers = dict.fromkeys(name.partition(_SHARED)[0] for name in names if _SHARED in name)
    split = {weight.name.partition(".experts.")[0] for weight in loading.weights if is_expert(weight.name)}
    return [Place(f"{layer}.experts", "plain stacks") for layer in layers if layer not in split]


def _unserved(loading: Loading, weights: Sequence[Weight]) -> Places:
    names, title = names_of_model(loading.config), title_of_model(loading.config)
    return [] if title is None or names & SERVED else [Place(_CONFIG, f"the model is {title}")]


def _diffusion(loading: Loading, weights: Sequence[Weight]) -> Places:
    return [Place(_CONFIG, f"_class_name is {found}")] if (found := loading.config.get(CLASS_NAME)) else []


def _no_diffusion(loading: Loading, weights: Sequence[Weight]) -> Places:
    return [] if loading.config.get(CLASS_NAME) else [Place(_CONFIG, "there is no _class_name")]


def _model_type(loading: Loading, weights: Sequence[Weight]) -> Places:
    found = loading.config.get("model_type")
    return [] if found == "gpt_oss" or not weights else [Place("config.json", f"model_type is {found or 'not stated'}")]


EXPERT_WIDTH = 768
"""The width of experts that transformers assumes of the architecture qwen3moe in GGUF files."""


def _other_width(loading: Loading, weights: Sequence[Weight]) -> Places:
    width = loading.config.get("moe_intermediate_size")
    if loading.config.get("model_type") != "qwen3_moe" or width == EXPERT_WIDTH:
        return []
    return [Place(_CONFIG, f"moe_intermediate_size is {width}")]


PARTIAL_INPUTS = Condition(f"a layer's inputs are not a multiple of {GROUP}", _each(_partial_inputs), of_weights=True)
PARTIAL_BLOCKS = Condition(
    "the last of several blocks is partial, and the length is not a multiple of their number",
    _each(lambda weight: _uneven(weight, fits=False)),
    of_weights=True,
)
UNEVEN_BLOCKS = Condition(
    "the last of several blocks is partial, and the length is a multiple of their number",
    _each(lambda weight: _uneven(weight, fits=True)),
    of_weights=True,
)
PARTIAL_ROWS = Condition(
    "a member of a fused set other than its last ends within a block",
    lambda loading, weights: tuple(_fused_rows(loading, weights, last=False)),
    of_weights=True,
)
ANY_PARTIAL_ROWS = Condition(
    "a member of a fused set ends within a block",
    lambda loading, weights: tuple(_fused_rows(loading, weights, last=True)),
    of_weights=True,
)
TORN = Condition(
    "members of a fused set have different formats",
    lambda loading, weights: tuple(_torn(loading, weights)),
)
UNSHARED = Condition(
    "members of a fused set have different scales",
    _unshared,
)
OTHER_WIDTH = Condition(f"experts of qwen3_moe are not {EXPERT_WIDTH} wide", _other_width)
EXPERTS = Condition("the model has experts", _each(_expert), of_weights=True)
SPLIT_STACKS = Condition("stacks of experts are divided into experts", _split_stacks, of_weights=True)
RENAMED = Condition("quantized layers have other names in memory", _renamed, of_weights=True)
LARGE_EXPERTS = Condition("an expert has several blocks", _each(_expert_of_several_blocks), of_weights=True)
EXPERTS_OF_STACKS = Condition("a model whose single experts it does not join has plain stacks of them", _plain_stacks)
KEYS_OF_HEADS = Condition(
    "the keys and values of all heads are one quantized layer (kv_b_proj)",
    _each(lambda weight: "of all heads" if weight.name.endswith(".kv_b_proj.weight") else None),
    of_weights=True,
)
DENSE = Condition(
    "layers other than experts are quantized",
    _each(lambda weight: None if is_expert(weight.name) else "not an expert"),
    of_shapes=False,
    of_weights=True,
)
ADJUSTED = Condition(
    "tensors next to the codes change the values (NVFP4_AWQ, NVFP4_SVD)",
    _each(lambda weight: weight.adjusting[0].name if weight.adjusting else None),
)
WEIGHT_ONLY = Condition(
    "the inputs have no stored scale (without --captures)",
    _each(lambda weight: "no scale of its inputs" if weight.input_scale is None else None),
)
ANY_PARTIAL = Condition(f"a length is not a multiple of {GROUP}", _each(_partial), of_weights=True)
PLAIN_EXPERTS = Condition("the experts stay plain while other layers are quantized", _plain_experts)
QWEN2_MLP = Condition(
    "model_type is qwen2 and layers of its MLP are quantized", _mlp("model_type", "qwen2"), of_weights=True
)
BIASED_MLP = Condition("mlp_bias is true and layers of the MLP are quantized", _mlp("mlp_bias", True), of_weights=True)
UNSERVED = Condition("it has no class of its own for the model", _unserved)
DIFFUSION = Condition("the model is one of diffusers", _diffusion)
NO_DIFFUSION = Condition("the model is not one of diffusers", _no_diffusion, of_shapes=False)
OTHER_MODEL = Condition("the model is not gpt-oss", _model_type)
UNCUT = Condition(
    "weights or scales do not divide over the devices (--tp)",
    lambda loading, weights: [
        Place(each.where, f"{each.value}, not {each.need}")
        for each in uncut(weights, loading.config, loading.devices or 1)
    ],
)
