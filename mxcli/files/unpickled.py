"""What a PyTorch file unpickles to, weights-only: no code of the file is ever run.

Objects of some packages may lie beside tensors worth reading; a stand-in takes their place, which does nothing.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mxcli.errors import EnvironmentFailure, InputError, printable

MAX_LEAVES = 5_000_000
PASSED_OVER = re.compile(r"transformer_engine(_torch)?\.")
"""Names in pickles of packages whose objects are passed over."""
ATTRIBUTE = "builtins.getattr"
"""What a pickle calls for the methods of classes, those of objects that are passed over among them."""


class PassedOver:
    """Stands in for an object whose code is not run, whatever it is made of."""

    def __new__(cls, *args: object) -> PassedOver:
        """One more of them; what it is made of is forgotten."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """What it held is forgotten."""


def _passed_over(*args: object) -> type[PassedOver]:
    """Stands in for getattr, which is not run either."""
    return PassedOver


def load_weights(path: Path, *, mapped: bool) -> Any:
    """The object in the file, its tensors mapped from the file if asked for (zip format only); in place of objects
    that are passed over there is a PassedOver.

    Raises InputError for pickles that need code and for damaged files, EnvironmentFailure when PyTorch is
    missing.
    """
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentFailure(f"{printable(path)}: PyTorch is needed to read it: pip install torch.") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _loaded(path, mapped)
    except Exception as error:  # torch raises whatever a damaged pickle happens to trip over
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error


def _loaded(path: Path, mapped: bool) -> Any:
    """What torch makes of a file; where that takes code, once more with stand-ins if there are any for it."""
    import pickle

    from torch import load
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        return load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        wanted = set(get_unsafe_globals_in_checkpoint(path)) if mapped else set()
        names = [name for name in wanted if PASSED_OVER.match(name)]
        if not names:
            raise
        methods = [(_passed_over, ATTRIBUTE)] if ATTRIBUTE in wanted else []
        with safe_globals([*((PassedOver, name) for name in names), *methods]):
            return load(path, map_location="cpu", weights_only=True, mmap=mapped)


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
