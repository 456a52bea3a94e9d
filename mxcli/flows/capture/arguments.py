"""Arguments of a recorder, checked on entry, before anything is hooked or written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard

from mxcli.errors import RefusedError, UsageError, did_you_mean, import_extra, printable
from mxcli.files.captures import CAPTURED_ROLES


def require_int(name: str, value: object, minimum: int | None, hint: str) -> int:
    """Return the value as a Python int. Raises UsageError with the hint unless it is an integer >= `minimum`."""
    if not _is_int(value) or (minimum is not None and value < minimum):
        raise UsageError(f"{name} {printable(_shown(value))}: {hint}.")
    return int(value)


def parse_flag(name: str, value: object) -> bool:
    """Return a flag. Raises UsageError for anything but True and False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} {printable(_shown(value))}: give True or False.")
    return value


def parse_size(name: str, value: object) -> int | None:
    """Return a limit in bytes; None without one."""
    return None if value is None else require_int(name, value, 1, "give a number of bytes, such as 8 * 2**30")


def parse_roles(roles: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the roles in their usual order, all for None. Raises UsageError for an unknown role."""
    if roles is None:
        return CAPTURED_ROLES
    words = _texts("roles", roles)
    unknown = [role for role in words if role not in CAPTURED_ROLES]
    if unknown or not words:
        word = unknown[0] if unknown else ""
        raise UsageError(
            f"role '{printable(word)}' is not recorded: there are {', '.join(CAPTURED_ROLES)}."
            f"{did_you_mean(word, CAPTURED_ROLES)}"
        )
    return tuple(role for role in CAPTURED_ROLES if role in words)


def parse_selectors(layers: str | Iterable[str] | None) -> list[str] | None:
    """Return the selectors, None for all. Raises UsageError for non-text, and for an empty list, which would record
    nothing."""
    if layers is None:
        return None
    words = _texts("layers", layers)
    if not words:
        raise UsageError("layers is empty: name one layer at least, or all with None.")
    return words


def parse_steps(steps: int | Collection[int] | None) -> int | Collection[int] | None:
    """Return the steps as Python ints, None for all. Raises UsageError for an empty set, and for anything that is not a
    step number."""
    if steps is None:
        return None
    if _is_int(steps):
        return require_int("steps", steps, 1, "record one step at least, or all with None")
    if isinstance(steps, range):  # of any length: it is not iterated over
        if steps:
            _check_step(min(steps[0], steps[-1]))
            return steps
        numbers: list[Any] = []
    else:
        if isinstance(steps, str | bytes) or not isinstance(steps, Collection) or getattr(steps, "ndim", 1) != 1:
            raise UsageError(f"steps {printable(_shown(steps))}: give a number of steps, or the steps themselves.")
        numbers = list(steps)
    if not numbers:
        raise UsageError("steps is empty: record one step at least, or all with None.")
    for number in numbers:
        _check_step(number)
    return frozenset(map(int, numbers))


def step_count(steps: int | Collection[int] | None) -> int | None:
    """Return the number of those steps; None: all."""
    if isinstance(steps, range):
        return (steps[-1] - steps[0]) // steps.step + 1  # `len` is limited to a machine word
    return steps if steps is None or isinstance(steps, int) else len(steps)


def parse_folder(directory: str | Path) -> Path:
    """Return the directory for files. Raises UsageError for anything but a path, RefusedError if a file is in the
    way."""
    try:
        folder = Path(directory)
    except TypeError:
        raise UsageError(f"directory {printable(_shown(directory))}: give a path.") from None
    text = os.fspath(directory)
    if not text or "\0" in text:
        raise UsageError(f"directory {printable(_shown(directory))}: give the path of a directory, '.' for this one.")
    if text.startswith("~"):
        raise UsageError(f"directory {printable(_shown(directory))}: '~' is not expanded: pass os.path.expanduser(…).")
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise RefusedError(f"{printable(path)}: not a directory; captures need one.")
            break
    return folder


WARN = "warn"
ON_ERROR = (WARN, "raise")
"""What an error of the recording does: end it with a warning, or be raised."""


def parse_on_error(word: object) -> str:
    """Return what an error does. Raises UsageError for another word."""
    if not isinstance(word, str) or word not in ON_ERROR:
        raise UsageError(f"on_error {printable(_shown(word))}: give {' or '.join(ON_ERROR)}.")
    return word


def check_model(model: object) -> None:
    """Raise UsageError for anything but a torch model."""
    torch = import_extra("torch", "capturing")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"a {type(model).__name__} is not a torch.nn.Module: give the model whose layers to record.")


def _check_step(number: object) -> None:
    if not _is_int(number) or number < 0:
        raise UsageError(f"steps has {printable(_shown(number))}: steps are integers from 0.")


def _texts(name: str, words: str | Iterable[str]) -> list[str]:
    """Return the strings as a list; a single one is a list of one."""
    found: list[Any] = [words] if isinstance(words, str) or not isinstance(words, Iterable) else list(words)
    if wrong := [word for word in found if not isinstance(word, str)]:
        raise UsageError(f"{name} has {printable(_shown(wrong[0]))}: give strings.")
    return found


def _shown(value: object) -> object:
    """Return the value as Python writes it, numpy integers as plain ones."""
    return str(value) if isinstance(value, Integral) else repr(value)


def _is_int(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer, of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def json_value(value: object) -> object:
    """Return a JSON-safe value: one-element tensors and numpy numbers as Python's, NaN and infinities as None. Other
    values are unchanged."""
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    item = getattr(value, "item", None)
    if callable(item) and math.prod(getattr(value, "shape", (2,))) == 1:
        value = item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_metadata(about: object) -> dict[str, object]:
    """Return user metadata as JSON-safe values. Raises UsageError for anything but a mapping of them."""
    if about is None:
        return {}
    if not isinstance(about, Mapping):
        raise UsageError(f"about is a {type(about).__name__}: give a mapping with the metadata of each file.")
    metadata = {key: json_value(value) for key, value in about.items()}
    try:
        json.dumps(metadata, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"about must hold JSON values: {printable(error)}.") from error
    return metadata
