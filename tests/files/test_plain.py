"""Files that are none to read: what has no size may wait for ever, or never end."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.plain import read_head, read_json_object

SYSTEM = ("/proc/kmsg", "/proc/self/status", "/proc/self/pagemap", "/proc/self/mem", "/proc/cpuinfo")


@pytest.mark.parametrize("target", SYSTEM)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x.gguf", "x.npy", "x.npz", "model.safetensors.index.json"])
def test_files_of_the_system_are_not_read(tmp_path: Path, target: str, name: str) -> None:
    """Linux's log of the kernel makes its reader wait, a process's memory has no first byte."""
    if not Path(target).is_file():
        pytest.skip(f"no {target} here")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(InputError):
        open_checkpoint(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc here")
def test_a_file_without_a_size_is_empty() -> None:
    for read in (read_head, read_json_object):
        with pytest.raises(InputError, match=r"^/proc/self/status: empty file \(0 bytes\)"):
            read(Path("/proc/self/status"))


def test_the_head_of_a_file_ends_with_it(tmp_path: Path) -> None:
    for size, head in ((1, 1), (1023, 1023), (1024, 1024), (5000, 1024)):
        (tmp_path / "x").write_bytes(b"a" * size)
        assert read_head(tmp_path / "x") == (b"a" * head, size)


@pytest.mark.parametrize("name", ["model", "model.safetensors", "model.pt", "model.npz"])
def test_an_archive_is_named(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / name, "w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"))
    with pytest.raises(InputError, match=r"bytes, a tar archive, as NeMo writes them; unpack it, or convert it with"):
        open_checkpoint(tmp_path / name)
