"""The shares of an output, written by several machines into one directory, merged into one output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from mxcli.errors import InputError, RefusedError, printable, together
from mxcli.files.model_files import RECORD, permissions
from mxcli.files.output_dir import Check
from mxcli.files.output_folder import check_free_folder
from mxcli.files.partials import Partials
from mxcli.files.progress import (
    ProgressRecord,
    Share,
    differences,
    names_in,
    progress_path,
    progress_records,
)
from mxcli.files.progress_lines import (
    CARRIED,
    COMPLETE,
    DOCUMENTS,
    MEMO,
    OWN_SHARDS,
    RECORDED,
    SHARDS,
    SOURCE,
    JsonLine,
)
from mxcli.files.record import completed_record
from mxcli.files.shard_file import partial_path


class Merging:
    """The shares of one output, all of them complete and of one source; their progress logs are held until the end.

    `record` is the output's record before anything is measured, `memos` the memos of the tensors. Raises InputError if
    there is no directory or a log that mxcli did not write, and RefusedError with everything that is missing or does
    not fit.
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
            self._lines = [line for each in self._progress for line in each.log.done.values()]
            self.memos = [line[MEMO] for line in self._lines]
            _check_source(self.folder, self._progress)
            names = names_in(self._header)
            folder = check_free_folder(self.folder, names, force=self._force, resume=True)
            self._partials = Partials(folder, names, 0, replace=self._force)
            self._partials.own([*names, RECORD], [*names, RECORD])
            self._progress[0].resume()
            self._partials.take_back(self._progress[0])
            of_shares = (one.log.sha256_with(COMPLETE) for one in self._progress)
            self._sha256 = {name: each for share in of_shares for name, each in share.items()}
            self._partials.mode = permissions(partial_path(self.folder / name) for name in self._header[SHARDS])
            problems = list(_damages(self._header, self._partials, self._sha256))
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

    def publish(self, record: dict[str, object], check: Check | None = None) -> None:
        """Write the files that no share wrote, and give every file its final name. `check` looks at the output before
        that; what it raises ends the merge."""
        written = {name: self._partials.write_json(name, content) for name, content in self._header[DOCUMENTS].items()}
        sha256 = {name: each for name, each in {**self._sha256, **written}.items() if name in names_in(self._header)}
        whole = completed_record(
            record,
            lines=self._lines,
            headers={name: digest for name, (_, _, digest) in self._header[SHARDS].items()},
            sha256=sha256,
            verified=check is not None,
        )
        if check is not None:
            with self._partials.as_published(whole) as folder:
                check(folder)
        self._partials.publish(whole, sha256, self._progress)

    @property
    def stayed(self) -> tuple[str, ...]:
        """Return the files of the output before this one that were changed since, and so were not removed."""
        return tuple(self._partials.stayed)


def _shares_in(folder: Path) -> list[Share]:
    """Return all shares of the division found. Raises RefusedError if there is none, or several."""
    shown = printable(folder)
    if not folder.is_dir():
        raise InputError(f"{shown}: no such directory.")
    found = progress_records(folder).values()
    counts = sorted({share.of for share in found if share is not None})
    if len(counts) == 1 and None not in found and counts[0] <= _MOST_SHARES:
        return [Share(number, counts[0]) for number in range(1, counts[0] + 1)]
    if counts:
        raise RefusedError(
            f"{shown}: holds shares of different divisions: {', '.join(str(share or 'all') for share in found)}. Write "
            "the shares of one division into a separate directory."
        )
    if found:
        raise RefusedError(f"{shown}: holds an unfinished run of one machine: --resume continues it.")
    raise RefusedError(f"{shown}: holds no shares: write them with --shard-range.")


_MOST_SHARES = 1_000_000


def _finished(folder: Path, shares: Sequence[Share], locks: ExitStack) -> list[ProgressRecord]:
    """Return the progress logs of all shares, locked. Raises RefusedError naming shares that are missing or
    unfinished."""
    records, problems = [], []
    for share in shares:
        path = progress_path(folder, share)
        if not path.is_file() or path.is_symlink():
            problems.append(f"share {share} is missing: write it with --shard-range {share}.")
            continue
        try:
            record = ProgressRecord.open(path)
        except RefusedError as error:
            problems.append(f"share {share} cannot be used: {error}")
            continue
        locks.callback(record.close)
        records.append(record)
        if record.log.header is None or not record.log.is_complete:
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
        if (changes := differences(headers[0], header))
    ]
    if not problems and sorted(name for header in headers for name in header[OWN_SHARDS]) != sorted(headers[0][SHARDS]):
        problems = ["the shares do not make up the output: write all of them with one version of mxcli."]
    if problems:
        raise together(RefusedError, f"{printable(folder)}: cannot be merged", problems)
    return headers[0]


def _check_source(folder: Path, records: Sequence[ProgressRecord]) -> None:
    """Raise RefusedError if two shares read different bytes of one tensor of the source."""
    seen: dict[str, tuple[str, int]] = {}
    problems = []
    for number, record in enumerate(records, 1):
        for name, found in ((name, each) for line in record.log.done.values() for name, each in line[SOURCE].items()):
            first, other = seen.setdefault(name, (found, number))
            if first != found:
                problems.append(
                    f"tensor '{printable(name)}' of the source is another for share {number}/{len(records)} than for "
                    f"share {other}/{len(records)}: write all shares from one source."
                )
    if problems:
        raise together(RefusedError, f"{printable(folder)}: cannot be merged", problems)


def _damages(header: JsonLine, partials: Partials, sha256: dict[str, str]) -> Iterator[str]:
    """Yield the files that are missing on disk, or are not what the progress logs state."""
    for name in (*header[SHARDS], *header[CARRIED]):
        again = "write its share again with --force" if name in header[SHARDS] else "write share 1 again with --force"
        file = partials.reopen(name)
        if file is None:
            yield f"{printable(name)}.partial is missing: {again}."
            continue
        file.close()
        if partials.sha256(name) != sha256.get(name):
            yield f"{printable(name)}.partial is not what its share wrote: {again}."
