"""What a user sees of an error."""

from __future__ import annotations

import pickle

import pytest

from mxcli.errors import (
    EnvironmentFailure,
    InputError,
    LimitError,
    MxcliError,
    RefusedError,
    UsageError,
    closest,
    did_you_mean,
    printable,
    together,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (MxcliError, 1),
        (UsageError, 2),
        (InputError, 3),
        (RefusedError, 4),
        (LimitError, 5),
        (EnvironmentFailure, 6),
    ],
)
def test_exit_codes(kind: type[MxcliError], code: int) -> None:
    assert kind.exit_code == code
    assert str(kind("a sentence.")) == "a sentence."


def test_a_sentence_that_quotes_a_whole_file_is_shortened() -> None:
    error = InputError("begin " + "x" * 15_000_000 + " end.")
    assert len(str(error)) == 2001
    assert str(error).startswith("begin xxx")
    assert str(error).endswith("xxx end.")
    error = InputError("Headline.", ["y" * 10_000_000] * 12)
    assert len(str(error)) < 21_000
    assert {len(reason) for reason in error.reasons} == {2001}
    assert str(InputError("z" * 2000)) == "z" * 2000


def test_details_are_shown_up_to_ten() -> None:
    ten = InputError("Headline.", [f"problem {n}" for n in range(10)])
    assert str(ten).splitlines()[-1] == "  problem 9"
    many = InputError("Headline.", [f"problem {n}" for n in range(1234)])
    assert str(many).splitlines()[-2:] == ["  problem 9", "  and 1,224 more"]


def test_one_problem_speaks_for_itself() -> None:
    one = together(UsageError, "headline", ["only one."])
    assert (str(one), one.details, one.reasons) == ("only one.", (), ("only one.",))
    two = together(UsageError, "headline", ["one.", "two."])
    assert (str(two), two.reasons) == ("headline: 2 problems.\n  one.\n  two.", ("one.", "two."))


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(RefusedError("Headline.", ["a", "b"])))
    assert (type(error), error.message, error.details) == (RefusedError, "Headline.", ("a", "b"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain name.weight", "plain name.weight"),
        ("é中", "é中"),
        ("\x1b[31m\n\t", "\\x1b[31m\\n\\t"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        ("\udcff.bin", "\\udcff.bin"),
        ("x" * 1000, "x" * 100 + "…" + "x" * 100),
    ],
)
def test_odd_text_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_suggestions() -> None:
    known = ["router", "other", "norm", "lm_head"]
    assert closest("ROUTR", known) == ["router"]
    assert did_you_mean("lmhead", known) == " Did you mean lm_head?"
    assert did_you_mean("zzz", known) == ""
    assert did_you_mean("x", []) == ""
