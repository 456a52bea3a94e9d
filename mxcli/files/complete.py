"""A complete output, proven by its record: the hashes of its files, its tensors, and the tensors of its source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.hashes import hash_of, sha256_of
from mxcli.files.model_files import RECORD
from mxcli.files.output_folder import stays_inside
from mxcli.files.progress import UNCOMPARED, Draft, changes, header_hash, progress_records
from mxcli.files.record import COMPLETED, VERIFIED, OutputRecord, read_record
from mxcli.files.safetensors import read_safetensors
from mxcli.files.source_watch import SourceWatch

_MEASURED = "statistics"
_FOLLOWING = ("notes", "tensors")
_THREADS = 4


def is_complete(folder: Path) -> bool:
    """Return whether a directory holds an output and no unfinished run."""
    return (folder / RECORD).is_file() and not progress_records(folder)


def check_complete(folder: Path, draft: Draft, watch: SourceWatch) -> None:
    """Prove that a directory holds the output of a draft, whole, and that its source is still the same.

    Raises RefusedError for another output or source, InputError naming every file and tensor that is not as recorded.
    """
    record = _recorded(folder)
    found = _differences(record, draft)
    if found:
        ending = "Give the same options and source, or --force without --resume to start again."
        single = [f"{printable(folder)}: is complete, with other options or another source: {found[0]}. {ending}"]
        headline = f"{printable(folder)}: is complete, with other options or another source"
        raise together(RefusedError, headline, single if len(found) == 1 else found)
    check_files(folder, record)
    watch.expect(record.source_hashes, {}, RefusedError)


def refuse_unverified(folder: Path) -> None:
    """Raise RefusedError for a complete output that was not checked before it got its names."""
    if _recorded(folder).content.get(VERIFIED) is False:
        raise RefusedError(
            f"{printable(folder)}: is complete, and was written with --no-verify: nothing says that it is sound. Use "
            "`mxcli verify`, or give --no-verify again."
        )


def check_files(folder: Path, record: OutputRecord | None = None) -> tuple[str, ...]:
    """Prove that the files of a complete output are as recorded, and return their names. Raises InputError naming every
    file, and the tensors in it, that is not."""
    record = record or _recorded(folder)
    names = [name for name in record.sha256 if stays_inside(folder, name)]
    with ThreadPoolExecutor(_THREADS, "sha256") as pool:
        found = dict(zip(names, pool.map(lambda name: _sha256(folder / name), names), strict=True))
    damaged = [name for name in record.sha256 if found.get(name) != record.sha256[name]]
    if damaged:
        problems = [_damage(folder / name, record.stored.get(name, {}), found.get(name)) for name in damaged]
        raise together(InputError, f"{printable(folder)}: is not as it was written", problems)
    return (*record.files, RECORD)


def _recorded(folder: Path) -> OutputRecord:
    record = read_record(folder)
    if record is None or not record.sha256 or set(record.files) != set(record.sha256):
        raise RefusedError(
            f"{printable(folder)}: is complete, but its {RECORD} has no hashes to check it by; --force without "
            "--resume writes it again."
        )
    return record


def _differences(record: OutputRecord, draft: Draft) -> list[str]:
    """Return how an output differs from a draft, in what is known before anything is measured: first in options and
    source, and only if these agree in what follows from them."""
    planned: Mapping[str, Any] = json.loads(json.dumps(draft.record))
    compared = planned.keys() - {*UNCOMPARED, *COMPLETED, *_FOLLOWING}
    found = [change for key in sorted(compared) for change in changes(key, record.content.get(key), planned[key])]
    tensors = record.content.get("tensors", {})
    for name, tensor in planned.get("tensors", {}).items() if not found else ():
        recorded = tensors.get(name) if isinstance(tensors, dict) else None
        known = recorded if isinstance(recorded, dict) else {}
        kept = {key: value for key, value in known.items() if key != _MEASURED}
        found += changes(f"tensor {printable(name)}", kept, tensor)
    headers = {shard.name: header_hash(shard.header) for shard in draft.shards}
    if not found and headers != record.headers:
        found.append(f"it has {len(record.headers):,} weight files, of other tensors or sizes (--max-shard-size)")
    if not found and set(draft.names) != set(record.files):
        found.append(f"it has {len(record.files):,} files and would have {len(draft.names):,}")
    return found


def _sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read."""
    try:
        return sha256_of(path)
    except InputError:
        return None


def _damage(path: Path, stored: Mapping[str, Any], found: str | None) -> str:
    """Return what is wrong with a file of a complete output."""
    again = "--force without --resume writes the output again."
    if found is None:
        return f"{printable(path)}: is missing or cannot be read; {again}"
    names = _damaged_tensors(path, stored)
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    where = f"tensor '{printable(names[0])}'{more}" if names else "its content"
    return f"{printable(path)}: {where} is not as it was written; {again}"


def _damaged_tensors(path: Path, stored: Mapping[str, Any]) -> list[str]:
    """Return the tensors of a safetensors file whose bytes do not have the recorded hash."""
    try:
        infos = read_safetensors(path).tensors if path.suffix == ".safetensors" else ()
    except InputError:
        return []
    wrong = []
    for info in infos:
        content = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
        if info.name in stored and hash_of(content) != stored[info.name]:
            wrong.append(info.name)
    return wrong
