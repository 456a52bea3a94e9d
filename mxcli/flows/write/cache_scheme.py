"""The quantized KV cache that a quantized source states: the setting stays with the scales it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import QUANTIZATION_CONFIG, Layout
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG

Configs = Mapping[str, Mapping[str, object]]

PLACES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "compressed-tensors": ((CONFIG, QUANTIZATION_CONFIG, "kv_cache_scheme"),),
    "modelopt": (
        (CONFIG, QUANTIZATION_CONFIG, "kv_cache_scheme"),
        (PRODUCER_CONFIG, "quantization", "kv_cache_quant_algo"),
    ),
    "quark": (
        (CONFIG, QUANTIZATION_CONFIG, "kv_cache_quant_config"),
        (CONFIG, QUANTIZATION_CONFIG, "kv_cache_post_rope"),
        (CONFIG, QUANTIZATION_CONFIG, "export", "kv_cache_group"),
        (CONFIG, QUANTIZATION_CONFIG, "export", "min_kv_scale"),
    ),
}
"""The settings of the KV cache by layout: a file and the keys in it."""
_SCALE = re.compile(r"(^|[._])(k|v|kv)_scale$|\.(k_proj|v_proj|kv_proj)\.output_scale$")


def with_cache_scheme(configs: Configs, checkpoint: Checkpoint, layout: Layout) -> tuple[Configs, tuple[str, ...]]:
    """Return the configurations with the settings of the KV cache that a quantized source of the same layout states;
    for another layout unchanged, with a note."""
    stated = _stated(checkpoint)
    if not stated:
        return configs, ()
    scales = [name for name in checkpoint.tensors if _SCALE.search(name)]
    with_scales = f" with its {len(scales):,} scales ('{printable(scales[0])}', …)" if scales else ""
    if checkpoint.restored_from == layout.name:
        for (file, *keys), value in stated.items():
            configs = {**configs, file: _with(configs.get(file, {}), keys, value)}
        return configs, (f"The KV cache stays quantized as the source states it{with_scales}.",)
    unused = f"; its {len(scales):,} scales ('{printable(scales[0])}', …) stay in the files, unused" if scales else ""
    return configs, (
        f"The source states a quantized KV cache in the way of {checkpoint.restored_from}, which is not converted to "
        f"{layout.name}: loaders keep the cache in the dtype of the model{unused}.",
    )


def _stated(checkpoint: Checkpoint) -> dict[tuple[str, ...], object]:
    """Return the settings of the KV cache of a quantized source that is read as plain; none if it states none."""
    if checkpoint.stored is None:
        return {}
    documents = {CONFIG: checkpoint.stored.config, PRODUCER_CONFIG: checkpoint.stored.producer_config}
    found = {place: _at(documents, place) for place in PLACES.get(checkpoint.restored_from or "", ())}
    return {place: value for place, value in found.items() if value}


def _at(document: object, keys: tuple[str, ...]) -> object:
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _with(document: object, keys: list[str], value: object) -> dict[str, object]:
    """Return a document with a value at a path of keys."""
    whole = dict(document) if isinstance(document, Mapping) else {}
    key, *further = keys
    return whole | {key: _with(whole.get(key), further, value) if further else value}
