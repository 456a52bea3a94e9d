"""Which axis serves a role better, in words, from hand-made numbers."""

from __future__ import annotations

from mxcli.flows.measure.findings import AxisEffect, axis_effects
from mxcli.flows.measure.totals import Totals
from mxcli.output.conclusion import sentences


def along(**roles: float | None) -> Totals:
    """SQNRs by role; None is an exact result."""
    found = {role: {"sqnr_db": sqnr, "mse": 0.0 if sqnr is None else 1.0} for role, sqnr in roles.items()}
    return Totals({"tensors": len(roles)}, found)


def axis_sentences(by_axis: dict[str, Totals]) -> list[str]:
    return sentences(axis_effects(by_axis))


def test_findings_are_data() -> None:
    by_axis = {"row": along(weight=21.0), "column": along(weight=20.0)}
    assert axis_effects(by_axis) == [AxisEffect("weight", "row", 21.0, "column", 20.0)]
    assert axis_effects(by_axis, "nvfp4 te") == [AxisEffect("weight", "row", 21.0, "column", 20.0, "nvfp4 te")]


def test_each_role_is_reported_where_it_matters() -> None:
    assert axis_sentences(
        {"row": along(activation=20.5, gradient=18.0), "column": along(activation=20.53, gradient=18.31)}
    ) == ["gradient: blocks along columns have 18.31 dB SQNR, 0.31 dB more than along rows (18.00 dB)."]
    assert axis_sentences({"row": along(weight=21.0), "column": along(weight=20.0)}) == [
        "weight: blocks along rows have 21.00 dB SQNR, 1.00 dB more than along columns (20.00 dB)."
    ]


def test_nothing_to_report() -> None:
    assert axis_sentences({"row": along(weight=21.0), "column": along(weight=21.01)}) == [
        "Blocks along rows and along columns differ by less than 0.05 dB in every role."
    ]
    assert axis_sentences({"row": along(weight=21.0)}) == []
    assert axis_sentences({}) == []
    assert axis_sentences({"row": along(weight=21.0), "column": Totals()}) == []


def test_an_exact_result() -> None:
    assert axis_sentences({"row": along(weight=None), "column": along(weight=30.0)}) == [
        "weight: blocks along rows have an exact result, along columns 30.00 dB SQNR."
    ]
