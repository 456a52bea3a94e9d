"""What a PyTorch file unpickles to, weights-only: no code of the file is ever run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, InputError, printable

MAX_LEAVES = 5_000_000


def load_weights(path: Path, *, mapped: bool) -> Any:
    """The object in the file, its tensors mapped from the file if asked for (zip format only).

    Raises InputError for pickles that need code and for damaged files, EnvironmentFailure when PyTorch is
    missing.
    """
    try:
        import torch
    except ImportError as error:
        raise EnvironmentFailure(f"{printable(path)}: PyTorch is needed to read it: pip install torch.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises whatever a damaged pickle happens to trip over
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error


def _load_fault(error: Exception) -> str:
    """One sentence for what torch said: which code a pickle wants, or that the file is damaged."""
    text = str(error)
    wanted = re.search(r"GLOBAL (\S+)", text)
    if wanted:
        return (
            f"its pickle needs code ({printable(wanted[1])}), which is never run; "
            "save the state_dict alone with torch.save or safetensors."
        )
    if "Weights only load failed" in text:
        return "not a weights-only PyTorch checkpoint; save the state_dict alone with torch.save or safetensors."
    first = text.strip().splitlines()[0].split(". ")[0] if text.strip() else type(error).__name__
    return f"truncated, damaged or not a PyTorch checkpoint: {printable(first)}."


def flatten(loaded: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf of nested dicts, lists and tuples, in order."""
    if not isinstance(loaded, (dict, list, tuple)):
        yield path.stem, loaded
        return
    visited = 0
    open_containers = {id(loaded)}
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
        if visited > MAX_LEAVES or id(leaf) in open_containers:
            raise InputError(f"{printable(path)}: its containers nest without end; save a plain state_dict.")
        if isinstance(leaf, (dict, list, tuple)):
            open_containers.add(id(leaf))
            stack.append((id(leaf), f"{name}.", _items(leaf)))
        else:
            yield name, leaf


def _items(container: Any) -> Iterator[tuple[object, Any]]:
    return iter(container.items()) if isinstance(container, dict) else enumerate(container)
