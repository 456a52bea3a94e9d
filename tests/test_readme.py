"""README.md and docs/*.md: their blocks show what the commands print, and everything they name exists.

A block between `<!-- mxcli ... -->` and `<!-- end -->` is the output of that command. `python tests/test_readme.py`
refreshes the blocks.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mxcli import errors
from mxcli.cli.app import app, run
from mxcli.cli.arguments import normalized

ROOT = Path(__file__).parents[1]
README = "README.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))
}
BLOCK = re.compile(r"<!-- (mxcli [^\n]+) -->\n(```\w*\n)?(.*?)(```\n)?<!-- end -->", re.DOTALL)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INSTALLS = "pip install -c constraints.txt "
LINES = 200
PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*(/[A-Z]+)?|.*…")


def each(find: Callable[[str], Iterable[Any]]) -> list[Any]:
    """Return the parameters (page, found) for everything that `find` finds in a page, by the first line of its text."""
    return [
        pytest.param(page, found, id=f"{page}: {(found if isinstance(found, str) else found[0]).splitlines()[0]}")
        for page, text in PAGES.items()
        for found in dict.fromkeys(find(text))
    ]


def output(command: str) -> str:
    """Return what a shell prints for a command of mxcli, run at the root of the sources."""
    own = f"{shlex.quote(sys.executable)} -P -m mxcli "
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        command.replace("mxcli ", own, 1), shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())


def refreshed(text: str) -> str:
    """Return the text with every block as its command prints it now."""

    def block(found: re.Match[str]) -> str:
        command, opening, _, closing = found.groups(default="")
        return f"<!-- {command} -->\n{opening}{output(command)}{closing}<!-- end -->"

    return BLOCK.sub(block, text)


def fenced(text: str, language: str) -> list[str]:
    """Return the contents of the fenced blocks in a language, without their indentation."""
    return [
        re.sub(f"^{found[1]}", "", found[3], flags=re.MULTILINE)
        for found in FENCE.finditer(text)
        if found[2] == language
    ]


def prose(text: str) -> str:
    """Return the text without fenced blocks."""
    return FENCE.sub("", text)


def shell_lines(text: str) -> list[str]:
    """Return the commands of the sh blocks."""
    return [line for block in fenced(text, "sh") for line in block.splitlines()]


def inline(text: str) -> list[str]:
    """Return the inline code, each on one line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(text))]


def mxcli_commands(text: str) -> list[str]:
    """Return every command of mxcli: inline, in sh blocks (after && too), and of generated blocks."""
    lines = [part for line in shell_lines(text) for part in line.split(" && ")]
    blocks = [found[1] for found in BLOCK.finditer(text)]
    return [line for line in (*inline(text), *lines, *blocks) if line.startswith("mxcli ")]


def words_of(command: str) -> list[str]:
    """Return the arguments of a command of mxcli, up to a pipe or a comment."""
    words = shlex.split(command, comments=True)[1:]
    return words[: words.index("|")] if "|" in words else words


def is_complete(words: list[str]) -> bool:
    """Return whether no word stands for the reader's own."""
    return not any(PLACEHOLDER.fullmatch(word) for word in words)


def verb_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words name, and the words after it."""
    command, rest = typer.main.get_command(app), list(words)
    while rest and not rest[0].startswith("-") and getattr(command, "commands", None):
        assert rest[0] in command.commands, f"there is no verb {rest[0]}"
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: Any) -> set[str]:
    """Return the spellings of a command's options."""
    own = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
    return own | {"--help", "-h"}


def every_option(command: Any) -> set[str]:
    """Return the spellings of the options of a command and of its verbs."""
    return options_of(command).union(*map(every_option, getattr(command, "commands", {}).values()))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Return the targets of the links that stay within the repository."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)) if not target.startswith("http")]


def test_readme_is_short() -> None:
    assert len(PAGES[README].splitlines()) <= LINES


def test_readme_links_every_page() -> None:
    linked = {target.partition("#")[0] for target in links(PAGES[README])}
    assert {page for page in PAGES if page != README} <= linked


@pytest.mark.parametrize("page", [page for page in PAGES if page != README])
def test_a_page_begins_with_its_title_and_purpose(page: str) -> None:
    assert re.match(r"# [^\n]+\n\n[A-Z][^\n]*", PAGES[page])


