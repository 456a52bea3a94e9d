"""Former spellings of `mxcli report`: the same stdout and exit codes as the verbs that replaced them, and a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mxcli.numerics.scheme import RuleOptions

SAMPLE, CAPTURES = "samples/tiny-llama", "samples/tiny-llama-captures.safetensors"
FEW = ("--include", "*layers.1.*.down_proj")
NOTE = "note: report --{0} is now `mxcli {0}`; the old spelling goes away in the next release.\n"


@pytest.mark.parametrize(
    ("verb", "former", "now"),
    [
        ("products", ("--products", CAPTURES, "--format", "nvfp4"), (CAPTURES, "--format", "nvfp4")),
        ("products", ("--products", CAPTURES, "--gradient-format", "mxfp8_e5m2", "--json"),
         (CAPTURES, "--gradient-format", "mxfp8_e5m2", "--json")),
        ("products", ("--products", CAPTURES, "--rounding", "stochastic", "--seed", "2", "--csv", "-", "--top", "2"),
         (CAPTURES, "--rounding", "stochastic", "--seed", "2", "--csv", "-")),
        ("training", ("--training", "nvfp4", "--products", CAPTURES, "--seed", "5", "--draws", "2", "--json"),
         ("--recipes", "nvfp4", "--captures", CAPTURES, "--seed", "5", "--draws", "2", "--json")),
        ("training", ("--training", "mxfp8", "--products", CAPTURES, "--top", "2", "--sort", "bias"),
         ("--recipes", "mxfp8", "--captures", CAPTURES, "--top", "2", "--sort", "bias")),
        ("training", ("--training", "mxfp9", "--products", CAPTURES), ("--recipes", "mxfp9", "--captures", CAPTURES)),
    ],
)  # fmt: skip
def test_the_former_spelling_runs_the_verb(
    mxcli: Callable[..., Any], verb: str, former: tuple[str, ...], now: tuple[str, ...]
) -> None:
    old, new = mxcli("report", SAMPLE, *former, *FEW), mxcli(verb, SAMPLE, *now, *FEW)
    assert (old.code, old.out) == (new.code, new.out)
    assert old.err == NOTE.format(verb) + new.err
    assert NOTE.format(verb) not in mxcli("report", SAMPLE, *former, *FEW, "-q").err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--draws", "4"), "--draws needs --training: it repeats stochastic rounding."),
        (("--gradient-format", "mxfp8"), "--activation-format and --gradient-format need --products CAPTURES."),
        (
            ("--training", "mxfp8", "--format", "mxfp4", "--html", "x.html"),
            "--format, --html cannot be combined with --training: training recipes set all formats and rules.",
        ),
        (("--training", "mxfp8", "--jsonl", "--dry-run"), "--dry-run, --jsonl cannot be combined with --training"),
        (
            ("--products", CAPTURES, "--html", "x.html", "--fail-on", "sqnr_db<1"),
            "--fail-on, --html cannot be combined with --products",
        ),
        (("--products", CAPTURES, "--axis", "row"), "--axis cannot be combined with --products"),
    ],
)
def test_what_the_former_spelling_refused_stays_refused(
    mxcli: Callable[..., Any], words: tuple[str, ...], message: str
) -> None:
    code, out, err = mxcli("report", SAMPLE, *words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("name", [name for name in RuleOptions.__annotations__ if name != "seed"])
def test_training_refuses_every_rule_option(mxcli: Callable[..., Any], name: str) -> None:
    option = {"dialect": "--as"}.get(name, f"--{name.replace('_', '-')}")
    code, _, err = mxcli("report", SAMPLE, "--training", "mxfp8", option, "16")
    assert code == 2
    assert f"{option} cannot be combined with --training" in err


def test_former_options_are_hidden(mxcli: Callable[..., Any]) -> None:
    page = mxcli("report", "--help").out
    assert not [word for word in ("--training", "--products", "--draws", "--gradient-format") if word in page]
