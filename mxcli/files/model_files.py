"""The files next to a model's weights: its configuration, and those that an output must carry along."""

from __future__ import annotations

import json
import os
import re
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
CACHES = ("models--", "datasets--")
"""How the folders of a download cache begin, in which the files of a model are links to others of the same folder."""

# Files that an output does not carry along, by name, and why; no reason if the output gets its own.
NOT_CARRIED = (
    (
        r"\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|onnx|onnx_data|h5|msgpack|ot|tflite|mlmodel|jit)$",
        "other weights",
    ),
    (rf"^({PRODUCER_CONFIG}|quant_config\.json|quantize_config\.json)$", "an old quantization config"),
    (rf"^({CONFIG}|{RECORD})$|\.index\.json$|\.partial$", ""),
    (r"\.(incomplete|lock|tmp)$", "unfinished"),
)


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


def side_files(root: Path, used: Mapping[Path, object]) -> tuple[tuple[Path, ...], dict[str, list[str]]]:
    """Return every other regular file under the directory, sorted, and those that are left out, by the reason.

    Subfolders are included (pooling modules, chat templates, code), except hidden ones. Weights, indexes, old
    quantization configs, unfinished files, links to directories and links out of the source are left out; config.json
    and our own record are not listed because an output gets its own.
    """
    carried: list[Path] = []
    left_out: dict[str, list[str]] = {}

    def leave(path: Path, reason: str, more: str = "") -> None:
        left_out.setdefault(reason, []).append(f"{path.relative_to(root)}{more}")

    def unreadable(error: OSError) -> None:
        leave(Path(error.filename), f"cannot be listed ({error.strerror})")

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for linked in (Path(folder, name) for name in folders if Path(folder, name).is_symlink()):
            leave(linked, "links to directories", f" -> {os.readlink(linked)}")
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or path in used:
                continue
            reason = next((why for pattern, why in NOT_CARRIED if re.search(pattern, name)), None)
            in_subfolder = path.parent != root and name == CONFIG
            if reason and not in_subfolder:
                leave(path, reason)
            elif reason is None or in_subfolder:
                if path.is_symlink() and not _stays(path, root):
                    leave(path, "links out of the source", f" -> {os.readlink(path)}")
                elif path.is_file():
                    carried.append(path)
                else:
                    leave(path, "not a regular file")
    return tuple(sorted(carried)), left_out


def left_out_notes(left_out: Mapping[str, Sequence[str]], written: Iterable[str] = ()) -> list[str]:
    """Return a note per reason on files that an output does not carry along, but for those that are `written`."""
    own = set(written)
    others = {reason: [name for name in names if name not in own] for reason, names in sorted(left_out.items())}
    return [f"Not carried to an output, {reason}: {_listed(names)}." for reason, names in others.items() if names]


def _stays(link: Path, root: Path) -> bool:
    """Return whether a link leads nowhere else than into the source, or into the download cache that the source is part
    of."""
    try:
        target, home = link.resolve(), root.resolve()
    except (OSError, RuntimeError):  # by the version of Python: it leads back to itself
        return True
    caches = (path for path in home.parents if path.name.startswith(CACHES))
    return any(target.is_relative_to(place) for place in (home, *caches))


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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join(map(printable, names[:5])) + more
