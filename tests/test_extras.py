"""Without the packages of the extras the main verbs run, and what needs an extra names the command for it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from raw_gguf import Q4_0, gguf_bytes

from mxcli.errors import EXTRAS, EnvironmentFailure, import_extra
from mxcli.flows import doctor

ROOT = Path(__file__).parents[1]
MODEL, CAPTURES = ROOT / "samples" / "tiny-llama", ROOT / "samples" / "tiny-llama-captures.safetensors"
BLOCKED = ("torch", "matplotlib", "transformers", "gguf", "cupy", "torchao", "ml_dtypes")
BLOCK = f"""
import sys

class Blocked:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked)
"""
RUNNER = f"""{BLOCK}
from mxcli.cli.app import run
for line in sys.stdin:
    code = run(line.split())
    sys.stderr.write(f"exit code {{code}}\\n")
    sys.stderr.flush()
"""


def run_without_extras(folder: Path, *commands: str) -> list[str]:
    """Return the last line on stderr and the exit code of each command, run in one process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUNNER], input="\n".join(commands), cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return [
        line if line == "exit code 0" else f"{lines[at - 1]} {line}"
        for at, line in enumerate(lines)
        if line.startswith("exit code ")
    ]


def test_the_base_is_light_and_the_tests_have_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert [name.partition(">=")[0] for name in project["dependencies"]] == [
        "numpy",
        "rich",
        "safetensors",
        "typer",
        "xxhash",
    ]
    assert extras["all"] == ["mxcli[torch,plots,capture,gguf]"]
    assert "mxcli[all]" in extras["test"]
    names = {name: {each.partition(">=")[0] for each in packages} for name, packages in extras.items()}
    assert all(package in names[extra] for package, extra in EXTRAS.items())
    assert {name: set(packages) for name, packages in doctor.EXTRAS.items()} == {
        name: names[name] for name in doctor.EXTRAS
    }


def test_a_package_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EnvironmentFailure) as raised:
        import_extra("gguf", "reading GGUF files")
    assert str(raised.value) == "reading GGUF files needs gguf, which is not installed: pip install 'mxcli[gguf]'."
    monkeypatch.delitem(sys.modules, "gguf")
    (tmp_path / "gguf.py").write_text("raise ImportError('libgguf.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentFailure, match=r"gguf, which cannot be imported \(libgguf\.so: no such file\): pip"):
        import_extra("gguf", "reading GGUF files")


def test_what_needs_an_extra_says_so(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\2}q\0.")
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "a.gguf").write_bytes(gguf_bytes([("a", (32,), Q4_0, bytes(18))]))
    torch, plots = "which is not installed: pip install 'mxcli[torch]'.", "pip install 'mxcli[plots]'."
    found = run_without_extras(
        tmp_path,
        "inspect a.pt",
        f"report {MODEL} --format mxfp8 --plots plots",
        f"recommend {MODEL} --formats nvfp4 --bits 6 --captures {CAPTURES}",
        f"training {MODEL} --captures {CAPTURES}",
        f"products {MODEL} {CAPTURES} --format mxfp8",
        "bench gemm --shape 32x64x64 --rounds 1",
        f"capture {MODEL} -o captured --text a.txt",
        "inspect a.gguf",
    )
    assert found == [
        f"error: a.pt: reading PyTorch files needs torch, {torch} exit code 6",
        f"error: --plots needs matplotlib, which is not installed: {plots} exit code 6",
        f"error: weighing errors with captured inputs needs torch, {torch} exit code 6",
        f"error: computing products needs torch, {torch} exit code 6",
        f"error: computing products needs torch, {torch} exit code 6",
        f"error: bench gemm needs torch, {torch} exit code 6",
        "error: capturing a model needs torch, which is not installed: pip install 'mxcli[capture]'. exit code 6",
        "error: reading and writing GGUF files needs gguf, which is not installed: pip install 'mxcli[gguf]'. "
        "exit code 6",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "a.pt", "a.txt"]


@pytest.mark.slow
def test_the_main_verbs_need_no_extra(tmp_path: Path) -> None:
    found = run_without_extras(
        tmp_path,
        f"report {MODEL} --format mxfp8 --html report.html",
        f"quantize {MODEL} --format nvfp4 -o a",
        f"quantize {MODEL} --format mxfp8 -o b",
        f"compare {MODEL} --formats mxfp4,nvfp4",
        f"verify a --against {MODEL}",
        "diff a a",
        "inspect a",
        "dequantize b -o c",
        f"recommend {MODEL} --formats mxfp4,mxfp8 --bits 6",
        "explain nvfp4",
        "formats",
        "doctor",
    )
    assert found == ["exit code 0"] * 12


def test_numpy_arrays_need_no_torch() -> None:
    code = f"""{BLOCK}
import numpy as np, mxcli
x = np.linspace(-3, 3, 64 * 64, dtype=np.float32).reshape(64, 64)
q = mxcli.quantize(x, "mxfp8_e4m3")
row, column = mxcli.quantize_both(x, "nvfp4")
assert column.dequantize().shape == x.shape and mxcli.measure(x, "nvfp4")["sqnr_db"] > 15
print(type(q.codes).__name__, q.scales.shape, mxcli.swizzle(q.scales).shape)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "ndarray (64, 2) (512,)\n", done.stderr
