"""Limits on metrics: what they mean, what cannot be read, and the message on those that fail."""

from __future__ import annotations

import pytest

from mxcli.errors import UsageError
from mxcli.flows.measure.limits import Limits, check_limits, fails, limit_error, parse_condition
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import NUMBERS, measured
from mxcli.numerics.stats import Stats

METRICS_OF_ONE: dict[str, Value] = {
    "sqnr_db": 18.5,
    "saturated_percent": 3.125,
    "elements": 32,
    "bias": -0.5,
    "mse": None,
}


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("sqnr_db<20", True),
        ("sqnr_db < 18.5", False),
        ("sqnr_db <= 18.5", True),
        ("sqnr_db >= 18.5", True),
        ("sqnr_db > 18.5", False),
        ("elements == 32", True),
        ("elements != 32", False),
        ("20 > sqnr_db", True),
        ("bias < -0.4", True),
        ("bias > +1e-3", False),
        ("10 < sqnr_db < 20", True),
        ("10 < sqnr_db < 15", False),
        ("elements > sqnr_db", True),
        ("sqnr_db<20 and saturated_percent>4", False),
        ("sqnr_db<20 or saturated_percent>4", True),
        ("sqnr_db>20 and elements>1 or saturated_percent>3", True),
        ("sqnr_db>20 and (elements>1 or saturated_percent>3)", False),
        ("((sqnr_db)) < (20)", True),
        (" sqnr_db<20 ", True),
        ("mse<1", None),
        ("mse>=0", None),
        ("mse!=0", None),
        ("0 < mse < 1", None),
        ("mse<1 or sqnr_db<20", True),
        ("mse<1 or sqnr_db<10", None),
        ("mse<1 and sqnr_db<20", None),
        ("mse<1 and sqnr_db<10", False),
        ("mse<1 and sqnr_db<10 or elements==32", True),
        ("sqnr_db<mse<1", None),
        ("sqnr_db<10<mse", False),
    ],
)
def test_what_conditions_mean(text: str, outcome: bool | None) -> None:
    """None: that hangs on the mean squared error, which is absent."""
    assert fails(parse_condition(text), METRICS_OF_ONE) is outcome


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("sqnr_db<1e9", False),
        ("sqnr_db>1e9", True),
        ("relative_error>0", False),
        ("cosine<1", False),
        ("sqnr_db<20 or bias<0", None),
    ],
)
def test_an_exact_result_is_better_than_any_limit(text: str, outcome: bool | None) -> None:
    metrics: dict[str, Value] = {"mse": 0.0, **dict.fromkeys(("sqnr_db", "relative_error", "cosine", "bias"))}
    assert fails(parse_condition(text), metrics) is outcome


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("sqnr_db", "'sqnr_db' is not a comparison"),
        ("sqnr_db<", "it is not a comparison"),
        ("saturated_percent>0.1%", "it is not a comparison"),
        ("sqnr_db=20", "it is not a comparison"),
        ("sqnr_db<20 && bias>0", "it is not a comparison"),
        ("sqnr_db<20\nimport os", "it is not a comparison"),
        ("sqnr_db<20 and bias", "'bias' is not a comparison"),
        ("not sqnr_db<20", "is not a comparison"),
        ("sqnr_db is 20", "something else than < <= > >= == !="),
        ("sqnr_db in (1, 2)", "something else than"),
        ("sqnr_db < '20'", "is neither a metric nor a number"),
        ("sqnr_db < True", "is neither a metric nor a number"),
        ("sqnr_db < 2*10", "is neither a metric nor a number"),
        ("sqnr_db < 1j", "is neither a metric nor a number"),
        ("__import__('os').system('true') < 1", "is neither a metric nor a number"),
        ("sqnr_db.real < 1", "is neither a metric nor a number"),
        ("1 < 2", "it names no metric"),
        ("sqnr < 1", "no metric is called sqnr; `mxcli explain` lists them. Did you mean sqnr_db"),
        ("saturatd_percent>1 or sqnr_db<2", "no metric is called saturatd_percent.* Did you mean saturated_percent"),
        ("block_sqnr_db<1", "block_sqnr_db is not one number"),
        ("(" * 10_000 + "sqnr_db<1" + ")" * 10_000, "cannot be read"),
        ("-" * 10_000 + "1<sqnr_db", "cannot be read"),
        ("sqnr_db<1\0", "cannot be read"),
    ],
)
def test_what_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_condition(text)


