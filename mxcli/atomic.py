"""The one way that mxcli writes a file: under a unique name next to it, synced, then renamed.

A reader sees the old file or the whole new one. No link is followed, no file of the user's is opened for writing, and
two runs that write one name do not mix their bytes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".partial"
"""The ending of files that are not complete; nothing reads such a file as a checkpoint."""
_ATTEMPTS = 16
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
"""Errors of file systems without hard links."""


@contextmanager
def whole_file(path: Path, *, replace: bool, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that gets the name `path` when the block ends; after an error, nothing is left of it.

    `mode` is limited by the umask. Without `replace`, raises FileExistsError if something has the name by then, a link
    included; with it, a link at `path` is replaced, and its target is not touched. Raises OSError like open.
    """
    file, temporary = create_unique(path.parent, mode)
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        if replace:
            os.replace(temporary, path)
        else:
            name_new(temporary, path)
    except BaseException:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_unique(folder: Path, mode: int = 0o666) -> tuple[BinaryIO, Path]:
    """Create a file in a folder under a name that nothing has; return it, open for writing, and its path."""
    for _ in range(_ATTEMPTS):
        path = folder / f".mxcli-{os.urandom(8).hex()}{UNFINISHED}"
        with suppress(FileExistsError):
            return create_new(path, mode), path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))


def create_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file for reading and writing. Raises FileExistsError if anything has the name, a link included."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, mode), "w+b")


def name_new(temporary: Path, path: Path) -> None:
    """Give a file its final name. Raises FileExistsError if something has it already."""
    try:
        os.link(temporary, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def sync_folder(folder: Path) -> None:
    """Sync the names in a directory to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync directories; the files themselves are synced.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
