"""An output directory, in which no file has its final name before all are complete and on disk.

Files are written as `NAME.partial`, synced, and renamed together at the end; the record (`mxcli.json`) comes last, so
that a directory with a record is complete. Until then a progress log lists the tensors on disk, so that an interrupted
run can be resumed. The source is never written to, nor is the target of any link.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from mxcli.errors import EnvironmentFailure, RefusedError, printable, together
from mxcli.files.model_files import RECORD
from mxcli.files.partials import OutputFolder, Partials, stays_inside, sync_folder
from mxcli.files.progress import (
    COMPLETE,
    ENTRIES,
    MEMO,
    RECORDED,
    UNCOMPARED,
    Draft,
    JsonLine,
    ProgressRecord,
    differences,
    entries_to_keep,
    names_in,
    progress_path,
    refuse_other_runs,
    refuse_unfinished,
)
from mxcli.files.shard_file import Shard, ShardFile
from mxcli.files.tensors import Array

SYNC_BYTES, SYNC_SECONDS = 1 << 28, 5.0
"""Bytes and seconds between two syncs, after each of which finished tensors are logged: the most that an interruption
loses."""


class Output:
    """A directory being written.

    A `with` block that ends before `publish` or `complete` keeps finished work for a resume, unless there is none or
    the block was left by a refusal: then everything it began is removed. With `resume` it continues what an earlier run
    left.
    """

    def __init__(self, folder: OutputFolder, draft: Draft, *, resume: bool = False, force: bool = False) -> None:
        copied = sum(path.stat().st_size for path in draft.copied.values())
        self._folder, self._draft, self._resume, self._force = folder.path, draft, resume, force
        self._partials = Partials(folder, draft.names, sum(shard.nbytes for shard in draft.written) + copied)
        self._earlier_record: JsonLine = {}
        self._kept: dict[str, dict[str, JsonLine]] = {}
        self._progress: ProgressRecord | None = None
        self._has_lines = self._is_done = False
        self._shard: tuple[Shard, ShardFile] | None = None
        self._waiting: list[JsonLine] = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def __enter__(self) -> Output:
        """Take the directory.

        Raises RefusedError if another run holds it, if the run to resume made something else, or if a run that is not
        resumed finished something (without `force`); EnvironmentFailure if the disk cannot hold the output.
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
            self._record.close()

    def _leave(self, error: BaseException | None) -> None:
        """Keep what can be resumed, else remove what was begun."""
        with suppress(Exception):
            self._sync()
        if self._shard is not None:
            with suppress(OSError):
                self._shard[1].close()
        if not self._is_done and (isinstance(error, RefusedError) or not self.has_progress):
            self._record.remove()
            self._partials.remove(self._mine)
        elif error is not None and not self._is_done:
            error.add_note(
                f"Finished work is kept in {printable(self._folder)}; the same command with --resume continues it."
            )

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
        return self._has_lines

    def begin_shard(self, shard: Shard) -> None:
        """Open the next shard: a new file, or the one an earlier run left."""
        with self._partials.on_disk():
            written = [name for line in self._kept.get(shard.name, {}).values() for name in line[ENTRIES]]
            file = self._partials.reopen(shard.name) if shard.name in self._kept else None
            self._shard = shard, ShardFile(shard, file or self._partials.create(shard.name), written if file else ())

    def write(self, name: str, array: Array) -> None:
        """Write one tensor of the open shard."""
        assert self._shard is not None
        with self._partials.on_disk():
            self._shard[1].write(name, array)
        self._waiting_bytes += array.nbytes

    def finish(self, entries: tuple[str, ...], memo: str) -> None:
        """Log a source tensor as finished: all of its `entries` are written. `memo` is stored for a resumed run once
        the bytes are on disk."""
        assert self._shard is not None
        self._waiting.append({"shard": self._shard[0].name, ENTRIES: list(entries), MEMO: memo})
        if self._waiting_bytes >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def end_shard(self) -> None:
        """Sync the open shard to disk and close it."""
        assert self._shard is not None
        with self._partials.on_disk():
            self._shard[1].finish()
        self._shard = None

    def complete(self) -> None:
        """Copy this share's files and mark the share complete; it keeps its partial names until all shares are
        merged."""
        self._sync()
        for name, path in self._draft.copied.items():
            self._partials.copy(path, name)
        with self._partials.on_disk():
            self._record.add([{COMPLETE: True}])
        self._is_done = True

    def publish(self, record: dict[str, object]) -> None:
        """Write everything else, give every file its final name, remove files of an earlier output that this one lacks,
        then add the record."""
        self._sync()
        for name, content in self._draft.documents.items():
            self._partials.write_json(name, content)
        for name, path in self._draft.copied.items():
            self._partials.copy(path, name)
        self._partials.publish(record, [self._record])
        self._is_done = True

    @property
    def _record(self) -> ProgressRecord:
        assert self._progress is not None
        return self._progress

    @property
    def _mine(self) -> list[str]:
        """Return the names of the files this run writes, not those of other shares."""
        draft = self._draft
        return [*(shard.name for shard in draft.written), *(draft.copied if draft.share else [*draft.names, RECORD])]

    def _take(self) -> None:
        folder, shown = self._folder, printable(self._folder)
        self._partials.make_folders()
        with self._partials.on_disk():
            self._progress = ProgressRecord.open(progress_path(folder, self._draft.share))
            refuse_other_runs(folder, self._draft.share, force=self._force)
        earlier = self._record.log.header
        if self._resume and earlier is not None:
            self._resume_from(earlier)
        elif (folder / RECORD).exists() and not self._force:
            raise RefusedError(f"{shown}: was written by another run meanwhile; --force replaces it.")
        else:
            if not self._force:
                refuse_unfinished(folder, self._draft.share, self._record.log)
            self._begin(earlier)

    def _resume_from(self, earlier: JsonLine) -> None:
        changes = differences(earlier, json.loads(json.dumps(self._draft.header)))
        shown = printable(self._folder)
        if changes:
            ending = "Give the same options and source, or --force without --resume to start again."
            single = [f"{shown}: cannot be resumed: {changes[0]}. {ending}"]
            headline = f"{shown}: cannot be resumed with other options or another source than before"
            raise together(RefusedError, headline, single if len(changes) == 1 else changes)
        self._earlier_record = {key: earlier[RECORDED][key] for key in UNCOMPARED if key in earlier[RECORDED]}
        with self._partials.on_disk():
            self._record.resume()
            self._partials.take_back(self._record)
            self._keep_finished()
            if self._record.log.latest(COMPLETE):
                # Files are copied again, and may be half copied if this run is interrupted.
                self._record.add([{COMPLETE: False}])
        self._partials.check_space(self._kept)

    def _begin(self, earlier: JsonLine | None) -> None:
        stale = [] if earlier is None or self._draft.share else names_in(earlier)
        with self._partials.on_disk():
            self._record.begin(self._draft.header, self._partials.publishing_line)
            self._partials.discard([*self._mine, *(name for name in stale if stays_inside(self._folder, name))])
        try:
            self._partials.check_space()
        except EnvironmentFailure:
            self._record.remove()
            raise

    def _keep_finished(self) -> None:
        """Keep what an earlier run finished and is still there; rewrite the progress log if something is not."""
        finished = self._record.log.done
        for shard in self._draft.written:
            if found := entries_to_keep(shard, finished, self._written(shard)):
                self._kept[shard.name] = found
        kept = [line for of_shard in self._kept.values() for line in of_shard.values()]
        if len(kept) < len(finished):
            self._record.begin({**self._draft.header, RECORDED: self.record}, self._partials.publishing_line)
            self._record.add(kept)
        self._has_lines = bool(kept)

    def _written(self, shard: Shard) -> set[str]:
        """Return the entries that the shard's partial file is long enough to hold; none if its header differs."""
        file = self._partials.reopen(shard.name)
        if file is None:
            return set()
        with file:
            if file.read(len(shard.header)) != shard.header:
                return set()
            size = os.fstat(file.fileno()).st_size
        return {name for name, end in shard.ends.items() if end <= size}

    def _sync(self) -> None:
        """Sync finished tensors to disk, then log them."""
        if self._waiting:
            with self._partials.on_disk():
                if self._shard is not None:
                    self._shard[1].sync()
                sync_folder(self._folder)
                self._record.add(self._waiting)
            self._has_lines = True
        self._waiting = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def _give_up(self) -> None:
        """End before anything was begun; what an earlier run left stays."""
        if self._progress is not None:
            try:
                if self._progress.log.header is None:
                    self._progress.remove()
            finally:
                self._progress.close()
        self._partials.remove_folders()
