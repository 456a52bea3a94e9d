"""Every verb and option explains itself, and one option is spelled one way everywhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import REPOSITORY
from raw_checkpoint import safetensors_bytes

import mxcli
from mxcli.cli.app import app
from mxcli.cli.arguments import normalized
from mxcli.cli.options import completes
from mxcli.cli.verbs import VERBS as SUMMARIES


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
VARIED = {
    "--sort",
    "--hadamard-seed",
    "--seed",
    "--captures",
    "--csv",
    "--top",
    "--wide",
    "--markdown",
    "--device",
    "--resume",
    "--layout",
    "--recipe",
    "--fail-on",
    "--text",
    "--tokens",
}
"""Options whose help is about the verb."""
MOST_PARAMETERS, MOST_LINES = 8, 40
MODULES = sorted((Path(mxcli.__file__).parent / "cli").glob("*.py"))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_parameter_has_help(path: str) -> None:
    command = COMMANDS[path]
    assert command.help.strip()
    for parameter in command.params:
        assert parameter.help, f"{path}: {parameter.name}"
        assert parameter.help[0].isupper(), f"{path}: {parameter.name}"


def test_an_option_is_the_same_in_every_verb() -> None:
    """Spelling, metavar and help; but of some options the help is about the verb."""
    seen: dict[str, tuple[str, str | None]] = {}
    for path in VERBS:
        swept = SWEPT if path.startswith("mxcli bench") else set[str]()
        for parameter in (each for each in COMMANDS[path].params if not each.hidden):
            for spelling in (word for word in parameter.opts if word.startswith("-") and word not in swept):
                meaning = ("" if spelling in VARIED else parameter.help, parameter.metavar)
                assert seen.setdefault(spelling, meaning) == meaning, f"{path}: {spelling}"


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """mxcli in this process; here `mxcli` is the package."""
    found: Callable[..., Any] = request.getfixturevalue("mxcli")
    return found


def examples() -> Iterator[list[str]]:
    for command in COMMANDS.values():
        for line in re.findall(r"^ *(mxcli .*)$", command.help or "", re.MULTILINE):
            yield shlex.split(line.partition(" | ")[0])[1:]


@pytest.mark.parametrize("path", VERBS)
def test_every_verb_has_examples(path: str) -> None:
    verb = path.removeprefix("mxcli ")
    assert f"  mxcli {verb}" in COMMANDS[path].help


def test_every_example_is_accepted() -> None:
    """Its words are options of the verb, with values that it takes; nothing runs."""
    parsed = 0
    for words in examples():
        verb = 2 if words[0] == "bench" else 1
        command = COMMANDS[" ".join(["mxcli", *words[:verb]])]
        command.make_context(words[verb - 1], normalized(words[verb:]), obj=tuple(words))
        parsed += 1
    assert parsed > 60


@pytest.mark.slow
def test_every_example_works(run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples").symlink_to(REPOSITORY / "samples")
    cast = {"w": ("F8_E4M3", [4, 32], bytes(128))}
    (tmp_path / "flux1-dev-fp8.safetensors").write_bytes(safetensors_bytes(cast, {"format": "pt"}))
    done = set[str]()
    for words in examples():
        if shlex.join(words) not in done and words[0] != "bench":
            outcome = run(*words)
            assert outcome.code == 0, f"{words}: {outcome.err}"
            done.add(shlex.join(words))
    assert len(done) > 20


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_printed(run: Callable[..., Any], path: str) -> None:
    code, out, err = run(*path.split()[1:], "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: mxcli")


def functions() -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Every function of the command line, and whether it is a verb."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                decorators = [ast.unparse(each) for each in node.decorator_list]
                yield f"{path.name}: {node.name}", node, "verb" in decorators


def body_lines(node: ast.FunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return node.end_lineno - body[0].lineno + 1 if body and node.end_lineno else 0


def test_verbs_are_narrow() -> None:
    """At most 8 parameters, and 40 lines that parse, call one flow and render."""
    verbs = {
        name: (len(node.args.args) + len(node.args.kwonlyargs), body_lines(node))
        for name, node, is_verb in functions()
        if is_verb
    }
    assert len(verbs) == len(VERBS)
    assert not {name: found for name, found in verbs.items() if found[0] > MOST_PARAMETERS or found[1] > MOST_LINES}


def test_functions_are_short() -> None:
    lengths = {name: body_lines(node) for name, node, _ in functions()}
    assert not {name: lines for name, lines in lengths.items() if lines > 60}


@pytest.mark.parametrize(
    ("verb", "headings"),
    [
        ("report", "Arguments Format Rules Selection Measurement Table Output Machine Messages"),
        ("compare", "Arguments Combinations Measurement Format Rules Selection Table Output Machine Messages"),
        ("quantize", "Arguments Format Rules Selection Writing Table Output Machine Messages"),
        ("recommend", "Arguments Target Format Rules Selection Table Output Machine Messages"),
        ("training", "Arguments Training Selection Table Output Machine Messages"),
        ("products", "Arguments Format Rules Selection Table Output Machine Messages"),
        ("capture", "Arguments Recording Steps Writing Table Output Machine Messages"),
        ("verify", "Arguments Options Table Output Machine Messages"),
        ("inspect", "Arguments Table Output Messages"),
        ("doctor", "Output Messages"),
    ],
)
def test_help_lists_options_by_group(run: Callable[..., Any], verb: str, headings: str) -> None:
    lines = run(verb, "--help").out.splitlines()
    assert [line[:-1] for line in lines if re.fullmatch(r"[A-Z][a-z ]+:", line)] == headings.split()


def test_help_is_about_the_verb(run: Callable[..., Any]) -> None:
    texts = {verb: " ".join(run(*verb.split(), "--help").out.split()) for verb in ("report", "recommend", "bench gemm")}
    assert "bench" not in texts["report"]
    assert "--sort METRIC Order of the table, worst first: harm, sqnr_db," in texts["recommend"]
    assert "harm" not in texts["report"]
    assert "--seed N Seed of the random values." in texts["bench gemm"]
    assert "--seed N Seed of stochastic rounding and of --sample." in texts["report"]


def test_new_verbs_follow_recommend(run: Callable[..., Any]) -> None:
    lines = run("--help").out.splitlines()
    names = [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]]
    assert names[3:8] == ["report", "compare", "recommend", "training", "products"]
    assert not [line for line in lines if line.startswith("  ") and line.endswith("...")]


def test_the_first_sentence_of_a_verb_stands_in_the_table() -> None:
    """The help of the program is written from the table, without the verbs."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name: command.help.partition("\n\n")[0] for name, command in verbs.items()} == dict(SUMMARIES)


def test_only_the_verb_that_runs_is_imported() -> None:
    code = "import sys; from mxcli.cli.app import run; run({}); sys.stderr.write(' '.join(sys.modules))"
    for words, loaded in ((["--help"], set[str]()), (["reprot"], set()), (["merge", "--help"], {"mxcli.cli.merge"})):
        done = subprocess.run([sys.executable, "-c", code.format(words)], capture_output=True, text=True, check=True)
        assert {f"mxcli.cli.{verb}" for verb in SUMMARIES} & set(done.stderr.split()) == loaded


def test_names_complete_alone_and_in_lists() -> None:
    rows = "mxcli.numerics.scale_rules:ELEMENT_ROUNDINGS"
    assert completes(rows)("half") == ["half-away", "half-toward-zero"]
    assert completes(rows, listed=True)("stochastic,half-a") == ["stochastic,half-away"]
    assert completes(rows, more=("all",))("a") == ["all"]
    assert completes("mxcli.output.explanation:TOPICS")("training:fp8_d") == ["training:fp8_delayed"]
