"""Line numbers of a TOML file, next to the standard library's parser."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest

from mxcli.flows.plan.toml_lines import Path, line_of, toml_lines

TEXT = '''# a comment with [brackets] and = signs
format = "mxfp4"   # "quoted"
exclude = [
    "a[1]",  # first
    'b"]"', "c",

    """d
still d""",
]

nested = { x = 1, "odd key" = ["p", { q = 2 }] }
a.b = 1979-05-27 07:32:00
empty = []

[[override]]
select = "x"
keep = true

[[override]]
select = ["y",
  "z"]
[override.more]
n = 1
[table."dotted.name"]
v = -1e3
'''


def paths(value: object, path: Path = ()) -> Iterator[Path]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, part in value.items():
            yield from paths(part, (*path, key))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from paths(part, (*path, place))


def test_lines_are_where_things_begin() -> None:
    lines = toml_lines(TEXT)
    assert lines[("format",)] == 2
    assert [lines[("exclude", place)] for place in range(4)] == [4, 5, 5, 7]
    assert lines[("nested", "odd key", 1, "q")] == 11
    assert lines[("a", "b")] == 12
    assert lines[("override", 0)] == 15
    assert lines[("override", 1, "select", 1)] == 21
    assert lines[("override", 1, "more", "n")] == 23
    assert lines[("table", "dotted.name", "v")] == 25


def test_everything_the_parser_finds_has_a_line() -> None:
    lines = toml_lines(TEXT)
    for path in paths(tomllib.loads(TEXT)):
        assert path in lines or path in {("override",), ("a",), ("table",)}, path


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "a = 1", "a = [[1, 2], [3]]\r\nb = 2\r\n"])
def test_short_documents(text: str) -> None:
    lines = toml_lines(text)
    assert set(paths(tomllib.loads(text))) == set(lines)
    assert lines.get(("b",), 2) == 2


def test_the_nearest_line_stands_for_what_has_none() -> None:
    lines = toml_lines("a = 1\n\n[[b]]\nc = 2\n")
    assert line_of(("b", 0, "missing"), lines) == 3
    assert line_of((), lines) == line_of(("other",), lines) == 1


def test_lines_of_many_values_take_no_time() -> None:
    """As many as the layers of a large model; each once took the lines before it to be counted again."""
    text = (
        "exclude = [\n"
        + "".join(f'    "model.layers.{at}.mlp.experts.{at}.down_proj.weight",\n' for at in range(40_000))
        + "]\n"
    )
    lines = toml_lines(text)
    assert lines[("exclude", 0)] == 2
    assert lines[("exclude", 39_999)] == 40_001
