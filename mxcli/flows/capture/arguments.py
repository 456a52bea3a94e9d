"""What a training loop may ask of a recorder: every argument checked on entry, before anything is hooked or written."""

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


def require_int(name: str, value: object, least: int | None, otherwise: str) -> int:
    """The number, in Python's; raises UsageError, with the way out `otherwise`, for what is none or below `least`."""
    if not _is_whole(value) or (least is not None and value < least):
        raise UsageError(f"{name} {printable(_shown(value))}: {otherwise}.")
    return int(value)


def known_size(name: str, value: object) -> int | None:
    """The bytes of a limit; None for none."""
    return None if value is None else require_int(name, value, 1, "give a number of bytes, such as 8 * 2**30")


def known_roles(roles: str | Iterable[str] | None) -> tuple[str, ...]:
    """The roles in their usual order, all for None; raises UsageError for what is none."""
    if roles is None:
        return CAPTURED_ROLES
    words = _words("roles", roles)
    unknown = [role for role in words if role not in CAPTURED_ROLES]
    if unknown or not words:
        word = unknown[0] if unknown else ""
        raise UsageError(
            f"role '{printable(word)}' is not recorded: there are {', '.join(CAPTURED_ROLES)}."
            f"{did_you_mean(word, CAPTURED_ROLES)}"
        )
    return tuple(role for role in CAPTURED_ROLES if role in words)


def known_selectors(layers: str | Iterable[str] | None) -> list[str] | None:
    """The selectors; raises UsageError for what is none, and for an empty list, which would record nothing."""
    if layers is None:
        return None
    words = _words("layers", layers)
    if not words:
        raise UsageError("layers is empty: name one layer at least, or all with None.")
    return words


def known_steps(steps: int | Collection[int] | None) -> int | Collection[int] | None:
    """The steps in Python's numbers; raises UsageError for none at all, and for what is no number of a step."""
    if steps is None:
        return None
    if _is_whole(steps):
        return require_int("steps", steps, 1, "record one step at least, or all with None")
    if isinstance(steps, range):  # however long: nothing goes through it
        if steps:
            _check_step(min(steps[0], steps[-1]))
            return steps
        numbers: list[Any] = []
    else:
        if isinstance(steps, str | bytes) or not isinstance(steps, Collection) or getattr(steps, "ndim", 1) != 1:
            raise UsageError(f"steps {printable(_shown(steps))}: say how many, or which.")
        numbers = list(steps)
    if not numbers:
        raise UsageError("steps is empty: record one step at least, or all with None.")
    for number in numbers:
        _check_step(number)
    return frozenset(map(int, numbers))


def how_many(steps: int | Collection[int] | None) -> int | None:
    """The number of those steps; None: it is not said."""
    if isinstance(steps, range):
        return (steps[-1] - steps[0]) // steps.step + 1  # `len` knows no more than a machine word
    return steps if steps is None or isinstance(steps, int) else len(steps)


def known_folder(directory: str | Path) -> Path:
    """The directory for files; raises UsageError for what is no path, RefusedError where a file is in the way."""
    try:
        folder = Path(directory)
    except TypeError:
        raise UsageError(f"directory {printable(_shown(directory))}: give a path.") from None
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            if not path.is_dir():
                raise RefusedError(f"{printable(path)}: not a directory; captures go to one.")
            break
    return folder


def check_model(model: object) -> None:
    """Raises UsageError for what is no model of torch."""
    torch = import_extra("torch", "capturing")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"a {type(model).__name__} is no torch.nn.Module: give the model whose layers to record.")


def _check_step(number: object) -> None:
    if not _is_whole(number) or number < 0:
        raise UsageError(f"steps has {printable(_shown(number))}: steps are whole numbers from 0.")


def _words(name: str, words: str | Iterable[str]) -> list[str]:
    """The words; a single one may stand for itself."""
    found: list[Any] = [words] if isinstance(words, str) or not isinstance(words, Iterable) else list(words)
    if wrong := [word for word in found if not isinstance(word, str)]:
        raise UsageError(f"{name} has {printable(_shown(wrong[0]))}: they are given as text.")
    return found


def _shown(value: object) -> object:
    """The value as Python writes it: text in quotes, but numpy's numbers as plain ones."""
    return str(value) if isinstance(value, Integral) else repr(value)


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, also of numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def json_value(value: object) -> object:
    """The value as files have it: tensors and numpy's numbers of one element as Python's; NaN and infinities, which
    JSON lacks, as None. What is none of that stays as it is."""
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    item = getattr(value, "item", None)
    if callable(item) and math.prod(getattr(value, "shape", (2,))) == 1:
        value = item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_metadata(about: object) -> dict[str, object]:
    """What each file is to say; raises UsageError for what is no mapping, or holds what JSON does not."""
    if about is None:
        return {}
    if not isinstance(about, Mapping):
        raise UsageError(f"about is a {type(about).__name__}: give a mapping of what each file is to say.")
    said = {key: json_value(value) for key, value in about.items()}
    try:
        json.dumps(said, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"about must be of values that JSON holds: {printable(error)}.") from error
    return said
