"""Refusals before the first byte of an output: for names, contents and permissions of its files, and for space."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, UsageError, printable, together
from mxcli.files.directory import PARTIAL_SUFFIX
from mxcli.files.hashes import CHUNK_BYTES
from mxcli.files.model_files import RECORD
from mxcli.files.output_folder import existing_parent, folders_of, free_inodes
from mxcli.files.partials import BLOCK_BYTES, FILE_BYTES, RECORD_LEVELS, json_bytes
from mxcli.files.progress import Draft, progress_path
from mxcli.files.shard_file import partial_path

RECORDED_BYTES, LOGGED_BYTES = 2150, 2450
"""Bytes of the statistics of a quantized tensor: about, of a small one in the record; at most, in the progress log."""
HISTOGRAM_BYTES, SMALL_ELEMENTS = 500, 1 << 15
"""Bytes more in the record of a tensor with at least SMALL_ELEMENTS: its histograms have more bins in use."""
HASHED_BYTES, CHUNK_HASHED_BYTES = 170, 32
"""Bytes of the hashes of a tensor besides its name, and of each of its chunks, in either of them, about."""
_OTHER_INODES = 2
"""That of the progress log, and one for the second name that a file has while it gets its final one."""


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


def needed_bytes(draft: Draft) -> int:
    """Return about what a draft takes on disk, with its record and progress log."""
    copied = sum(each.identity.size for each in draft.copied.values())
    written = sum(shard.nbytes for shard in draft.written) + copied + log_bytes(draft)
    if draft.share is None:
        documents = sum(len(json_bytes(each)) for each in draft.documents.values()) + len(
            json_bytes(draft.record, RECORD_LEVELS)
        )
        written += documents + _hashed_bytes(draft) + _recorded_bytes(draft)
    return written + FILE_BYTES * (len(draft.written) + len(draft.documents) + len(draft.copied) + 2)


def log_bytes(draft: Draft) -> int:
    """Return about what the progress log of a draft takes."""
    whole = max(1, sum(shard.nbytes for shard in draft.shards))
    part = sum(shard.nbytes for shard in draft.written) / whole
    return len(json.dumps(draft.header)) + _hashed_bytes(draft) + int(len(_quantized(draft)) * LOGGED_BYTES * part)


def _hashed_bytes(draft: Draft) -> int:
    """Return about what the hashes of the tensors take."""
    entries = [entry for shard in draft.written for entry in shard.entries]
    return sum(HASHED_BYTES + len(each.name) + each.nbytes // CHUNK_BYTES * CHUNK_HASHED_BYTES for each in entries)


def _recorded_bytes(draft: Draft) -> int:
    """Return about what the statistics take in the record."""
    return sum(RECORDED_BYTES + HISTOGRAM_BYTES * (size >= SMALL_ELEMENTS) for size in _quantized(draft))


def _quantized(draft: Draft) -> list[int]:
    """Return the numbers of elements of the tensors that get statistics."""
    tensors = draft.record.get("tensors")
    known = tensors.values() if isinstance(tensors, Mapping) else ()
    return [
        math.prod(each["shape"]) for each in known if isinstance(each, Mapping) and each.get("decision") == "quantized"
    ]


def _unreadable(draft: Draft) -> Iterator[MxcliError]:
    """Yield the files to copy that cannot be read."""
    for carried in draft.copied.values():
        try:
            carried.open().close()
        except InputError as error:
            yield error
        except OSError as error:
            yield InputError(
                f"{printable(carried.path)}: cannot be read: {error.strerror}; an output needs it: change its "
                "permissions, or move it away."
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
    written = (*(shard.name for shard in draft.written), *draft.documents, *draft.copied)
    new = [path for path in folders_of(folder, written) if not os.path.lexists(path)]
    new += [path for name in (*written, RECORD) if not os.path.lexists(path := partial_path(folder / name))]
    files, inodes = len(new) + _OTHER_INODES, free_inodes(folder)
    if inodes is not None and inodes < files:
        yield EnvironmentFailure(
            f"{printable(folder)}: no free inodes: the output needs {files:,} files and folders, and the file "
            f"system takes {inodes:,} more; remove some, or give another -o/--output."
        )
    needed = available = needed_bytes(draft)
    held = _held([*(partial_path(folder / name) for name in draft.names), progress_path(folder, draft.share)])
    with suppress(OSError):
        available = shutil.disk_usage(existing_parent(folder)).free
    if available + held < needed:
        yield EnvironmentFailure(
            f"{printable(folder)}: disk full: the output needs {needed - held:,} bytes and {available:,} are "
            "available; free some space, or give another -o/--output."
        )


def _held(files: Iterable[Path]) -> int:
    """Return the bytes on disk of what an earlier run left."""
    held = 0
    for path in files:
        with suppress(OSError):
            held += path.lstat().st_blocks * BLOCK_BYTES
    return held