def test_numbers_are_the_metrics_that_are_one() -> None:
    """A metric without a value is None, and that is a number too."""
    values = measured(Stats(elements=32, blocks=1), FORMATS["mxfp8_e4m3"], (1, 32))
    assert set(NUMBERS) == {name for name, value in values.items() if not isinstance(value, (dict, list))}


def test_every_failure_is_reported_with_its_values() -> None:
    conditions = [parse_condition(text) for text in ("sqnr_db<20 and saturated_percent>3", "mse>1", "elements==32")]
    limits = check_limits(conditions, [("a", METRICS_OF_ONE), ("b", {**METRICS_OF_ONE, "sqnr_db": 21.0})])
    assert limits.checked == 2
    assert limits.failures == (
        "a: sqnr_db is 18.5, saturated_percent is 3.125 (--fail-on 'sqnr_db<20 and saturated_percent>3')",
        "a: elements is 32 (--fail-on 'elements==32')",
        "b: elements is 32 (--fail-on 'elements==32')",
    )
    assert limits.unevaluated == ("--fail-on 'mse>1' could not be evaluated without mse: absent for a, b.",)


def test_a_sample_is_said_to_be_one() -> None:
    """What is estimated, what is of the sample, and what is known all the same."""
    unsure: dict[str, Value] = {"saturated_percent_uncertainty": 0.123, "sqnr_db_uncertainty": None, "amax": 4.0}
    condition = parse_condition("saturated_percent>0 or sqnr_db>0 or amax>0 or elements>0")
    (part,) = check_limits([condition], [("a", {**METRICS_OF_ONE, **unsure, "sampled_elements": 16})]).failures
    assert part.startswith(
        "a: saturated_percent is estimated at 3.125 ±0.12, sqnr_db is estimated at 18.5, amax is 4 in the sample, "
        "elements is 32 ("
    )
    (whole,) = check_limits([condition], [("a", {**METRICS_OF_ONE, **unsure, "sampled_elements": 32})]).failures
    assert whole.startswith("a: saturated_percent is 3.125, sqnr_db is 18.5, amax is 4, elements is 32 (")


def test_what_could_not_be_evaluated_is_an_error_too() -> None:
    condition = parse_condition("mse>1 or bias>sqnr_db")
    nothing: dict[str, Value] = dict.fromkeys(NUMBERS)
    limits = check_limits([condition], [(f"t{at}", nothing) for at in range(12)])
    one = limit_error(limits)
    assert one.exit_code == 5
    assert str(one).startswith(
        "--fail-on 'mse>1 or bias>sqnr_db' could not be evaluated without mse and bias and sqnr_db: absent for t0, t1, "
        "t2, t3, t4, t5, t6, t7, t8, t9 and 2 more. What cannot be checked has not passed: "
    )
    both = limit_error(Limits(3, ("b: x",), ("y", "z")))
    assert str(both).startswith(
        "--fail-on: 1 failure and 2 that could not be evaluated in 3 measurements. What cannot be checked has not"
    )
    assert both.reasons == ("y", "z", "b: x")


def test_twenty_failures_are_shown() -> None:
    condition = parse_condition("sqnr_db<20")
    one = limit_error(check_limits([condition], [("a", METRICS_OF_ONE)]))
    assert (str(one), one.exit_code) == ("a: sqnr_db is 18.5 (--fail-on 'sqnr_db<20')", 5)
    many = limit_error(check_limits([condition], [(f"t{at}", METRICS_OF_ONE) for at in range(1234)]))
    lines = str(many).splitlines()
    assert lines[0] == "--fail-on: 1,234 failures in 1,234 measurements."
    assert lines[1] == "  t0: sqnr_db is 18.5 (--fail-on 'sqnr_db<20')"
    assert len(lines) == 22
    assert lines[-1] == "  and 1,214 more"
