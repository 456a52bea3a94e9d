"""The files next to a model's weights: its configuration, and those that an output must carry along."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from mxcli.errors import InputError, printable, together
from mxcli.files.identity import FileIdentity, changed, check_unchanged, identity
from mxcli.files.plain import read_json_object

CONFIG = "config.json"
PRODUCER_CONFIG = "hf_quant_config.json"
RECORD = "mxcli.json"
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Configs:
    """The parsed config.json and hf_quant_config.json of a directory; None for a missing one."""

    model: Mapping[str, object] | None = None
    producer: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of a configuration that is used as it is: what its value must be, and a check of it; null is none."""

    key: str
    needs: str
    is_valid: Callable[[object], bool]


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# Of the configuration itself, and of the parts of it that describe a model each.
SETTINGS = (
    Setting("model_type", "text", _is_text),
    Setting("architectures", "a list of text", lambda v: isinstance(v, list) and all(map(_is_text, v))),
    Setting("tie_word_embeddings", "true or false", lambda value: isinstance(value, bool)),
    Setting("text_config", "an object", _is_object),
    Setting("quantization_config", "an object", _is_object),
    Setting("compression_config", "an object", _is_object),
)
PRODUCER_SETTINGS = (Setting("quantization", "an object", _is_object),)


def read_config(root: Path) -> dict[str, object] | None:
    """Read config.json of a directory, None without one. Raises InputError if it is not a JSON object, or one of
    SETTINGS is of another type than it has in any model."""
    found = _optional(root / CONFIG)
    if found is not None:
        parts = {key: part for key, part in found.items() if isinstance(part, dict)}
        problems = [*_faults(CONFIG, "", found, SETTINGS)]
        for key, part in parts.items():
            problems += _faults(CONFIG, f"{printable(key)}.", part, SETTINGS)
        _refuse(root, problems)
    return found


def read_producer_config(root: Path) -> dict[str, object] | None:
    """Read hf_quant_config.json of a directory like read_config."""
    found = _optional(root / PRODUCER_CONFIG)
    if found is not None:
        _refuse(root, list(_faults(PRODUCER_CONFIG, "", found, PRODUCER_SETTINGS)))
    return found


def _faults(file: str, where: str, config: Mapping[str, object], settings: Iterable[Setting]) -> Iterator[str]:
    for row in settings:
        value = config.get(row.key)
        if value is not None and not row.is_valid(value):
            yield f"{file}: {where}{row.key} is {printable(json.dumps(value))}; it must be {row.needs}."


def _refuse(root: Path, problems: Sequence[str]) -> None:
    """Raise InputError with all problems, naming the directory."""
    if problems:
        raise together(InputError, printable(root), [f"{printable(root)}/{problem}" for problem in problems])


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that an output carries along, as it was before the run: its path, the file that this led to, and what that
    was."""

    path: Path
    target: Path
    identity: FileIdentity

    @classmethod
    def of(cls, path: Path) -> CarriedFile:
        """Return the file that a path leads to now. Raises InputError if that cannot be found."""
        try:
            target = path.resolve()
            return cls(path, target, replace(identity(target), is_hashed=True))
        except (OSError, RuntimeError) as error:
            raise InputError(f"{printable(path)}: cannot be read: {printable(error)}.") from error

    def open(self) -> BinaryIO:
        """Open it, without waiting and without following a link that is new. Raises InputError, naming the file, unless
        it is the file that it was, and OSError."""
        if self.path.resolve() != self.target:
            raise InputError(changed(self.path, f"it leads to {printable(self.path.resolve())} now"))
        descriptor = os.open(self.target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InputError(changed(self.path, "it is not a regular file any more"))
            check_unchanged(self.path, self.identity, status)
        except BaseException:
            os.close(descriptor)
            raise
        return open(descriptor, "rb")

    def chunks(self) -> Iterator[bytes]:
        """Yield its content. Raises InputError if it cannot be read, or changes meanwhile."""
        try:
            with self.open() as file:
                while chunk := file.read(_CHUNK_BYTES):
                    yield chunk
                check_unchanged(self.path, self.identity, os.fstat(file.fileno()))
        except (OSError, RuntimeError) as error:
            raise InputError(f"{printable(self.path)}: cannot be read: {printable(error)}.") from error


def permissions(files: Iterable[Path]) -> int:
    """Return the permissions of a file made from others: what all of them grant, no execution, and all to the owner."""
    granted = 0o666
    for file in files:
        with suppress(OSError):
            granted &= file.stat().st_mode
    return granted | 0o600


def _optional(path: Path) -> dict[str, object] | None:
    if not os.path.lexists(path):
        return None
    return read_json_object(path)
