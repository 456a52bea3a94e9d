"""Refusals before the first byte of an output: for names, contents and permissions of its files, and for space."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, UsageError, printable, together
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.partials import BLOCK_BYTES, SPARE_BYTES
from mxcli.files.progress import Draft
from mxcli.files.shard_file import partial_path

RECORD_BYTES = 4096
"""Bytes of the record and the progress log for a tensor, about."""


def check_draft(draft: Draft, folder: Path | None) -> None:
    """Raise one error for everything that would end the writing of a draft into a directory (None: not known yet)."""
    unencodable = list(_unencodable(draft))
    problems = [*_unreadable(draft), *unencodable]
    if folder is not None:
        problems += [*_unnameable(draft, folder), *_unwritable(folder)]
    if folder is not None and not unencodable:
        problems += _too_large(draft, folder)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        where = "the output" if folder is None else printable(folder)
        raise together(type(problems[0]), where, [problem.message for problem in problems])


def refuse_names_of(folder: Path, names: Iterable[str], others: Iterable[Path]) -> None:
    """Raise RefusedError for further files to write, such as a report, that would replace one of an output: one of the
    `names` in a directory, or an unfinished file."""
    home, own = folder.resolve(), set(names)
    problems = []
    for path in others:
        place = path.parent.resolve() / path.name
        inside = place.relative_to(home).as_posix() if place.is_relative_to(home) else None
        if inside is not None and (inside in own or inside.endswith(PARTIAL_SUFFIX)):
            problems.append(
                f"{printable(path)}: is a file of the output {printable(folder)} itself; give the other one another "
                "name."
            )
    if problems:
        raise together(RefusedError, printable(folder), problems)


def existing_parent(folder: Path) -> Path:
    """Return the directory itself, or the nearest one above it that exists."""
    path = folder.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def needed_bytes(draft: Draft) -> int:
    """Return about what a draft takes on disk."""
    tensors = sum(len(shard.entries) for shard in draft.written)
    copied = sum(path.stat().st_size for path in draft.copied.values())
    documents = sum(len(json.dumps(content)) for content in draft.documents.values())
    return sum(shard.nbytes for shard in draft.written) + copied + documents + tensors * RECORD_BYTES + SPARE_BYTES


def _unreadable(draft: Draft) -> Iterator[MxcliError]:
    """Yield the files to copy that cannot be read."""
    for path in draft.copied.values():
        try:
            path.open("rb").close()
        except OSError as error:
            yield InputError(
                f"{printable(path)}: cannot be read: {error.strerror}; an output needs it: change its permissions, or "
                "move it away."
            )


def _unencodable(draft: Draft) -> Iterator[MxcliError]:
    """Yield names and documents with text that UTF-8 cannot encode."""
    for name in draft.names:
        if not _is_text(name):
            yield InputError(f"{printable(name)}: its name is not UTF-8, which the record needs; rename it.")
    for name, content in draft.documents.items():
        for place, text in _texts(content, ()):
            if not _is_text(text):
                where = ".".join(map(printable, place)) or "its top"
                yield InputError(
                    f"{printable(name)}: {where} holds '{printable(text)}', which UTF-8 cannot encode; correct it."
                )
    for shard in draft.written:
        for entry in shard.entries:
            if not _is_text(entry.name):
                yield InputError(f"tensor '{printable(entry.name)}': its name cannot be encoded in UTF-8; rename it.")


def _texts(content: object, place: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield all texts of a JSON value, keys too, with the keys that lead there."""
    if isinstance(content, str):
        yield place, content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield (*place, key), str(key)
            yield from _texts(value, (*place, key))
    elif isinstance(content, Sequence):
        for at, value in enumerate(content):
            yield from _texts(value, (*place, at))


def _is_text(text: str) -> bool:
    with suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def _unnameable(draft: Draft, folder: Path) -> Iterator[MxcliError]:
    """Yield names that are too long for the file system, with the ending of a file that is not complete."""
    parent = existing_parent(folder)
    try:
        longest = os.pathconf(parent, "PC_NAME_MAX")
    except OSError:
        return
    for part in folder.absolute().relative_to(parent).parts:
        if len(os.fsencode(part)) > longest:
            yield UsageError(_too_long(part, len(os.fsencode(part)), longest))
    for name in draft.names:
        *folders, file = PurePosixPath(name).parts
        for part in (*folders, partial_path(Path(file)).name):
            if len(os.fsencode(part)) > longest:
                yield RefusedError(_too_long(name, len(os.fsencode(part)), longest))


def _too_long(name: str, nbytes: int, longest: int) -> str:
    return f"{printable(name)}: a name of {nbytes:,} bytes while it is written; the most there is {longest:,}."


def _unwritable(folder: Path) -> Iterator[MxcliError]:
    """Yield why the directory cannot be made or written to."""
    parent = existing_parent(folder)
    if not parent.is_dir():
        yield RefusedError(f"{printable(folder)}: {printable(parent)} is not a directory; give another -o/--output.")
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield EnvironmentFailure(f"{printable(folder)}: cannot be written: no permission for {printable(parent)}.")


def _too_large(draft: Draft, folder: Path) -> Iterator[MxcliError]:
    """Yield what is missing if the disk cannot hold the draft."""
    needed, held, available = needed_bytes(draft), _held(folder, draft.names), needed_bytes(draft)
    with suppress(OSError):
        available = shutil.disk_usage(existing_parent(folder)).free
    if available + held < needed:
        yield EnvironmentFailure(
            f"{printable(folder)}: disk full: the output needs {needed - held:,} bytes and {available:,} are "
            "available; free some space, or give another -o/--output."
        )


def _held(folder: Path, names: Iterable[str]) -> int:
    """Return the bytes on disk of what an earlier run left."""
    held = 0
    for name in names:
        with suppress(OSError):
            held += partial_path(folder / name).lstat().st_blocks * BLOCK_BYTES
    return held
