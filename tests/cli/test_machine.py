"""--device and --max-memory: sizes, refusals before any work, and outputs that do not depend on them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import REPOSITORY, SAMPLE, command, environment, strict_json

from mxcli.backends import gpus
from mxcli.backends.cpu import Cpu
from mxcli.backends.gpus import Gpu, GpuState
from mxcli.cli.arguments import repeatable
from mxcli.cli.machine import memory_size
from mxcli.errors import EnvironmentFailure, UsageError

FORMAT = ("--format", "nvfp4")
NO_CUPY = "CuPy is not installed: pip install 'cupy-cuda12x>=14' 'nvidia-cuda-nvrtc-cu12>=12.8'"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("12B", 12),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 << 30),
        ("8GiB", 8 << 30),
        ("512M", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0.1K", 102),
        ("2 T", 2 << 40),
        (" 64k ", 64 << 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert memory_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "8X", "8P", "-8G", "1e9", "8 G B", "1,5G", "0", "0.0001K", "8Gi8", ".5G", "9" * 5000, "٣G", "nan"]
)
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size: give bytes, or a number with K, M, G or T such as 8G"):
        memory_size(text)


@pytest.mark.parametrize(
    ("typed", "repeated"),
    [
        ("quantize m --device cpu --threads 2 --max-memory 8G -o x", "quantize m -o x"),
        ("quantize --device=cuda:0 --threads=2 --max-memory=8G m -q", "quantize m -q"),
        ("quantize m --device", "quantize m"),
        ("quantize m --resume --shard-range 1/4 -o x --shard-range=2/4", "quantize m -o x"),
        ("quantize -o x -- --device m", "quantize -o x -- --device m"),
    ],
)
def test_a_recorded_command_is_that_of_any_machine(typed: str, repeated: str) -> None:
    assert repeatable(typed.split()) == repeated.split()


def test_outputs_do_not_depend_on_where_they_were_computed(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    def output(*options: str) -> dict[str, bytes]:
        assert mxcli("quantize", SAMPLE, *FORMAT, "-o", tmp_path / "q", *options).code == 0
        assert mxcli("dequantize", tmp_path / "q", "-o", tmp_path / "d", *options).code == 0
        written = {str(path): path.read_bytes() for name in "qd" for path in (tmp_path / name).iterdir()}
        for name in "qd":
            shutil.rmtree(tmp_path / name)
        return written

    assert output() == output("--device", "cpu", "--threads", "1", "--max-memory=1G")


def verbs(tmp_path: Path) -> list[list[object]]:
    return [
        ["report", SAMPLE, *FORMAT],
        ["compare", SAMPLE, "--formats", "mxfp4,nvfp4"],
        ["compare", SAMPLE, "--formats", "mxfp4,nvfp4", "--dry-run"],
        ["quantize", SAMPLE, *FORMAT, "-o", tmp_path / "new"],
        ["quantize", SAMPLE, *FORMAT, "--dry-run"],
        ["dequantize", tmp_path / "q", "-o", tmp_path / "new"],
    ]


def test_too_little_memory_is_refused_before_any_work(mxcli: Callable[..., Any], tmp_path: Path) -> None:
    mxcli("quantize", SAMPLE, *FORMAT, "-o", tmp_path / "q")
    for words in verbs(tmp_path):
        code, out, err = mxcli(*words, "--device", "cpu", "-q", "--max-memory", "64M")
        assert (code, out) == (6, "")
        assert err.startswith("error: model.")
        least = "66M" if words[0] == "quantize" else "65M"
        assert f"bytes of memory, and --max-memory allows 67,108,864. Use --max-memory {least} or more." in err
        assert not (tmp_path / "new").exists()
        assert mxcli(*words, "--device", "cpu", "-q", "--max-memory", least).code == 0
        shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_dry_run_reports_device_and_limit(mxcli: Callable[..., Any]) -> None:
    words = ("quantize", SAMPLE, *FORMAT, "--dry-run", "--device", "cpu", "--max-memory", "1G")
    out = mxcli(*words).out
    assert "; peak memory about 68.3 MB of 1.07 GB allowed (--max-memory)\n" in out
    assert "\nwould compute on cpu\n" in out
    plan = strict_json(mxcli(*words, "--json").out)
    assert (plan["device"], plan["max_memory_bytes"]) == ("cpu", 1 << 30)
    assert plan["peak_memory_bytes"] < 1 << 30
    assert strict_json(mxcli(*words[:-2], "--json").out)["max_memory_bytes"] is None


class FailingBackend(Cpu):
    """The CPU until a tensor does not fit."""

    def quantize(self, x: Any, *_: Any, **__: Any) -> Any:
        if x.shape == (384, 128):
            raise EnvironmentFailure("cuda:0 is out of memory: use --max-memory.")
        return super().quantize(x, *_, **__)


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[[GpuState], None]:
    """Lets this machine have the GPUs of a state."""

    def these(state: GpuState) -> None:
        monkeypatch.setattr(gpus, "has_driver", lambda: True)
        monkeypatch.setattr(gpus, "examine", lambda: state)

    return these


GPU = Gpu(0, "NVIDIA H100", (9, 0), 80 << 30)


def test_a_requested_gpu_that_is_missing(
    mxcli: Callable[..., Any], have: Callable[[GpuState], None], tmp_path: Path
) -> None:
    mxcli("quantize", SAMPLE, *FORMAT, "-o", tmp_path / "q", "--device", "cpu")
    have(GpuState((12, 8), (GPU,), None, (12, 9), (NO_CUPY,)))
    for words in verbs(tmp_path):
        code, out, err = mxcli(*words, "-q", "--device", "cuda")
        assert (code, out, err) == (6, "", f"error: --device cuda: {NO_CUPY}. Or use --device cpu.\n")
        code, _, err = mxcli(*words, "-q", "--device", "cuda:7")
        assert code == 6
        assert "there is no such GPU; there is cuda:0 (NVIDIA H100)." in err
    assert not (tmp_path / "new").exists()


def test_a_gpu_left_alone_is_one_note(mxcli: Callable[..., Any], have: Callable[[GpuState], None]) -> None:
    have(GpuState((12, 8), (GPU,), None, (12, 9), (NO_CUPY,)))
    note = f"note: GPU present but not used: {NO_CUPY}; see mxcli doctor\n"
    for words in (["report", SAMPLE], ["quantize", SAMPLE, *FORMAT, "--dry-run"]):
        loud, quiet, plain = mxcli(*words), mxcli(*words, "-q"), mxcli(*words, "--device", "cpu")
        assert loud.code == quiet.code == 0
        assert loud.err.count(note) == 1
        assert quiet.err == ""
        assert note not in plain.err
        assert loud.out == quiet.out == plain.out


def test_a_device_that_fails_is_one_sentence(
    mxcli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("mxcli.cli.machine.choose_backend", lambda *_, **__: FailingBackend())
    arrays, folder = tmp_path / "blocks.safetensors", tmp_path / "out"
    error = "error: cuda:0 is out of memory: use --max-memory.\n"
    assert mxcli("report", "--per-block", arrays, SAMPLE, "-q") == (6, "", error)
    assert list(tmp_path.iterdir()) == []
    code, out, err = mxcli("quantize", *FORMAT, "-o", folder, SAMPLE, "-q")
    note = f"note: Finished work is kept in {folder}; the same command with --resume continues it.\n"
    assert (code, out, err) == (6, "", error + note)
    assert [path.suffix for path in folder.iterdir()] == [".partial", ".partial"]


@pytest.mark.slow
def test_a_whole_machine_with_a_driver(tmp_path: Path) -> None:
    """A driver library that the loader finds, and processes of our own that query it."""
    if sys.platform != "linux" or (compiler := shutil.which("c++")) is None:
        pytest.skip("needs Linux and a C++ compiler")
    source = REPOSITORY / "tests" / "backends" / "fake_driver.cpp"
    words: Sequence[str] = [compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(words, check=True)
    there = {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_DRIVER": "11080", "FAKE_GPUS": "8.0,7.5"}
    record = strict_json(command("doctor", "--json", env=there).stdout)["gpu"]
    assert record["driver"] == [11, 8]
    assert record["gpus"][1] == {"index": 1, "name": "Fake 1", "capability": [7, 5], "memory_bytes": (80 << 30) + 1}
    assert record["usable"] == []
    text = command("doctor", env=there).stdout
    assert "serves CUDA 11.8\n" in text
    assert "cuda:1" in text
    assert "Fake 1, compute capability 7.5, 85.9 GB" in text
    assert "GPU              none usable\n" in text
    assert "cuda:1 (Fake 1) has compute capability 7.5" in text
    refused = command("report", SAMPLE, "--device", "cuda", env=there)
    assert (refused.returncode, refused.stdout) == (6, "")
    assert refused.stderr.startswith("error: --device cuda: ")
    assert "Traceback" not in refused.stderr
    done = command("report", SAMPLE, env=there)
    assert done.returncode == 0
    assert done.stderr.count("note: GPU present but not used: ") == 1
    hidden = command("report", SAMPLE, "--device", "cuda", env=there | {"FAKE_GPUS": "", "CUDA_VISIBLE_DEVICES": ""})
    assert "no GPU is visible with CUDA_VISIBLE_DEVICES=''" in hidden.stderr


def test_auto_costs_nothing_without_a_driver() -> None:
    """Neither NVRTC nor the packages are looked for."""
    program = (
        "import sys; from mxcli.backends import find_device, gpus; gpus.has_driver = lambda: False; "
        "print(find_device('auto'), 'mxcli.backends.nvrtc' in sys.modules, 'importlib.metadata' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "cpu False False\n"
