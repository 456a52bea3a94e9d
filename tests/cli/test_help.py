"""Every verb and option explains itself, and one option is spelled one way everywhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import REPOSITORY

from mxcli.cli.app import app


def commands() -> Iterator[tuple[str, Any]]:
    def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(f"{path} {name}", inner)

    yield from walk("mxcli", typer.main.get_command(app))


COMMANDS = dict(commands())
VERBS = [path for path, command in COMMANDS.items() if not getattr(command, "commands", None)]
SWEPT = {"--format", "--threads", "--tokens"}
"""Options of which a benchmark takes several values."""


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_parameter_has_help(path: str) -> None:
    command = COMMANDS[path]
    assert command.help.strip()
    for parameter in command.params:
        assert parameter.help, f"{path}: {parameter.name}"
        assert parameter.help[0].isupper(), f"{path}: {parameter.name}"


def test_an_option_is_the_same_in_every_verb() -> None:
    seen: dict[str, tuple[str, str | None]] = {}
    for path in VERBS:
        swept = SWEPT if path.startswith("mxcli bench") else set[str]()
        for parameter in COMMANDS[path].params:
            for spelling in (word for word in parameter.opts if word.startswith("-") and word not in swept):
                meaning = (parameter.help, parameter.metavar)
                assert seen.setdefault(spelling, meaning) == meaning, f"{path}: {spelling}"


def examples() -> Iterator[list[str]]:
    for command in COMMANDS.values():
        for line in re.findall(r"^ *(mxcli .*)$", command.help or "", re.MULTILINE):
            yield shlex.split(line.partition(" | ")[0])[1:]


@pytest.mark.parametrize("path", VERBS)
def test_every_verb_has_examples(path: str) -> None:
    verb = path.removeprefix("mxcli ")
    assert f"  mxcli {verb}" in COMMANDS[path].help


def test_every_example_works(mxcli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples").symlink_to(REPOSITORY / "samples")
    done = set[str]()
    for words in examples():
        if shlex.join(words) not in done and words[0] != "bench":
            outcome = mxcli(*words)
            assert outcome.code == 0, f"{words}: {outcome.err}"
            done.add(shlex.join(words))
    assert len(done) > 20


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_printed(mxcli: Callable[..., Any], path: str) -> None:
    code, out, err = mxcli(*path.split()[1:], "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: mxcli")