@pytest.mark.parametrize(("page", "block"), each(lambda text: [found.group(1, 3) for found in BLOCK.finditer(text)]))
def test_blocks_are_what_the_commands_print(page: str, block: tuple[str, str]) -> None:
    command, shown = block
    assert shown == output(command), f"{page} is stale: run `python tests/test_readme.py`"


@pytest.mark.parametrize("page", PAGES)
def test_every_marker_is_a_block(page: str) -> None:
    text = PAGES[page]
    assert text.count("<!-- end -->") == text.count("<!-- mxcli ") == len(BLOCK.findall(text))


def test_two_commands_install_and_do_something() -> None:
    main, tests = (line for line in PAGES[README].splitlines() if line.startswith(INSTALLS))
    assert {main, tests} <= set(shell_lines(PAGES[README]))
    assert re.fullmatch(r"pip install -c constraints\.txt \. && mxcli report samples/tiny-llama .*", main)
    assert tests == "pip install -c constraints.txt -e '.[test]' && pytest -n auto --dist loadfile"
    blocks = [block[1] for block in BLOCK.finditer(PAGES[README])]
    assert main.split(" && ")[1] in blocks, "the README shows another run"


@pytest.mark.parametrize(("page", "snippet"), each(lambda text: fenced(text, "python")))
def test_snippets_run(page: str, snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements run; an expression with a comment has the value that the comment says."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    lines = snippet.splitlines()
    for statement in ast.parse(snippet).body:
        text = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
        expression, _, shown = text.partition("  # ")
        if isinstance(statement, ast.Expr) and shown:
            assert repr(eval(expression, names)) == shown
        else:
            exec(text, names)


@pytest.mark.parametrize(("page", "command"), each(mxcli_commands))
def test_commands_name_verbs_and_options(page: str, command: str) -> None:
    """Words in capitals stand for the reader's own: a command without them is parsed in full, if it has arguments."""
    verb, rest = verb_of(words_of(command))
    unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - options_of(verb)
    assert not unknown, f"{page}: `{command}`"
    if is_complete(rest) and rest and not rest[0].startswith("-"):
        verb.make_context(verb.name, normalized(rest))


@pytest.mark.parametrize(("page", "option"), each(lambda text: re.findall(r"`(--[a-z][a-z-]*)", prose(text))))
def test_options_in_prose_exist(page: str, option: str) -> None:
    assert option in every_option(typer.main.get_command(app))


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if shell_lines(text)])
def test_shell_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a page's commands in order, but for installations, benchmarks and commands with placeholders.

    A comment `# exit code N` announces a command that does not end with 0.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    for command in shell_lines(PAGES[page]):
        words = words_of(command)
        if not command.startswith("mxcli ") or not is_complete(words) or words[0] in ("bench", "doctor"):
            continue
        announced = re.search(r"# exit code (\d+)", command)
        assert run(words) == (int(announced[1]) if announced else 0), command


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGES[README], re.MULTILINE)}
    assert listed == {kind.exit_code for kind in kinds} | {0, 130}


def named_tables(text: str) -> Iterator[tuple[str, str]]:
    """Yield the tables that a page names and their module, from `TABLE in path` and `TABLE or TABLE in path`."""
    for first, second, path in re.findall(r"`([A-Z_]+)`(?: or `([A-Z_]+)`)? in `([\w/]+\.py)`", text):
        yield from ((table, path) for table in (first, second) if table)


@pytest.mark.parametrize(("page", "claim"), each(named_tables))
def test_tables_are_where_the_pages_say(page: str, claim: tuple[str, str]) -> None:
    table, path = claim
    assert re.search(rf"^{table}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "path"), each(lambda text: re.findall(r"`([\w./-]+/[\w.-]+\.\w{1,4}|[\w./-]+/)`", prose(text)))
)
def test_files_exist(page: str, path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "target"), each(links))
def test_links_resolve(page: str, target: str) -> None:
    path, _, anchor = target.partition("#")
    found = (ROOT / page).parent / path if path else ROOT / page
    assert found.exists()
    if anchor:
        assert anchor in anchors(found.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for name, content in PAGES.items():
        (ROOT / name).write_text(refreshed(content), encoding="utf-8")
