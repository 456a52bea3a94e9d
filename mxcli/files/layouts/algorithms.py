"""The algorithms of ModelOpt that a checkpoint states, and those of them that are not read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mxcli.files.layouts.layout import OnDisk
from mxcli.files.layouts.modelopt import ALGORITHMS, MIXED

_SAME_WEIGHTS = ("W4A8_MXFP4_FP8", "FP8_BLOCK_SCALES", "FP8_PB_REAL", "NVFP4_AWQ", "NVFP4_SVD")
"""Other algorithms with the weights of one that is read, or with tensors next to them that are read too."""
READ_ALGORITHMS = frozenset(
    {MIXED, *_SAME_WEIGHTS, *(name.upper() for row in ALGORITHMS.values() for name in (row.name, row.calibrated))}
) - {""}
"""Algorithms, in capitals, whose weights are read: codes, scales, and what changes them."""


def unread_algorithms(disk: OnDisk) -> dict[str, str]:
    """Return the stated algorithms that are not read, each with where it is stated: by the name of a layer, or "" for
    all of them."""
    found: dict[str, str] = {}
    for where, algorithm in _stated(disk):
        if algorithm and algorithm.upper() not in READ_ALGORITHMS:
            found.setdefault(algorithm, where)
    return found


def _stated(disk: OnDisk) -> Iterator[tuple[str, str]]:
    for settings in (disk.producer_config.get("quantization"), disk.settings):
        if not isinstance(settings, Mapping):
            continue
        yield "", _text(settings.get("quant_algo"))
        layers = settings.get("quantized_layers")
        for name, layer in layers.items() if isinstance(layers, Mapping) else ():
            yield str(name), _text(layer.get("quant_algo")) if isinstance(layer, Mapping) else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
