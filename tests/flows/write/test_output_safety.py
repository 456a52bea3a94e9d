"""What becomes of output, source and earlier output when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import LLAMA, llama, noise, tree, write_model

from mxcli.backends.backend import Backend
from mxcli.backends.cpu import Cpu
from mxcli.errors import EnvironmentFailure, InputError, LimitError, RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.progress import Share
from mxcli.files.shard_file import ShardFile
from mxcli.flows.measure.report import make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.verify.written import check_written
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.pipeline import WriteOptions
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.blocks import Quantized
from mxcli.numerics.hadamard import Hadamard
from mxcli.numerics.scheme import Scheme
from mxcli.numerics.stats import Amax

SHARDS = {
    "model-00001-of-00002.safetensors": {"a.weight": noise(64, 64), "a.norm.weight": noise(64)},
    "model-00002-of-00002.safetensors": {"b.weight": noise(64, 64, seed=1)},
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source", SHARDS, LLAMA, {"tokenizer.json": "{}"})


def quantized(source: Path, output: Path, format: str = "mxfp4", backend: Backend | None = None, **manner: Any) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format))
    quantize_checkpoint(checkpoint, plan, output, backend=backend or Cpu(), options=WriteOptions(**manner))


@pytest.mark.parametrize("where", ["source", "source/out", "link", "link/out"])
def test_the_source_is_never_written_to(tmp_path: Path, source: Path, where: str) -> None:
    (tmp_path / "link").symlink_to(source)
    before = tree(source)
    for force in (False, True):
        with pytest.raises(RefusedError):
            quantized(source, tmp_path / where, force=force)
    assert tree(source) == before


def test_an_output_that_exists_needs_force(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(RefusedError, match="--force"):
        quantized(source, tmp_path / "out", "mxfp8")
    assert tree(tmp_path / "out") == before
    quantized(source, tmp_path / "out", "mxfp8", force=True)
    quantized(source, tmp_path / "fresh", "mxfp8")
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_force_removes_our_stale_shards_and_leaves_what_is_not_ours(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    single = write_model(tmp_path / "single", {"a.weight": noise(4, 32)})
    quantized(single, tmp_path / "out", force=True)
    assert set(tree(tmp_path / "out")) == {"model.safetensors", "config.json", "mxcli.json", "notes.txt"}


def test_links_in_an_output_are_replaced_not_followed(tmp_path: Path, source: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "config.json").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "cache" / "config.json")
    (tmp_path / "out" / "config.json.partial").symlink_to(tmp_path / "cache" / "config.json")
    with pytest.raises(RefusedError, match=r"config\.json\.partial: a link, and is left as it is; move it away"):
        quantized(source, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "config.json.partial").is_symlink()
    (tmp_path / "out" / "config.json.partial").unlink()
    quantized(source, tmp_path / "out", force=True)
    assert (tmp_path / "cache" / "config.json").read_text() == "precious"
    assert not (tmp_path / "out" / "config.json").is_symlink()


def fail_at_tensor(number: int, error: Exception) -> Callable[[ShardFile, str, np.ndarray], None]:
    write, calls = ShardFile.write, iter(range(1, 1000))

    def failing(self: ShardFile, name: str, array: np.ndarray) -> None:
        if next(calls) == number:
            raise error
        write(self, name, array)

    return failing


def finals(folder: Path) -> dict[str, bytes]:
    """The files that bear their final names."""
    return {name: content for name, content in tree(folder).items() if not name.endswith(".partial")}


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_full_disk_leaves_an_earlier_output_and_what_can_be_resumed(
    tmp_path: Path, source: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(source, tmp_path / "out")
    quantized(source, tmp_path / "uninterrupted", "mxfp8")
    before = tree(tmp_path / "out")
    monkeypatch.setattr(ShardFile, "write", fail_at_tensor(number, OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(
        EnvironmentFailure, match=r"disk full: No space left on device; free some space, or give another"
    ) as full:
        quantized(source, tmp_path / "out", "mxfp8", force=True)
    assert full.value.exit_code == 6
    assert finals(tmp_path / "out") == before
    kept = {"model-00001-of-00002.safetensors.partial", "model-00002-of-00002.safetensors.partial"}
    assert (
        set(tree(tmp_path / "out")) - set(before)
        == {
            1: set(),
            2: set(),
            5: {"mxcli.progress.partial", *kept},
        }[number]
    )
    monkeypatch.setattr(ShardFile, "write", fail_at_tensor(1, OSError(errno.EIO, "broken")))
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        quantized(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.undo()
    quantized(source, tmp_path / "out", "mxfp8", force=True, resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "uninterrupted")


class FailingBackend:
    """The CPU until its third tensor."""

    name = "cuda:0"

    def __init__(self) -> None:
        self._calls = iter(range(1, 1000))

    def amax(self, x: Any, dtype: str, hadamard: Hadamard | None = None) -> Amax:
        return Cpu().amax(x, dtype, hadamard)

    def quantize(self, x: Any, dtype: str, recipe: Scheme, **more: Any) -> Quantized:
        self._count()
        return Cpu().quantize(x, dtype, recipe, **more)

    def dequantize(self, q: Quantized, dtype: str = "F32") -> Any:
        self._count()
        return Cpu().dequantize(q, dtype)

    def _count(self) -> None:
        if next(self._calls) == 3:
            raise EnvironmentFailure("cuda:0 is out of memory")


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_what_a_device_that_fails_had_done_is_kept_and_another_goes_on(tmp_path: Path, format: str) -> None:
    source = write_model(tmp_path / "source", llama(), LLAMA)
    quantized(source, tmp_path / "out")
    quantized(source, tmp_path / "uninterrupted", format)
    before, checkpoint = tree(tmp_path / "out"), open_checkpoint(source)
    for folder in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(EnvironmentFailure, match="cuda:0 is out of memory") as failed:
            quantized(source, folder, format, backend=FailingBackend(), force=True)
        assert failed.value.__notes__ == [
            f"Finished work is kept in {folder}; the same command with --resume continues it."
        ]
        kept = {"model.safetensors.partial", "mxcli.progress.partial"}
        assert set(tree(folder)) - set(finals(folder)) == kept
        assert finals(folder) == (before if folder.name == "out" else {})
        quantized(source, folder, format, force=True, resume=True)
        assert tree(folder) == tree(tmp_path / "uninterrupted")
    quantized(source, tmp_path / "q")
    with pytest.raises(EnvironmentFailure, match="cuda:0 is out of memory"):
        dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "back", backend=FailingBackend())
    dequantize_checkpoint(
        open_checkpoint(tmp_path / "q"), tmp_path / "back", backend=Cpu(), options=WriteOptions(resume=True)
    )
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "whole", backend=Cpu())
    assert tree(tmp_path / "back") == tree(tmp_path / "whole")
    seen: list[str] = []
    with pytest.raises(EnvironmentFailure, match="cuda:0 is out of memory"):
        make_report(
            "x",
            checkpoint,
            make_plan(checkpoint, Options(format)),
            backend=FailingBackend(),
            on_layer=lambda layer: seen.append(layer.name),
            per_block=tmp_path / "blocks.safetensors",
        )
    assert len(seen) == 2
    assert not (tmp_path / "blocks.safetensors").exists()
    assert not (tmp_path / "blocks.safetensors.partial").exists()


def test_a_small_file_system_that_fills_up(tmp_path: Path) -> None:
    """The real thing, where file systems may be mounted: another program takes the space while we write."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        tensors = {f"l.{n}.weight": noise(256, 1024) for n in range(8)}
        source = write_model(tmp_path / "big", tensors)

        def take_the_space(done: int, total: int, name: str) -> None:
            if name == "l.3.weight":
                with suppress(OSError), (disk / "other").open("wb", buffering=0) as other:
                    while other.write(bytes(4096)):
                        pass

        with pytest.raises(EnvironmentFailure, match="disk full") as full:
            quantized(source, disk / "out", on_progress=take_the_space)
        assert "--resume continues it" in full.value.__notes__[0]
        kept = {"model.safetensors.partial", "mxcli.progress.partial"}
        assert set(tree(disk / "out")) == kept
        with pytest.raises(EnvironmentFailure, match="disk full"):
            quantized(source, disk / "out", resume=True)
        assert set(tree(disk / "out")) == kept
        (disk / "other").unlink()
        quantized(source, disk / "out", resume=True)
        quantized(source, tmp_path / "uninterrupted")
        assert tree(disk / "out") == tree(tmp_path / "uninterrupted")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_killed_run_leaves_partial_names_only_and_can_be_repeated(tmp_path: Path, source: Path) -> None:
    before = tree(source)
    script = f"""
        import os, signal
        from mxcli.files.checkpoint import open_checkpoint
        from mxcli.flows.plan.plan import Options, make_plan
        from mxcli.backends.cpu import Cpu
        from mxcli.flows.write.quantize import quantize_checkpoint
        from mxcli.flows.write.pipeline import WriteOptions

        def kill(done, total, name):
            if name == "b.weight":
                os.kill(os.getpid(), signal.SIGKILL)

        checkpoint = open_checkpoint({str(source)!r})
        plan = make_plan(checkpoint, Options("mxfp4"))
        manner = WriteOptions(on_progress=kill)
        quantize_checkpoint(checkpoint, plan, {str(tmp_path / "out")!r}, backend=Cpu(), options=manner)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "model-00001-of-00002.safetensors.partial",
        "model-00002-of-00002.safetensors.partial",
        "mxcli.progress.partial",
    ]
    assert tree(source) == before
    quantized(source, tmp_path / "out")
    quantized(source, tmp_path / "uninterrupted")
    assert tree(tmp_path / "out") == tree(tmp_path / "uninterrupted")


def test_an_interrupted_run_leaves_what_can_be_resumed(tmp_path: Path, source: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interrupted:
        quantized(source, tmp_path / "out", on_progress=interrupt)
    assert "--resume continues it" in interrupted.value.__notes__[0]
    assert set(tree(tmp_path / "out")) == {"model-00001-of-00002.safetensors.partial", "mxcli.progress.partial"}


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RefusedError, match="file is not a directory; give another -o/--output"):
        quantized(source, tmp_path / "file" / "out")


def test_dequantizing_obeys_the_same_rules(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", llama(), LLAMA)
    quantized(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    for where in ("out", "out/plain"):
        with pytest.raises(RefusedError):
            dequantize_checkpoint(
                open_checkpoint(tmp_path / "out"), tmp_path / where, backend=Cpu(), options=WriteOptions(force=True)
            )
    assert tree(tmp_path / "out") == before


def test_an_output_that_is_not_sound_gets_no_final_names(tmp_path: Path, source: Path) -> None:
    """The check sees all files by their final names; what is kept is published without it."""
    seen: list[set[str]] = []

    def check(folder: Path) -> None:
        seen.append(set(tree(folder)))
        raise LimitError("not sound")

    with pytest.raises(LimitError):
        quantized(source, tmp_path / "out", check=check)
    assert finals(tmp_path / "out") == {}
    quantized(source, tmp_path / "out", resume=True)
    assert seen == [set(tree(tmp_path / "out"))]
    assert json.loads((tmp_path / "out" / "mxcli.json").read_text())["verified"] is False


def test_structure_and_configuration_are_checked_before_the_end(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "out")
    check_written(tmp_path / "out", "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = {**config, "quantization_config": {**config["quantization_config"], "ignore": ["a", "b"]}}
    (tmp_path / "out" / "config.json").write_text(json.dumps(ignored))
    with pytest.raises(LimitError, match="out: what was written is not sound and has no final names") as failed:
        check_written(tmp_path / "out", "out")
    assert failed.value.exit_code == 5
    shard = tmp_path / "out" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(LimitError, match=r"model-00002-of-00002\.safetensors"):
        check_written(tmp_path / "out", "out")


def side_source(folder: Path) -> Path:
    return write_model(folder, SHARDS, LLAMA, {"tokenizer.json": "{}", "README.md": "theirs", "sub/a.txt": "a"})


@pytest.mark.parametrize("name", ["README.md", "sub/a.txt", "tokenizer.json"])
def test_force_keeps_a_file_of_the_earlier_output_that_was_changed(tmp_path: Path, name: str) -> None:
    quantized(side_source(tmp_path / "source"), tmp_path / "out")
    (tmp_path / "out" / name).write_text("mine")
    single = write_model(tmp_path / "single", {"a.weight": noise(4, 32)})
    quantized(single, tmp_path / "out", force=True)
    assert (tmp_path / "out" / name).read_text() == "mine"
    assert set(tree(tmp_path / "out")) == {"model.safetensors", "config.json", "mxcli.json", name}


@pytest.mark.parametrize("name", ["notes.txt", "sub/mine.json", "LICENSE"])
def test_force_keeps_a_file_that_was_added_to_the_record(tmp_path: Path, source: Path, name: str) -> None:
    quantized(source, tmp_path / "out")
    (tmp_path / "out/sub").mkdir()
    (tmp_path / "out" / name).write_text("precious")
    record = json.loads((tmp_path / "out/mxcli.json").read_text())
    record["files"].append(name)
    record["sha256"][name] = "0" * 64
    (tmp_path / "out/mxcli.json").write_text(json.dumps(record))
    quantized(source, tmp_path / "out", "mxfp8", force=True)
    assert (tmp_path / "out" / name).read_text() == "precious"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("way", ["itself", "link", "second name"])
def test_no_input_is_replaced(tmp_path: Path, source: Path, name: str, way: str) -> None:
    (tmp_path / "out").mkdir()
    read = place = tmp_path / "out" / name
    place.write_text("precious")
    before = place.read_text()
    if way != "itself":
        read = tmp_path / "read"
        read.symlink_to(place) if way == "link" else read.hardlink_to(place)
    with pytest.raises(RefusedError, match="is read by this run, and the output would replace or remove it"):
        quantized(source, tmp_path / "out", force=True, inputs=(read,))
    assert place.read_text() == before


@pytest.mark.parametrize("kind", ["pipe", "link out", "link in", "other file", "folder", "removed"])
def test_a_side_file_that_is_replaced_during_the_run(tmp_path: Path, source: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("secret")
    place = source / "tokenizer.json"

    def replace(done: int, total: int, name: str) -> None:
        place.unlink(missing_ok=True) if not place.is_dir() else None
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "link out":
            place.symlink_to(tmp_path / "secret")
        elif kind == "link in":
            place.symlink_to("config.json")
        elif kind == "other file":
            place.write_text("[]")
        elif kind == "folder":
            place.mkdir(exist_ok=True)

    with pytest.raises(InputError, match=r"tokenizer\.json: (changed while in use|cannot be read)"):
        quantized(source, tmp_path / "out", on_progress=replace)
    assert finals(tmp_path / "out") == {}
    copied = tmp_path / "out" / "tokenizer.json.partial"
    assert not copied.exists() or copied.read_bytes() == b""


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_was_moved_during_the_run(tmp_path: Path, source: Path, replaced: bool) -> None:
    def move(done: int, total: int, name: str) -> None:
        if name == "a.weight":
            (tmp_path / "out").rename(tmp_path / "moved")
            if replaced:
                (tmp_path / "out").mkdir()

    with pytest.raises(EnvironmentFailure) as failed:
        quantized(source, tmp_path / "out", on_progress=move)
    note = (
        f"{tmp_path / 'out'} is not the directory any more in which this run had begun: what it finished is where that "
        "was moved, if it still exists."
    )
    assert failed.value.__notes__ == [note]
    assert not replaced or tree(tmp_path / "out") == {}


@pytest.mark.parametrize(("format", "more"), [("mxfp8", {}), ("nvfp4", {}), ("mxfp4", {"source": 1})])
def test_a_share_of_another_output_is_refused_at_the_start(
    tmp_path: Path, source: Path, format: str, more: dict[str, int]
) -> None:
    quantized(source, tmp_path / "out", share=Share(1, 2))
    before = tree(tmp_path / "out")
    other = side_source(tmp_path / "other") if more else source
    with pytest.raises(RefusedError, match="holds share 1/2 of another output or source"):
        quantized(other, tmp_path / "out", format, share=Share(2, 2))
    assert tree(tmp_path / "out") == before
