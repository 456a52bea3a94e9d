"""Signals, --resume, --shard-range and merge from the outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import SAMPLE, environment, strict_json

from mxcli.cli import writing
from mxcli.errors import EnvironmentFailure, UsageError
from mxcli.files.progress import Share


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def signal_at(monkeypatch: pytest.MonkeyPatch, tensor: str, number: int) -> None:
    """The signal comes when the tensor is done."""

    @contextmanager
    def progress(*_: object) -> Iterator[Callable[[int, int, str], None]]:
        def show(done: int, total: int, name: str) -> None:
            if name == tensor:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

        yield show

    monkeypatch.setattr(writing, "progress", progress)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_the_tensor_and_resume_goes_on(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    words = ("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out")
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with monkeypatch.context() as patch:
        signal_at(patch, "model.layers.1.mlp.down_proj.weight", number)
        code, out, err = mxcli(*words)
    assert {each: signal.getsignal(each) for each in before} == before
    assert code == 130
    assert [line for line in err.splitlines() if not line.startswith("note: ")] == [
        "interrupted: finishing the current tensor; a second signal stops at once",
        f"{tmp_path / 'out'}: 623 kB of 1.71 MB of the source are finished and kept; the same command with --resume "
        "continues from there.",
        "interrupted",
    ]
    lines = out.splitlines()
    assert lines[-1] == "interrupted: 20 tensors not measured"
    assert sum(line.startswith("model.layers.") for line in lines) == 8
    assert set(tree(tmp_path / "out")) == {"model.safetensors.partial", "mxcli.progress.partial"}

    code, out, err = mxcli(*words, "--resume")
    assert code == 0
    assert "note: Resumed: 623 kB of 1.71 MB were finished before." in err.splitlines()
    finished = tree(tmp_path / "out")
    report = mxcli(*words, "--force").out
    assert out == report
    assert finished == tree(tmp_path / "out") | {"mxcli.json": finished["mxcli.json"]}
    assert strict_json(finished["mxcli.json"].decode())["command"] == [str(word) for word in words]


def test_a_hangup_that_nohup_ignores_stays_ignored(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            signal_at(patch, "model.layers.1.mlp.down_proj.weight", signal.SIGHUP)
            assert mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out").code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_dequantizing(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "q")
    with monkeypatch.context() as patch:
        signal_at(patch, "model.layers.1.mlp.down_proj.weight", signal.SIGINT)
        code, out, err = mxcli("dequantize", tmp_path / "q", "-o", tmp_path / "out")
    assert (code, out) == (130, "")
    assert "of the source are finished and kept" in err
    assert mxcli("dequantize", tmp_path / "q", "-o", tmp_path / "out", "--resume").code == 0
    assert mxcli("dequantize", tmp_path / "q", "-o", tmp_path / "whole").code == 0
    one, other = tree(tmp_path / "out"), tree(tmp_path / "whole")
    assert {name: one[name] for name in one if name != "mxcli.json"} == {
        name: other[name] for name in other if name != "mxcli.json"
    }


def test_a_second_signal_always_ends_the_process(tmp_path: Path) -> None:
    """Also while it is in one call of C that takes as long as it likes."""
    script = f"""
        import hashlib, os, signal, threading, time
        from mxcli.cli import app, writing
        from mxcli.flows.write import quantize

        def again():
            for _ in range(2):
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGINT)

        def stuck(*arguments):
            threading.Thread(target=again).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)

        quantize.read = stuck
        app.main(["quantize", {str(SAMPLE)!r}, "--format", "mxfp8", "-o", {str(tmp_path / "out")!r}])
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr.splitlines()[-2:] == [
        "interrupted: finishing the current tensor; a second signal stops at once",
        "interrupted",
    ]
    assert time.monotonic() - began < 30
    assert all(path.suffix == ".partial" for path in (tmp_path / "out").iterdir())


