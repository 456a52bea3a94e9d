"""Names that a model goes by in its configuration: model types, architectures and class names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Config = Mapping[str, object]
DEEPEST = 4
"""Levels of a configuration that are read, such as thinker_config.text_config."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


def is_expert(name: str) -> bool:
    """Return whether a tensor is of one expert of several."""
    return _EXPERT.search(name) is not None


def parts_of(config: Config | None, depth: int = DEEPEST) -> Iterator[Config]:
    """Yield a configuration and the configurations in it: those of its text, vision and audio parts."""
    if config is None or not depth:
        return
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from parts_of(value, depth - 1)


def names_of_model(config: Config | None) -> frozenset[str]:
    """Return the model types, architectures and diffusers class names in a configuration and its parts."""
    found: set[str] = set()
    for part in parts_of(config):
        listed = part.get("architectures")
        values = [part.get("model_type"), part.get("_class_name"), *(listed if isinstance(listed, list) else ())]
        found.update(value for value in values if isinstance(value, str) and value)
    return frozenset(found)


def title_of_model(config: Config | None) -> str | None:
    """Return the name to call a model by in messages: its model type, else its class; None without either."""
    if config is None:
        return None
    listed = config.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    values = (config.get("model_type"), config.get("_class_name"), first)
    return next((value for value in values if isinstance(value, str) and value), None)
