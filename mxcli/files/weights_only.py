"""PyTorch files loaded weights-only: objects of other classes become stand-ins, and no code of the file is run."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

from mxcli.errors import InputError, import_extra, printable
from mxcli.files.numpy import UNREADABLE_MEMBER
from mxcli.files.pickles import check_pickles

ATTRIBUTE = "builtins.getattr"
"""The pickle name that looks up methods of classes, those of stand-ins too."""
COMMANDS = re.compile(
    r"builtins\.(eval|exec|execfile|compile|open|input|breakpoint|__import__)$"
    r"|(subprocess|commands|importlib|runpy|shutil|socket|pty|ctypes|webbrowser|pickle|code|pdb|timeit|operator)\."
)
"""Pickle names that no state of a training run needs; a file with one is refused wherever it is."""
MOST_CLASSES = 1000


class SkippedObject:
    """A stand-in for an object whose code is not run; `of` is the name of its class in the pickle."""

    of = ""

    def __new__(cls, *args: object) -> Any:
        """Create a stand-in; its arguments are dropped."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


class SkippedMapping(SkippedObject):
    """A stand-in for an object that a pickle fills with items: a dictionary that holds a stand-in too."""

    def __new__(cls, *args: object) -> Any:
        """Create a dictionary with a stand-in."""
        return OrderedDict({"": object.__new__(cls)})


class SkippedSequence(SkippedObject):
    """A stand-in for an object that a pickle appends to: a list that holds a stand-in too."""

    def __new__(cls, *args: object) -> Any:
        """Create a list with a stand-in."""
        return [object.__new__(cls)]


def skipped_class(leaf: object) -> str | None:
    """Return the name of the class that a leaf stands for, or None if it is not a stand-in."""
    if isinstance(leaf, SkippedObject):
        return leaf.of
    return leaf.of if isinstance(leaf, type) and issubclass(leaf, SkippedObject) else None


def needs_code(name: str) -> str:
    """Return why an object of the class is not read, as a sentence without its beginning."""
    return (
        f"its pickle needs code ({printable(name)}), which is never run; "
        "save the state_dict alone with torch.save or safetensors."
    )


def load_weights(path: Path, *, zipped: bool, mapped: bool) -> Any:
    """Load the object in the file; objects of classes that weights do not need become stand-ins. With `mapped` (zip
    format only) its tensors have addresses in a map of the file and no memory: the map shows where they are and must
    not be read.

    Raises InputError for pickles that are damaged, build much from little or cannot be loaded without code,
    EnvironmentFailure if PyTorch is missing.
    """
    try:
        check_pickles(path, zipped=zipped)
    except (ValueError, *UNREADABLE_MEMBER) as error:
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error
    except MemoryError as error:  # of a text or bytes whose length is damaged
        fault = ValueError("a length in its pickle is beyond the memory of the machine")
        raise InputError(f"{printable(path)}: {_load_fault(fault)}") from error
    import_extra("torch", f"{printable(path)}: reading PyTorch files")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _loaded(path, mapped)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # torch raises any exception for a damaged pickle
        raise InputError(f"{printable(path)}: {_load_fault(error)}") from error


def _loaded(path: Path, mapped: bool) -> Any:
    """Load a file with torch, with a stand-in for every class that it refuses."""
    import pickle

    from torch import load
    from torch.serialization import safe_globals

    stand_ins: dict[str, type[SkippedObject]] = {}
    first = None
    while True:
        allowed: list[Any] = [
            (_attribute if name == ATTRIBUTE else stand_in, name) for name, stand_in in stand_ins.items()
        ]
        try:
            with safe_globals(allowed):
                return load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            first = first or error
            if not _add_stand_ins(stand_ins, path, str(error)) or len(stand_ins) > MOST_CLASSES:
                raise (error if "is blocked" in str(error) else first) from error


def _attribute(of: object, *names: object) -> object:
    """Replace getattr, which is not run either: a method of a stand-in is the stand-in."""
    return of if skipped_class(of) is not None else SkippedObject()


def _add_stand_ins(stand_ins: dict[str, type[SkippedObject]], path: Path, fault: str) -> bool:
    """Add stand-ins for the classes that an error of torch names, or let one be filled; return whether any changed.

    Raises InputError for functions that run commands.
    """
    for pattern, kind in _FILLED:
        filled = re.search(pattern, fault)
        if filled and stand_ins.get(filled[1], kind) is not kind and not issubclass(stand_ins[filled[1]], kind):
            stand_ins[filled[1]] = _stand_in(filled[1], kind)
            return True
    named = re.search(r"GLOBAL (\S+) was not an allowed global", fault)
    if named is None:
        return False
    wanted = {named[1] if "." in named[1] else f"builtins.{named[1]}", *_unsafe(path)} - stand_ins.keys()
    stand_ins |= {name: _stand_in(name, SkippedObject) for name in wanted}
    commands = sorted(filter(COMMANDS.match, wanted))
    if commands:
        raise InputError(f"{printable(path)}: {needs_code(commands[0])}")
    return bool(wanted)


_CLASS = r"<class '(?:mxcli\.files\.weights_only\.)?(.+)'>"
_FILLED: tuple[tuple[str, type[SkippedObject]], ...] = (
    (rf"SETITEM.* {_CLASS}", SkippedMapping),
    (rf"Can only (?:append|extend).* {_CLASS}", SkippedSequence),
)


def _stand_in(name: str, kind: type[SkippedObject]) -> type[SkippedObject]:
    return type(name, (kind,), {"of": name, "__module__": __name__})


def _unsafe(path: Path) -> list[str]:
    """Return the classes that a file in the zip format needs, at once; those of others are found one by one."""
    from torch.serialization import get_unsafe_globals_in_checkpoint

    try:
        return [str(name) for name in get_unsafe_globals_in_checkpoint(path)]
    except Exception:  # it knows fewer instructions than torch.load
        return []


def _load_fault(error: Exception) -> str:
    """Return torch's error as one sentence: which code a pickle needs, or that the file is damaged."""
    text = str(error)
    wanted = re.search(r"GLOBAL (\S+)", text)
    if wanted:
        return needs_code(wanted[1])
    if "Weights only load failed" in text:
        return "not a weights-only PyTorch checkpoint; save the state_dict alone with torch.save or safetensors."
    first = text.strip().splitlines()[0].split(". ")[0] if text.strip() else type(error).__name__
    return f"truncated, damaged or not a PyTorch checkpoint: {printable(first)}."
