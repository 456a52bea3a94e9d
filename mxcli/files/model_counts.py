"""The numbers in a configuration that say how many parts a model has, and those of which none can be built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

MOST_PARTS, MOST_LAYERS = 4096, 256
"""More parts, or more layers than tensors, are not of a model: building it would take all time and memory."""
_COUNTS = re.compile(r"(layers?|experts?|blocks|heads|groups|labels|codebooks)$|^(n_layer|n_head|depth)$")
_LAYERS = re.compile(r"(^|_)layers?$")
_DEPTH = 4


def excessive_count(config: Mapping[str, object], tensors: int) -> str | None:
    """Return the first number of parts in a configuration, in words, that no checkpoint of so few tensors can have;
    None without one."""
    for key, value in _numbers(config, _DEPTH):
        most = MOST_PARTS
        if _LAYERS.search(key):
            most = min(most, max(MOST_LAYERS, tensors))
        if _COUNTS.search(key) and value > most:
            shown = f"{value:,}" if value < 1 << 64 else "more than 2^64"
            return f"{key} {shown}"
    return None


def _numbers(config: Mapping[str, object], depth: int) -> Iterator[tuple[str, int]]:
    """Yield whole numbers with their keys, in parts of the configuration too."""
    for key, value in config.items():
        if isinstance(value, Mapping) and depth:
            yield from _numbers(value, depth - 1)
        elif type(value) is int:
            yield key, value
