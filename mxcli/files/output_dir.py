"""An output directory: nothing bears its final name before everything is complete and on the disk.

Files are written as `NAME.partial`, synced, and renamed together at the end; the record (`mxcli.json`) comes last, so
that a directory with a record is complete. Until then a record of progress says which tensors are on the disk, so that
a run that was cut short can be gone on with. The source is never written to, nor what a link leads to.
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
from mxcli.files.partials import Partials, Place, stays_inside, sync_folder
from mxcli.files.progress import (
    COMPLETE,
    ENTRIES,
    MEMO,
    RECORDED,
    UNCOMPARED,
    Draft,
    Line,
    ProgressRecord,
    differences,
    names_in,
    progress_path,
    refuse_other_runs,
    refuse_unfinished,
)
from mxcli.files.shard_file import Shard, ShardFile
from mxcli.files.tensors import Array

SYNC_BYTES, SYNC_SECONDS = 1 << 28, 5.0
"""What is written, and for how long, between two moments at which finished tensors are recorded: most that is lost."""


class Output:
    """A directory being written.

    A `with` block that ends before `publish` or `complete` leaves what is finished to be resumed, unless nothing is or
    it ends by a refusal: then all that was begun is removed. With `resume` it goes on with what an earlier run left.
    """

    def __init__(self, place: Place, draft: Draft, *, resume: bool = False, force: bool = False) -> None:
        copied = sum(path.stat().st_size for path in draft.copied.values())
        self._place, self._draft, self._resume, self._force = place, draft, resume, force
        self._partials = Partials(place, draft.names, sum(shard.nbytes for shard in draft.written) + copied)
        self._said_before: Line = {}
        self._kept: dict[str, dict[str, Line]] = {}
        self._progress: ProgressRecord | None = None
        self._has_lines = self._is_done = False
        self._shard: tuple[Shard, ShardFile] | None = None
        self._waiting: list[Line] = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def __enter__(self) -> Output:
        """Take the directory; raises RefusedError where another run has it, the one to resume made something else or
        one that is not to be resumed finished something (without `force`), and EnvironmentFailure if the disk cannot
        hold the output."""
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
                f"What is finished is kept in {printable(self._place.folder)}; the same command with --resume goes on "
                "from there."
            )

    @property
    def record(self) -> dict[str, object]:
        """What the record says before anything is measured; a resumed run says what it said when it began."""
        return {**self._draft.record, **self._said_before}

    @property
    def kept(self) -> Mapping[str, str]:
        """What was remembered of the tensors that an earlier run finished, by the first name each is written as."""
        return {key: line[MEMO] for of_shard in self._kept.values() for key, line in of_shard.items()}

    @property
    def has_progress(self) -> bool:
        """Whether a later run would find anything finished."""
        return self._has_lines

    def begin_shard(self, shard: Shard) -> None:
        """Open the next shard; its header is written, and what an earlier run finished of it."""
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
        """Everything of a tensor of the source is written, as `entries`; `memo` is remembered of it if this run is cut
        short, once the bytes are on the disk."""
        assert self._shard is not None
        self._waiting.append({"shard": self._shard[0].name, ENTRIES: list(entries), MEMO: memo})
        if self._waiting_bytes >= SYNC_BYTES or time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def end_shard(self) -> None:
        """Bring the open shard to the disk."""
        assert self._shard is not None
        with self._partials.on_disk():
            self._shard[1].finish()
        self._shard = None

    def complete(self) -> None:
        """Copy what is this share's to copy; the share stays as it is until all are merged."""
        self._sync()
        for name, path in self._draft.copied.items():
            self._partials.copy(path, name)
        with self._partials.on_disk():
            self._record.add([{COMPLETE: True}])
        self._is_done = True

    def publish(self, record: dict[str, object]) -> None:
        """Write everything else, give every file its final name, remove files of an earlier output that this one lacks,
        then add the record.
        """
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
        """The files that this run writes; those of other shares are not its own."""
        draft = self._draft
        return [*(shard.name for shard in draft.written), *(draft.copied if draft.share else [*draft.names, RECORD])]

    def _take(self) -> None:
        folder, shown = self._place.folder, printable(self._place.folder)
        self._partials.make_folders()
        with self._partials.on_disk():
            self._progress = ProgressRecord.open(progress_path(folder, self._draft.share))
            refuse_other_runs(folder, self._draft.share, force=self._force)
        earlier = self._record.told.header
        if self._resume and earlier is not None:
            self._go_on(earlier)
        elif (folder / RECORD).exists() and not self._force:
            raise RefusedError(f"{shown}: was written by another run meanwhile; --force replaces it.")
        else:
            if not self._force:
                refuse_unfinished(folder, self._draft.share, self._record.told)
            self._begin(earlier)

    def _go_on(self, earlier: Line) -> None:
        changes = differences(earlier, json.loads(json.dumps(self._draft.header)))
        shown = printable(self._place.folder)
        if changes:
            ending = "Give the same options and source, or --force without --resume to begin anew."
            one = [f"{shown}: cannot be resumed: {changes[0]}. {ending}"]
            headline = f"{shown}: cannot be resumed with other options or another source than before"
            raise together(RefusedError, headline, one if len(changes) == 1 else changes)
        self._said_before = {key: earlier[RECORDED][key] for key in UNCOMPARED if key in earlier[RECORDED]}
        with self._partials.on_disk():
            self._record.resume()
            self._partials.take_back(self._record)
            self._find_kept()
            if self._record.told.latest(COMPLETE):
                # Its copies are made anew, and may be half made when this run is cut short.
                self._record.add([{COMPLETE: False}])
        self._partials.check_space(self._kept)

    def _begin(self, earlier: Line | None) -> None:
        stale = [] if earlier is None or self._draft.share else names_in(earlier)
        with self._partials.on_disk():
            self._record.begin(self._draft.header, self._partials.earlier_line)
            self._partials.discard([*self._mine, *(name for name in stale if stays_inside(self._place.folder, name))])
        try:
            self._partials.check_space()
        except EnvironmentFailure:
            self._record.remove()
            raise

    def _find_kept(self) -> None:
        """What an earlier run finished and is there; the record of progress is told where it is not."""
        lines = self._record.told.done
        for shard in self._draft.written:
            there = self._written(shard)
            found = {
                key: line
                for key, line in lines.items()
                if line["shard"] == shard.name and there.issuperset(line[ENTRIES])
            }
            if found:
                self._kept[shard.name] = found
        kept = [line for of_shard in self._kept.values() for line in of_shard.values()]
        if len(kept) < len(lines):
            self._record.begin({**self._draft.header, RECORDED: self.record}, self._partials.earlier_line)
            self._record.add(kept)
        self._has_lines = bool(kept)

    def _written(self, shard: Shard) -> set[str]:
        """The tensors that a file with the header of the shard, under its partial name, is long enough to hold."""
        file = self._partials.reopen(shard.name)
        if file is None:
            return set()
        with file:
            if file.read(len(shard.header)) != shard.header:
                return set()
            size = os.fstat(file.fileno()).st_size
        return {name for name, end in shard.ends.items() if end <= size}

    def _sync(self) -> None:
        """Bring finished tensors to the disk, then say so."""
        if self._waiting:
            with self._partials.on_disk():
                if self._shard is not None:
                    self._shard[1].sync()
                sync_folder(self._place.folder)
                self._record.add(self._waiting)
            self._has_lines = True
        self._waiting = []
        self._waiting_bytes, self._synced_at = 0, time.monotonic()

    def _give_up(self) -> None:
        """End before anything was begun; what an earlier run left stays."""
        if self._progress is not None:
            try:
                if self._progress.told.header is None:
                    self._progress.remove()
            finally:
                self._progress.close()
        self._partials.remove_folders()
