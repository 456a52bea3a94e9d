"""The start of a command where memory is short, and where it is interrupted before it has begun."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import SAMPLE, environment


def _run(*words: str, most_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    return subprocess.run(
        [sys.executable, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit that the system keeps")
@pytest.mark.parametrize("megabytes", [60, 90, 120, 150])
def test_too_little_memory_to_start_is_the_environment(megabytes: int) -> None:
    done = _run("-m", "mxcli", "report", str(SAMPLE), "--format", "mxfp8", most_bytes=megabytes << 20)
    assert done.returncode == 6
    assert done.stderr == (
        "error: out of memory: this process may not use enough to load its libraries; raise its limit "
        "(ulimit -v, -d).\n"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit that the system keeps")
@pytest.mark.parametrize("megabytes", [175, 185, 195, 205])
def test_too_little_memory_for_threads_is_the_environment(megabytes: int, tmp_path: Path) -> None:
    """How much is too little depends on the machine."""
    words = ("quantize", str(SAMPLE), "--format", "mxfp8", "-o", str(tmp_path / "out"), "--threads", "8")
    done = _run("-m", "mxcli", *words, most_bytes=megabytes << 20)
    assert done.returncode in (0, 6)
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr
    assert done.returncode == 0 or not (tmp_path / "out/mxcli.json").exists()


def test_no_thread_is_the_environment(tmp_path: Path) -> None:
    """As where `ulimit -u` allows no more, which root is free of."""
    code = f"""
import threading
from mxcli.cli.app import main
def refused(*_, **__):
    raise RuntimeError("can't start new thread")
threading._start_new_thread = threading._start_joinable_thread = refused
main(["quantize", {str(SAMPLE)!r}, "--format", "mxfp8", "-q", "-o", {str(tmp_path / "out")!r}])
"""
    done = _run("-c", code)
    assert (done.returncode, done.stderr) == (
        6,
        "error: this process may start no more threads: raise its limits (ulimit -u, -v), or end other programs.\n",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["typer", "mxcli.cli.app", "mxcli.errors"])
def test_an_interruption_while_modules_are_imported_is_quiet(module: str) -> None:
    code = f"""
import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from mxcli.__main__ import main
sys.argv = ["mxcli", "formats"]
main()
"""
    done = _run("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interruption_while_numpy_is_imported_is_one(tmp_path: Path) -> None:
    """Without a limit of memory it is the user's."""
    code = f"""
import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from mxcli.cli.app import main
main(["report", {str(SAMPLE)!r}, "--format", "mxfp8"])
"""
    done = _run("-c", code)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
