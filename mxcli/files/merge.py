"""The shares of an output, written by several machines into one directory, merged into one output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.model_files import RECORD
from mxcli.files.partials import Partials, check_free_folder
from mxcli.files.progress import (
    CARRIED,
    COMPLETE,
    DOCUMENTS,
    MEMO,
    OWN_SHARDS,
    RECORDED,
    SHARDS,
    JsonLine,
    ProgressRecord,
    Share,
    differences,
    header_digest,
    names_in,
    progress_path,
    progress_records,
)


class Merging:
    """The shares of one output, all of them complete; their progress logs are held until the end.

    `record` is the output's record before anything is measured, `memos` the memos of the tensors. Raises InputError if
    there is no directory, and RefusedError with everything that is missing or does not fit.
    """

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        self.folder, self._force = folder, force
        self.shares = _shares_in(folder)
        self._locks = ExitStack()

    def __enter__(self) -> Merging:
        with ExitStack() as locks:
            self._progress = _finished(self.folder, self.shares, locks)
            self._header = _common_header(self.folder, self._progress)
            self.record: dict[str, Any] = self._header[RECORDED]
            self.memos = [line[MEMO] for each in self._progress for line in each.log.done.values()]
            folder = check_free_folder(self.folder, names_in(self._header), force=self._force, resume=True)
            self._partials = Partials(folder, names_in(self._header), 0)
            self._progress[0].resume()
            self._partials.take_back(self._progress[0])
            problems = list(_damages(self._header, self._partials))
            if problems:
                raise together(RefusedError, f"{printable(self.folder)}: cannot be merged", problems)
            self._locks = locks.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()

    @property
    def files(self) -> list[str]:
        """Return the files of the output."""
        return [*names_in(self._header), RECORD]

    def publish(self, record: dict[str, object]) -> None:
        """Write the files that no share wrote, and give every file its final name."""
        for name, content in self._header[DOCUMENTS].items():
            self._partials.write_json(name, content)
        self._partials.publish(record, self._progress)


def _shares_in(folder: Path) -> list[Share]:
    """Return all shares of the division found. Raises RefusedError if there is none, or several."""
    shown = printable(folder)
    if not folder.is_dir():
        raise InputError(f"{shown}: no such directory.")
    found = progress_records(folder).values()
    counts = sorted({share.of for share in found if share is not None})
    if len(counts) == 1 and None not in found:
        return [Share(number, counts[0]) for number in range(1, counts[0] + 1)]
    if counts:
        raise RefusedError(
            f"{shown}: holds shares of different divisions: {', '.join(str(share or 'all') for share in found)}. Write "
            "the shares of one division into a separate directory."
        )
    if found:
        raise RefusedError(f"{shown}: holds an unfinished run of one machine: --resume continues it.")
    what = "complete already" if (folder / RECORD).is_file() else "holds no shares: write them with --shard-range"
    raise RefusedError(f"{shown}: {what}.")


def _finished(folder: Path, shares: Sequence[Share], locks: ExitStack) -> list[ProgressRecord]:
    """Return the progress logs of all shares, locked. Raises RefusedError naming shares that are missing or
    unfinished."""
    records, problems = [], []
    for share in shares:
        path = progress_path(folder, share)
        if not path.is_file():
            problems.append(f"share {share} is missing: write it with --shard-range {share}.")
            continue
        try:
            record = ProgressRecord.open(path)
        except RefusedError:
            problems.append(f"share {share} is still being written.")
            continue
        locks.callback(record.close)
        records.append(record)
        if record.log.header is None or not record.log.latest(COMPLETE):
            problems.append(f"share {share} is unfinished: run it again with --resume.")
    if problems:
        raise together(RefusedError, f"{printable(folder)}: cannot be merged", problems)
    return records


def _common_header(folder: Path, records: Sequence[ProgressRecord]) -> JsonLine:
    """Return the header that all logs share apart from their own shards. Raises RefusedError if they differ."""
    headers = [record.log.header or {} for record in records]
    problems = [
        f"share {number}/{len(headers)} is not of the same output as share 1: {changes[0]}."
        for number, header in enumerate(headers, 1)
        if (changes := differences(headers[0], header, moment=False))
    ]
    if not problems and sorted(name for header in headers for name in header[OWN_SHARDS]) != sorted(headers[0][SHARDS]):
        problems = ["the shares do not make up the output: write all of them with one version of mxcli."]
    if problems:
        raise together(RefusedError, f"{printable(folder)}: cannot be merged", problems)
    return headers[0]


def _damages(header: JsonLine, partials: Partials) -> Iterator[str]:
    """Yield the files that are missing on disk, or differ from what the progress logs state."""
    for name, (nbytes, header_bytes, digest) in header[SHARDS].items():
        file = partials.reopen(name)
        if file is None:
            yield f"{printable(name)}.partial is missing: write its share again."
            continue
        with file:
            whole = header_digest(file.read(header_bytes)) == digest and file.seek(0, 2) == nbytes
        if not whole:
            yield f"{printable(name)}.partial is not what its share wrote: write it again."
    for name in header[CARRIED]:
        file = partials.reopen(name)
        if file is None:
            yield f"{printable(name)}.partial is missing: write share 1 again."
        else:
            file.close()
