"""Comparisons in words, from hand-made numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mxcli.flows.measure.comparison_findings import Change, Effect, Standing, Winner
from mxcli.flows.measure.comparison_findings import conclusion as found
from mxcli.output.conclusion import sentences

FLOOR = Standing("mxfp8_e4m3", "floor", 8.25, 3.1, 0.0, 30.0, (30.0, 31.0, 32.0))
RCEIL = replace(FLOOR, rule="rceil", saturated_blocks_percent=0.0, overall_db=31.0, sqnr_db=(31.0, 32.5, 33.25))


def conclusion(standings: list[Standing]) -> list[str]:
    return sentences(found(standings))


def test_findings_are_data() -> None:
    effect, other, winner = found([FLOOR, replace(RCEIL, wins=3), replace(FLOOR, rule="even")])
    assert effect == Effect(
        "floor", "rceil", (1.0, 1.5, 1.25), saturated_blocks=Change(3.1, 0.0), stochastic_saturates=False
    )
    assert isinstance(effect, Effect)
    assert (effect.gains_db, effect.costs_db) == ((1.0, 1.5, 1.25), ())
    assert isinstance(other, Effect)
    assert (other.saturated_blocks, other.gains_db, other.costs_db) == (None, (), ())
    assert winner == Winner("rceil", 31.0, (), tensors=3, wins=3, others=())


def test_one_is_better_everywhere() -> None:
    assert conclusion([FLOOR, RCEIL]) == [
        "Against floor, rceil removes all saturation (3.1 % of blocks) and gains 1 to 1.5 dB on all 3 tensors."
    ]
    assert conclusion([RCEIL, FLOOR]) == [
        "Against rceil, floor saturates 3.1 % of blocks and costs 1 to 1.5 dB on all 3 tensors."
    ]


def test_a_trade_off() -> None:
    costs = replace(RCEIL, sqnr_db=(29.8, 31.0, 32.001))
    assert conclusion([FLOOR, costs]) == [
        "Against floor, rceil removes all saturation (3.1 % of blocks) and costs 0.2 dB on 1 of 3 tensors."
    ]
    both = replace(costs, underflowed_percent=2.5, sqnr_db=(29.8, 31.9, 33.5))
    assert conclusion([replace(FLOOR, underflowed_percent=2.0), both]) == [
        "Against floor, rceil removes all saturation (3.1 % of blocks), raises underflow from 2 % to 2.5 % of "
        "elements, gains 0.9 to 1.5 dB on 2 and costs 0.2 dB on 1 of 3 tensors."
    ]
    many = replace(FLOOR, sqnr_db=(30.0,) * 224)
    assert conclusion([many, replace(RCEIL, sqnr_db=(29.8,) * 12 + (30.0,) * 212)]) == [
        "Against floor, rceil removes all saturation (3.1 % of blocks) and costs 0.2 dB on 12 of 224 tensors."
    ]


def test_nothing_differs() -> None:
    assert conclusion([FLOOR, replace(FLOOR, rule="even")]) == [
        "Against floor, even gives the same SQNR on all 3 tensors."
    ]
    close = replace(FLOOR, rule="even", sqnr_db=(30.0, 31.0, 32.004))
    assert conclusion([FLOOR, close]) == ["Against floor, even changes the SQNR of no tensor by 0.01 dB."]
    one = replace(FLOOR, sqnr_db=(30.0,))
    assert conclusion([one, replace(one, rule="even")]) == [
        "Against floor, even gives the same SQNR on the only tensor."
    ]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (3.1, 1.25, "lowers saturation from 3.1 % to 1.25 % of blocks and gives"),
        (1.25, 3.1, "raises saturation from 1.25 % to 3.1 % of blocks and gives"),
        (3.1, 3.0, "even gives"),
        (0.0, 0.0, "even gives"),
    ],
)
def test_saturation(before: float, after: float, words: str) -> None:
    first = replace(FLOOR, saturated_blocks_percent=before)
    assert words in conclusion([first, replace(first, rule="even", saturated_blocks_percent=after)])[0]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (8.4, 11.3, "raises underflow from 8.4 % to 11.3 % of elements and gives"),
        (11.3, 8.4, "lowers underflow from 11.3 % to 8.4 % of elements and gives"),
        (8.4, 8.5, "even gives"),
        (0.01, 0.05, "even gives"),
    ],
)
def test_underflow_is_reported_where_there_is_much_of_it(before: float, after: float, words: str) -> None:
    first = replace(FLOOR, underflowed_percent=before)
    assert words in conclusion([first, replace(first, rule="even", underflowed_percent=after)])[0]


def test_more_than_two_rules() -> None:
    even = replace(FLOOR, rule="even", overall_db=30.5, sqnr_db=(30.5, 31.25, 34.0), wins=1)
    assert conclusion([FLOOR, replace(RCEIL, wins=2), even]) == [
        "Against floor, rceil removes all saturation (3.1 % of blocks) and gains 1 to 1.5 dB on all 3 tensors.",
        "Against floor, even gains 0.25 to 2 dB on all 3 tensors.",
        "Best SQNR overall: rceil (31.0 dB); best on 2 of 3 tensors, even on 1.",
    ]
    ceil = replace(RCEIL, rule="ceil", overall_db=31.005)
    assert conclusion([FLOOR, replace(RCEIL, wins=3), ceil])[-1] == (
        "Best SQNR overall: rceil (31.0 dB), with ceil as good; best on all 3 tensors."
    )


def test_formats_are_compared_with_the_first_each_at_its_best() -> None:
    worse = replace(FLOOR, format="mxfp4_e2m1", bits=4.25, overall_db=18.0, sqnr_db=(17.0, 18.0, 19.0))
    better = replace(worse, rule="even", overall_db=18.5, sqnr_db=(17.5, 18.5, 19.5))
    nvfp4 = Standing("nvfp4", "te", 4.5, 50.0, 7.0, 20.0, (19.0, 20.0, 21.0))
    assert conclusion([worse, better, nvfp4, replace(RCEIL, wins=3)]) == [
        "mxfp4_e2m1: against floor, even gains 0.5 dB on all 3 tensors.",
        "Against mxfp4_e2m1 even, nvfp4 te takes 0.25 bits more per element and gains 1.5 dB on all 3 tensors.",
        "Against mxfp4_e2m1 even, mxfp8_e4m3 rceil takes 4 bits more per element and gains 13.5 to 14 dB on all 3 "
        "tensors.",
        "Best SQNR overall: mxfp8_e4m3 rceil (31.0 dB); best on all 3 tensors.",
    ]
    assert conclusion([RCEIL, nvfp4]) == [
        "Against mxfp8_e4m3 rceil, nvfp4 te takes 3.75 bits fewer per element and costs 12 to 12.5 dB on all 3 tensors."
    ]
    fp8 = replace(RCEIL, format="mxfp8_e5m2")
    assert conclusion([RCEIL, fp8]) == [
        "Against mxfp8_e4m3 rceil, mxfp8_e5m2 rceil takes as many bits per element and gives the same SQNR on all 3 "
        "tensors."
    ]


def test_of_results_that_are_equally_good_the_smaller_format_is_best() -> None:
    small = replace(FLOOR, format="mxfp6_e2m3", bits=6.25, overall_db=30.0)
    assert conclusion([FLOOR, small, replace(RCEIL, overall_db=29.0, wins=1)])[-1] == (
        "Best SQNR overall: mxfp6_e2m3 floor (30.0 dB), with mxfp8_e4m3 floor as good; best on none, "
        "mxfp8_e4m3 rceil on 1."
    )


def test_stochastic_rounding_is_not_called_worse_without_saying_what_it_is_for() -> None:
    drawn = replace(FLOOR, rule="floor stochastic", sqnr_db=(27.0, 28.0, 29.0), is_random=True)
    meant = (
        "stochastic rounding is for sums: its errors have no bias except from saturation and cancel there, which an "
        "SQNR does not count"
    )
    assert conclusion([FLOOR, drawn]) == [f"Against floor, floor stochastic costs 3 dB on all 3 tensors ({meant})."]
    assert conclusion([drawn, FLOOR]) == [f"Against floor stochastic, floor gains 3 dB on all 3 tensors ({meant})."]
    assert meant not in " ".join(conclusion([drawn, replace(drawn, rule="ceil stochastic")]))
    other = replace(drawn, format="mxfp6_e2m3", bits=6.25)
    assert conclusion([FLOOR, other]) == [
        f"Against mxfp8_e4m3 floor, mxfp6_e2m3 floor stochastic takes 2 bits fewer per element and costs 3 dB on all 3 "
        f"tensors ({meant})."
    ]


def test_exact_and_absent_results() -> None:
    exact = replace(FLOOR, rule="rceil", overall_db=math.inf, sqnr_db=(math.inf, math.inf, 32.0))
    assert conclusion([FLOOR, exact]) == ["Against floor, rceil gains an exact result on 2 of 3 tensors."]
    some = replace(exact, sqnr_db=(math.inf, 31.5, 32.0))
    assert conclusion([FLOOR, some]) == ["Against floor, rceil gains 0.5 dB to an exact result on 2 of 3 tensors."]
    assert conclusion([exact, replace(exact, rule="even")]) == [
        "Against rceil, even gives the same SQNR on all 3 tensors."
    ]
    assert conclusion([FLOOR, replace(exact, wins=3), FLOOR])[-1] == (
        "Best SQNR overall: rceil (exact); best on all 3 tensors."
    )
    absent = replace(FLOOR, overall_db=None, sqnr_db=(None, None, None))
    assert conclusion([absent, replace(absent, rule="even"), absent]) == [
        "Against floor, even has no SQNR to compare.",
        "Against floor, floor has no SQNR to compare.",
    ]
    partly = replace(FLOOR, sqnr_db=(None, 31.0, 32.0))
    assert conclusion([partly, RCEIL])[0].endswith("gains 1.25 to 1.5 dB on both tensors.")