def test_what_an_error_left_to_be_resumed_is_reported(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(*_: object) -> Iterator[Callable[[int, int, str], None]]:
        def show(done: int, total: int, name: str) -> None:
            raise EnvironmentFailure("the disk is full.")

        yield show

    monkeypatch.setattr(writing, "progress", failing)
    code, out, err = mxcli("quantize", SAMPLE, "--format", "mxfp8", "-o", tmp_path / "out")
    assert (code, out) == (6, "")
    assert err.splitlines()[-2:] == [
        "error: the disk is full.",
        f"note: Finished work is kept in {tmp_path / 'out'}; the same command with --resume continues it.",
    ]


def test_other_options_are_not_resumed(
    mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, "model.layers.1.mlp.down_proj.weight", signal.SIGINT)
        mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out")
    code, out, err = mxcli(
        "quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out", "--resume", "--as", "modelopt", "--dry-run"
    )
    assert code == 0
    code, out, err = mxcli(
        "quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out", "--resume", "--as", "modelopt"
    )
    assert (code, out) == (4, "")
    assert f"error: {tmp_path / 'out'}: cannot be resumed: options dialect was none and is modelopt." in err
    before = tree(tmp_path / "out")
    for more in ((), ("--dry-run",), ("--as", "modelopt")):
        code, out, err = mxcli("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out", "-q", *more)
        assert (code, out) == (4, "")
        assert err == (
            f"error: {tmp_path / 'out'}: holds an unfinished run: --resume continues it if the options are the "
            "same, --force starts again.\n"
        )
    assert tree(tmp_path / "out") == before


def test_shares_are_merged(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    words = ("quantize", SAMPLE, "--format", "nvfp4", "-o", tmp_path / "out", "--max-shard-size", "200K")
    planned = mxcli(*words, "--shard-range", "2/2", "--dry-run").err
    assert "note: Share 2/2 would write model-00003-of-00003.safetensors.\n" in planned
    idle = mxcli(*words, "--shard-range", "2/9", "--dry-run").err
    assert "note: Share 2/9 would write no file: there are fewer files than shares.\n" in idle
    assert not (tmp_path / "out").exists()
    code, out, _ = mxcli(*words, "--shard-range", "2/2")
    assert code == 0
    assert out.splitlines()[-1] == (
        f"share 2/2 in {tmp_path / 'out'}: 1 shard, 199 kB; when all 2 are there, `mxcli merge` completes the output"
    )
    code, out, err = mxcli("merge", tmp_path / "out")
    assert (code, out) == (4, "")
    assert err == "error: share 1/2 is missing: write it with --shard-range 1/2.\n"
    record = strict_json(mxcli(*words, "--shard-range", "1/2", "--json").out)
    assert record["share"] == {"number": 1, "of": 2}
    assert record["files"] == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"]
    merged = strict_json(mxcli("merge", tmp_path / "out", "--json").out)
    assert (merged["schema"], merged["shares"], len(merged["files"])) == ("mxcli.merge/1", 2, 7)
    shared = tree(tmp_path / "out")
    mxcli(*words, "--force")
    whole = tree(tmp_path / "out")
    assert {**shared, "mxcli.json": b""} == {**whole, "mxcli.json": b""}
    one, other = (strict_json(each["mxcli.json"].decode()) for each in (shared, whole))
    del one["command"], other["command"]
    assert one == other


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1.5/4"])
def test_invalid_shares(text: str) -> None:
    with pytest.raises(UsageError, match=r"--shard-range '.*' is not a share: give I/N with I from 1 to N"):
        writing.share_of(text)


@pytest.mark.parametrize("text", ["1/1000000", "1000000/1000000", "7/99999999999"])
def test_too_many_shares(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        writing.share_of(text)
    assert refused.value.message == f"--shard-range '{text}': N is too large: the most shares are 999,999."


def test_a_share_is_counted_from_one() -> None:
    assert writing.share_of("4/4") == Share(4, 4)
    with pytest.raises(UsageError, match="--max-shard-size '5Q' is not a size"):
        writing.Writing(max_shard_size="5Q")
    assert writing.Writing(max_shard_size="5G").max_shard_bytes == 5 << 30
