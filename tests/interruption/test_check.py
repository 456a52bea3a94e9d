"""check.py itself, with few kills of a small model; every command is a separate process, as for users."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("interruption_check", Path(__file__).with_name("check.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_command_killed_twice_is_resumed(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--size", "8M", "--tensor-size", "256K", "--kills", "2", "--short", "--folder", str(tmp_path)]
    assert check.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines] == ["ok   "] * len(lines)
    assert lines[-1].endswith("every byte the same")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_storm_of_signals_ends_with_the_same_bytes_or_a_refusal(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--size", "8M", "--tensor-size", "256K", "--storm", "9", "--folder", str(tmp_path)]
    arguments += ["--verbs", "quantize,dequantize,merge"]
    assert check.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines] == ["ok   "] * len(lines)
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_differ_are_seen(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "signalled", lambda *words, **more: check.Ended(0, 1.0, 0))
    (tmp_path / "mxcli.json").write_text('{"command": ["a"], "version": "1"}')
    expected = check.digests(tmp_path)
    (tmp_path / "mxcli.json").write_text('{"command": ["b"], "version": "1"}')
    assert [line.right for line in check.killed_run([], tmp_path, [1], expected)] == [True, True]
    (tmp_path / "mxcli.json").write_text('{"command": ["b"], "version": "2"}')
    assert [line.right for line in check.killed_run([], tmp_path, [1], expected)] == [True, False]
