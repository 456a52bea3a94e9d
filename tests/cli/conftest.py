from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from command_line import environment

from mxcli.cli.app import run


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def mxcli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """mxcli in this process: words to exit code, stdout and stderr."""
    for key in ("COLUMNS", "NO_COLOR", "TERM", "LANG", "LC_CTYPE", "MXCLI_DEBUG"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("LC_ALL", environment()["LC_ALL"])

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call
