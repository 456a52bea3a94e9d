"""Nested containers, as a pickle holds them: their leaves with dotted names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, printable

MAX_LEAVES = 5_000_000
MAX_REPEATED, MAX_NESTING, MAX_NAME_CHARACTERS = 100_000, 200, 1 << 16


def flatten(loaded: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of every leaf of nested dicts, lists and tuples, in order."""
    if not isinstance(loaded, (dict, list, tuple)):
        yield path.stem, loaded
        return
    visited = repeated = 0
    open_containers, entered = {id(loaded)}, {id(loaded)}
    stack = [(id(loaded), "", _items(loaded))]
    while stack:
        container, prefix, items = stack[-1]
        entry = next(items, None)
        if entry is None:
            stack.pop()
            open_containers.discard(container)
            continue
        visited += 1
        name, leaf = f"{prefix}{entry[0]}", entry[1]
        is_container = isinstance(leaf, (dict, list, tuple))
        repeated += len(leaf) if is_container and id(leaf) in entered else 0
        endless = visited > MAX_LEAVES or repeated > MAX_REPEATED or len(stack) > MAX_NESTING
        if endless or id(leaf) in open_containers or len(name) > MAX_NAME_CHARACTERS:
            raise InputError(f"{printable(path)}: its containers nest without end; save a plain state_dict.")
        if is_container:
            open_containers.add(id(leaf))
            entered.add(id(leaf))
            stack.append((id(leaf), f"{name}.", _items(leaf)))
        else:
            yield name, leaf


def _items(container: Any) -> Iterator[tuple[object, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)
