"""An output directory, in which no file has its final name before all are complete and on disk.

Files are written as `NAME.partial`, synced, and renamed together at the end; the record (`mxcli.json`) comes last, so
that a directory with a record is complete. Until then a progress log lists the tensors on disk with their hashes, so
that an interrupted run can be resumed: what it wrote is kept only if it still has its hash. The source is never written
to, nor is the target of any link.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import numpy as np

from mxcli.atomic import sync_folder
from mxcli.errors import EnvironmentFailure, RefusedError, printable, together
from mxcli.files.finite import not_finite
from mxcli.files.hashes import ContentHash, hash_of
from mxcli.files.model_files import RECORD
from mxcli.files.output_folder import OutputFolder
from mxcli.files.partials import Partials
from mxcli.files.preflight import log_bytes, needed_bytes
from mxcli.files.progress import (
    RESERVED_BYTES,
    UNCOMPARED,
    Draft,
    ProgressRecord,
    differences,
    entries_to_keep,
    header_hash,
    names_in,
    progress_path,
    progress_records,
    read_progress,
    refuse_other_runs,
    refuse_unfinished,
)
from mxcli.files.progress_lines import (
    COMPLETE,
    ENTRIES,
    IDENTITY,
    MEMO,
    OWN_SHARDS,
    RECORDED,
    SHA256,
    SHARD,
    SOURCE,
    STORED,
    JsonLine,
)
from mxcli.files.record import completed_record
from mxcli.files.shard_file import Shard, ShardFile
from mxcli.files.source_watch import SourceWatch
from mxcli.files.tensors import Array

SYNC_BYTES, SYNC_SECONDS = 1 << 28, 5.0
"""Bytes and seconds between two syncs, after each of which finished tensors are logged: the most that an interruption
loses."""
Check = Callable[[Path], None]
"""A function that looks at an output before it has its final names, and raises if it is not sound."""


class Output:
    """A directory being written.

    A `with` block that ends before `publish` or `complete` keeps finished work for a resume, unless there is none or
    the block was left by a refusal: then everything it began is removed. With `resume` it continues what an earlier run
    left, without tensors that are not finite unless it `keeps_all`; `watch` then proves that the source is still that
    of the earlier run.
    """

    def __init__(
        self,
        folder: OutputFolder,
        draft: Draft,
        watch: SourceWatch | None = None,
        *,
        resume: bool = False,
        force: bool = False,
        keeps_all: bool = False,
    ) -> None:
        self._folder, self._draft, self._resume, self._force = folder.path, draft, resume, force
        self._keeps_all = keeps_all
        self._watch = watch
        self._partials = Partials(folder, draft.names, needed_bytes(draft), replace=force, mode=draft.mode)
        self._earlier_record: JsonLine = {}
        self._kept: dict[str, dict[str, JsonLine]] = {}
        self._lines: list[JsonLine] = []
        self._progress: ProgressRecord | None = None
        self._is_done = self._is_publishing = False
        self._shard: tuple[Shard, ShardFile] | None = None
        self._hashes: dict[str, ContentHash] = {}
        self._sha256: dict[str, Future[str]] = {}
        self._hasher = ThreadPoolExecutor(1, "sha256")
        self._waiting: list[JsonLine] = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def __enter__(self) -> Output:
        """Take the directory.

        Raises RefusedError if another run holds it, if the run to resume made something else or had another source, or
        if a run that is not resumed finished something (without `force`); EnvironmentFailure if the disk cannot hold
        the output.
        """
        try:
            self._take()
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        finally:
            self._hasher.shutdown(wait=True, cancel_futures=True)
            self._record.close()

    def _leave(self, error: BaseException | None) -> None:
        """Keep what can be resumed, else remove what was begun."""
        with suppress(Exception):
            self._sync()
        if self._shard is not None:
            with suppress(OSError):
                self._shard[1].close()
        is_refused = isinstance(error, RefusedError) and not self._is_publishing
        if self._is_done:
            return
        shown = printable(self._folder)
        if not self._partials.is_in_place:
            if error is not None:
                error.add_note(
                    f"{shown} is not the directory any more in which this run had begun: what it finished is where "
                    "that was moved, if it still exists."
                )
        elif is_refused or not self.has_progress:
            self._partials.remove(self._mine)
            self._record.remove()
            self._partials.remove_folders()
        elif error is not None:
            error.add_note(f"Finished work is kept in {shown}; the same command with --resume continues it.")

    @property
    def stayed(self) -> tuple[str, ...]:
        """Return the files of the output before this one that were changed since, and so were not removed."""
        return tuple(self._partials.stayed)

    @property
    def record(self) -> dict[str, object]:
        """Return the record before anything is measured; a resumed run keeps the uncompared keys of the first run."""
        return {**self._draft.record, **self._earlier_record}

    @property
    def finished(self) -> Mapping[str, str]:
        """Return the memo of each tensor that an earlier run finished, by the name of its first entry."""
        return {key: line[MEMO] for of_shard in self._kept.values() for key, line in of_shard.items()}

    @property
    def has_progress(self) -> bool:
        """Return whether a later run would find anything finished."""
        return bool(self._lines)

    def begin_shard(self, shard: Shard) -> None:
        """Open the next shard: a new file, or the one an earlier run left."""
        self._check_place()
        with self._partials.on_disk():
            written = [name for line in self._kept.get(shard.name, {}).values() for name in line[ENTRIES]]
            file = self._partials.reopen(shard.name) if shard.name in self._kept else None
            self._shard = shard, ShardFile(shard, file or self._partials.create(shard.name), written if file else ())

    def write(self, name: str, array: Array) -> None:
        """Write one tensor of the open shard."""
        assert self._shard is not None
        array = np.ascontiguousarray(array)
        with self._partials.on_disk():
            self._shard[1].write(name, array)
        self._hashes[name] = hash_of(array)
        self._waiting_bytes += array.nbytes

    def finish(self, entries: tuple[str, ...], memo: str, source: Mapping[str, str] | None = None) -> None:
        """Log a source tensor as finished: all of its `entries` are written. `memo` is stored for a resumed run once
        the bytes are on disk, as are their hashes and those of the tensors of the source."""
        assert self._shard is not None
        line = {
            ENTRIES: list(entries),
            SHARD: self._shard[0].name,
            MEMO: memo,
            STORED: {name: self._hashes.pop(name).record for name in entries},
            SOURCE: dict(source or {}),
        }
        self._waiting.append(line)
        if self._waiting_bytes >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def end_shard(self) -> None:
        """Sync the open shard to disk and close it, while its SHA-256 is computed."""
        assert self._shard is not None
        shard, file = self._shard
        with self._partials.on_disk():
            file.pad()
            self._sha256[shard.name] = self._hasher.submit(self._partials.sha256, shard.name)
            file.sync()
            file.close()
        self._shard = None

    def complete(self) -> None:
        """Copy this share's files and mark the share complete; it keeps its partial names until all shares are
        merged."""
        self._sync()
        self._check_place()
        written = {name: future.result() for name, future in self._sha256.items()}
        written |= {name: self._partials.copy(path, name) for name, path in self._draft.copied.items()}
        with self._partials.on_disk():
            self._record.add([{COMPLETE: True, SHA256: written}])
        self._is_done = True

    def publish(self, record: Mapping[str, object], check: Check | None = None) -> None:
        """Write everything else, give every file its final name, remove files of an earlier output that this one lacks,
        then add the record with all hashes. `check` looks at the output before that; what it raises ends the run."""
        self._sync()
        self._check_place()
        self._record.trim()
        sha256 = {name: self._partials.write_json(name, content) for name, content in self._draft.documents.items()}
        sha256 |= {name: self._partials.copy(path, name) for name, path in self._draft.copied.items()}
        sha256 |= {name: future.result() for name, future in self._sha256.items()}
        whole = completed_record(
            record,
            lines=self._lines,
            headers={shard.name: header_hash(shard.header) for shard in self._draft.shards},
            sha256=sha256,
            verified=check is not None,
        )
        if check is not None:
            with self._partials.as_published(whole) as folder:
                check(folder)
        self._is_publishing = True
        self._partials.publish(whole, sha256, [self._record])
        self._is_done = True

    @property
    def _record(self) -> ProgressRecord:
        assert self._progress is not None
        return self._progress

    @property
    def _mine(self) -> list[str]:
        """Return the names of the files this run writes, not those of other shares."""
        draft = self._draft
        if draft.share is None:
            return [*draft.names, RECORD]
        return [*(shard.name for shard in draft.written), *draft.copied]

    @property
    def _source_line(self) -> list[JsonLine]:
        """Return the progress line on the files of the source, from here on."""
        return [] if self._watch is None else [{IDENTITY: self._watch.identities}]

    def _take(self) -> None:
        folder, shown = self._folder, printable(self._folder)
        self._partials.make_folders()
        with self._partials.on_disk():
            self._progress = ProgressRecord.open(progress_path(folder, self._draft.share))
            self._record.reserved_bytes = min(RESERVED_BYTES, log_bytes(self._draft))
            refuse_other_runs(folder, self._draft.share, self._partials.discard_listed if self._force else None)
            if not self._force:
                self._refuse_other_shares()
        if self._force and not self._resume and not self._record.is_readable:
            self._begin(None)
            return
        earlier = self._record.log.header
        if self._resume and earlier is not None:
            self._resume_from(earlier)
        elif (folder / RECORD).exists() and not self._force:
            raise RefusedError(f"{shown}: was written by another run meanwhile; --force replaces it.")
        else:
            if not self._force:
                refuse_unfinished(folder, self._draft.share, self._record.log)
            self._begin(earlier)

    def _refuse_other_shares(self) -> None:
        """Refuse to write a share next to those of another output or source. Raises RefusedError."""
        shown, mine = printable(self._folder), json.loads(json.dumps(self._draft.header))
        for path, other in progress_records(self._folder).items():
            header = None if other in (None, self._draft.share) else read_progress(path).header
            found = differences(header, mine) if header is not None else []
            if found:
                more = f" (and {len(found) - 1:,} more differences)" if found[1:] else ""
                raise RefusedError(
                    f"{shown}: holds share {other} of another output or source: {found[0]}{more}. Give the options and "
                    "source of that share, or another -o/--output; --force writes this share anyway, and then "
                    "the others must be written again."
                )

    def _check_place(self) -> None:
        """Raise EnvironmentFailure if the directory is not the one in which the run began."""
        if not self._partials.is_in_place:
            raise EnvironmentFailure(
                f"{printable(self._folder)}: was moved, removed or replaced while it was written; run again."
            )

    def _resume_from(self, earlier: JsonLine) -> None:
        changes = differences(earlier, json.loads(json.dumps(self._draft.header)))
        shown = printable(self._folder)
        if changes:
            ending = "Give the same options and source, or --force without --resume to start again."
            single = [f"{shown}: cannot be resumed: {changes[0]}. {ending}"]
            headline = f"{shown}: cannot be resumed with other options or another source than before"
            raise together(RefusedError, headline, single if len(changes) == 1 else changes)
        if self._watch is not None:
            hashes = {name: each for line in self._record.log.done.values() for name, each in line[SOURCE].items()}
            self._watch.expect(hashes, self._record.log.latest(IDENTITY) or {}, RefusedError)
        self._partials.own(self._mine, [*names_in(earlier), RECORD])
        self._earlier_record = {key: earlier[RECORDED][key] for key in UNCOMPARED if key in earlier[RECORDED]}
        with self._partials.on_disk():
            self._record.resume()
            self._partials.take_back(self._record)
            self._keep_finished()
            self._record.add(self._source_line)
            if self._record.log.is_complete:
                # Files are copied again, and may be half copied if this run is interrupted.
                self._record.add([{COMPLETE: False, SHA256: {}}])
        self._partials.check_space(self._kept, self._record.path)

    def _begin(self, earlier: JsonLine | None) -> None:
        listed = () if earlier is None else (*names_in(earlier), RECORD)
        stale = () if earlier is None else earlier[OWN_SHARDS] if self._draft.share else names_in(earlier)
        self._partials.own([*self._mine, *(name for name in stale if name not in self._draft.names)], listed)
        self._partials.discard([*self._mine, *stale])
        with self._partials.on_disk():
            self._record.begin(self._draft.header, self._partials.publishing_line, *self._source_line)
        try:
            self._partials.check_space((), self._record.path)
        except EnvironmentFailure:
            self._record.remove()
            raise

    def _keep_finished(self) -> None:
        """Keep what an earlier run finished and is still there; rewrite the progress log if something is not."""
        finished = self._record.log.done
        for shard in self._draft.written:
            if found := entries_to_keep(shard, finished, set(self._held(shard, finished))):
                self._kept[shard.name] = found
        self._lines = [line for of_shard in self._kept.values() for line in of_shard.values()]
        if len(self._lines) < len(finished):
            self._record.begin({**self._draft.header, RECORDED: self.record}, self._partials.publishing_line)
            self._record.add(self._lines)

    def _held(self, shard: Shard, finished: Mapping[str, JsonLine]) -> Iterator[str]:
        """Yield the entries of finished tensors that the shard's partial file holds with the bytes that were written;
        none if its header differs."""
        file = self._partials.reopen(shard.name)
        if file is None:
            return
        with file:
            if file.read(len(shard.header)) != shard.header:
                return
            lines = [line for line in finished.values() if line[SHARD] == shard.name]
            entries = {entry.name: entry for entry in shard.entries}
            for name, recorded in (pair for line in lines for pair in line[STORED].items()):
                if name not in shard.ends:
                    continue
                (position, nbytes), entry = shard.place(name), entries[name]
                file.seek(position)
                content = np.fromfile(file, np.uint8, nbytes)
                is_whole = content.nbytes == nbytes and hash_of(content).record == recorded
                if is_whole and (self._keeps_all or not not_finite(content, name, entry.dtype, entry.shape)):
                    yield name

    def _sync(self) -> None:
        """Sync finished tensors to disk, then log them."""
        if self._waiting:
            with self._partials.on_disk():
                if self._shard is not None:
                    self._shard[1].sync()
                sync_folder(self._folder)
                self._record.add(self._waiting)
            self._lines += self._waiting
        self._waiting = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def _give_up(self) -> None:
        """End before anything was begun; what an earlier run left stays."""
        self._hasher.shutdown()
        if self._progress is not None:
            try:
                if self._progress.is_readable and self._progress.log.header is None:
                    self._progress.remove()
            finally:
                self._progress.close()
        self._partials.remove_folders()
