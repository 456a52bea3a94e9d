"""Groups of options: a verb with groups has their fields as options, and gets the groups."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from mxcli.cli.groups import GroupedHelp, typed, vary, verb


@dataclass(frozen=True, slots=True)
class Size:
    """A group."""

    heading: ClassVar[str] = "Size"
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows.")] = 2
    columns: Annotated[int | None, typer.Option("--columns", help="Columns.")] = None
    names: Annotated[list[str] | None, typer.Option("--name", help="Names.")] = None

    def __post_init__(self) -> None:
        if self.rows == 13:
            raise ValueError("unlucky")


@dataclass(frozen=True, slots=True)
class Box(Size):
    """A group that extends another."""

    heading: ClassVar[str] = "Box"
    depth: Annotated[int, typer.Option("--depth", help="Depth.")] = 1
    far: Annotated[bool, typer.Option("--far", rich_help_panel="Place", help="Far.")] = False


@dataclass(frozen=True, slots=True)
class Weight:
    """A group with an option that is required."""

    heading: ClassVar[str] = "Weight"
    kilograms: Annotated[float, typer.Option("--weight", help="Weight.")]


class App:
    def __init__(self, function: object) -> None:
        self.app = typer.Typer(rich_markup_mode=None)
        self.app.command(cls=GroupedHelp)(verb(function))  # type: ignore[arg-type]

    def __call__(self, *words: str) -> tuple[int, str]:
        done = CliRunner().invoke(self.app, words)
        return done.exit_code, done.output


def test_fields_are_options_and_groups_are_built() -> None:
    got: list[object] = []

    def pack(source: Annotated[str, typer.Argument(help="A source.")], size: Size, weight: Weight) -> None:
        got.append((source, size, weight))

    app = App(pack)
    assert app("a", "--weight", "1.5", "--name", "x", "--name", "y")[0] == 0
    assert app("a", "--weight", "2", "--rows", "3", "--columns", "4")[0] == 0
    assert got == [("a", Size(2, None, ["x", "y"]), Weight(1.5)), ("a", Size(3, 4), Weight(2.0))]
    assert app("a")[0] == 2
    assert app("a", "--weight", "1", "--rows", "0")[0] == 2


def test_a_group_may_refuse_its_values() -> None:
    def pack(size: Size) -> None:
        raise AssertionError

    with pytest.raises(ValueError, match="unlucky"):
        CliRunner().invoke(App(pack).app, ["--rows", "13"], catch_exceptions=False)


def test_what_was_typed_is_known() -> None:
    got: list[frozenset[str]] = []

    def pack(context: typer.Context, size: Size) -> None:
        got.append(typed(context))

    app = App(pack)
    for words in ((), ("--rows", "2"), ("--columns", "1", "--name", "x")):
        assert app(*words)[0] == 0
    assert got == [frozenset(), {"rows"}, {"columns", "names"}]


def test_a_verb_varies_a_group() -> None:
    got: list[object] = []

    def pack(size: Annotated[Size, vary(without=("columns",), rows=7, help={"rows": "Rows of the box."})]) -> None:
        got.append(size)

    app = App(pack)
    assert app()[0] == 0
    assert got == [Size(7)]
    assert app("--columns", "1")[0] == 2
    page = app("--help")[1]
    assert "Rows of the box.  [default: 7" in page
    assert "--columns" not in page
    assert Size().rows == 2

    def one(size: Annotated[Size, vary(only=("names",))]) -> None:
        got.append(size)

    assert App(one)("--rows", "1")[0] == 2
    assert App(one)("--name", "x")[0] == 0
    assert got[-1] == Size(names=["x"])


def test_help_has_a_heading_for_each_group() -> None:
    def pack(
        box: Box,
        weight: Weight,
        source: Annotated[str, typer.Argument(help="A source.")] = "x",
        plain: Annotated[bool, typer.Option("--plain", help="Plain.")] = False,
        secret: Annotated[bool, typer.Option("--secret", hidden=True, help="Secret.")] = False,
    ) -> None:
        """Pack."""

    page = App(pack)("--help")[1]
    headings = [line for line in page.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments:", "Options:", "Size:", "Box:", "Place:", "Weight:"]
    assert page.index("--depth") < page.index("Place:") < page.index("--far") < page.index("--weight")
    assert page.splitlines()[-1].split()[0] == "--help"
    assert "--secret" not in page


@pytest.mark.parametrize(
    "variation", [vary(rowz=1), vary(without=("depth",)), vary(only=("rows",), columns=1), vary(help={"color": "?"})]
)
def test_a_variation_of_what_is_not_there_fails_at_once(variation: object) -> None:
    def pack(size: Annotated[Size, variation]) -> None: ...  # type: ignore[valid-type]

    pack.__annotations__["size"] = Annotated[Size, variation]
    with pytest.raises(AssertionError):
        verb(pack)


def test_names_are_not_taken_twice() -> None:
    def rows(rows: Size) -> None: ...

    def twice(a: Size, b: Box) -> None: ...

    with pytest.raises(AssertionError, match="groups and options"):
        verb(rows)
    with pytest.raises(ValueError, match="duplicate"):
        verb(twice)


def test_python_calls_a_verb_with_groups() -> None:
    got: list[object] = []

    @verb
    def pack(size: Size, weight: Weight) -> None:
        got.append((size, weight))

    pack(size=Size(5), weight=Weight(1.0))
    pack(rows=6, columns=None, names=None, kilograms=2.0)
    assert got == [(Size(5), Weight(1.0)), (Size(6), Weight(2.0))]
    assert list(inspect.signature(pack).parameters) == ["rows", "columns", "names", "kilograms"]
