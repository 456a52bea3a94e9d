"""The README: what it shows is what the commands print, and what it names exists.

A block between `<!-- mxcli ... -->` and `<!-- end -->` is the output of that command. `python tests/test_readme.py`
writes them anew.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mxcli import errors

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- (mxcli [^\n]+) -->\n(```\w*\n)?(.*?)(```\n)?<!-- end -->", re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.+)\n```$", TEXT, re.MULTILINE)
SNIPPETS = re.findall(r"^```python\n(.+?)```$", TEXT, re.MULTILINE | re.DOTALL)


def output(command: str) -> str:
    """What a shell prints for a command of mxcli, run at the root of the sources."""
    own = f"{shlex.quote(sys.executable)} -P -m mxcli "
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(
        command.replace("mxcli ", own, 1), shell=True, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.strip("\n").splitlines())


def refreshed(text: str) -> str:
    """The text with every block as its command prints it now."""

    def block(found: re.Match[str]) -> str:
        command, opening, _, closing = found.groups(default="")
        return f"<!-- {command} -->\n{opening}{output(command)}{closing}<!-- end -->"

    return BLOCK.sub(block, text)


@pytest.mark.parametrize("block", list(BLOCK.finditer(TEXT)), ids=lambda block: block[1])
def test_blocks_are_what_the_commands_print(block: re.Match[str]) -> None:
    assert block[3] == output(block[1]), "stale: run `python tests/test_readme.py`"


def test_every_marker_is_a_block() -> None:
    assert TEXT.count("<!-- end -->") == TEXT.count("<!-- mxcli ") == len(BLOCK.findall(TEXT))


def test_two_commands_install_and_do_something() -> None:
    main, tests = COMMANDS
    assert re.fullmatch(r"pip install -c constraints\.txt \. && mxcli report samples/tiny-llama .*", main)
    assert tests == "pip install -c constraints.txt -e '.[test]' && pytest -n auto --dist loadfile"
    assert main.split(" && ")[1] in [block[1] for block in BLOCK.finditer(TEXT)], "the README shows another run"


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_exit_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)}
    assert told == {kind.exit_code for kind in kinds} | {0, 130}


@pytest.mark.parametrize(("table", "path"), re.findall(r"`([A-Z_]+)`(?: or `[A-Z]+`)? in `([\w/]+\.py)`", TEXT))
def test_tables_are_where_the_readme_says(table: str, path: str) -> None:
    assert re.search(rf"^{table}\b", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"(?:`|\]\()([\w./-]+\.\w{1,4}|[\w./-]+/)(?:`|\))", TEXT))))
def test_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


if __name__ == "__main__":
    README.write_text(refreshed(TEXT), encoding="utf-8")
