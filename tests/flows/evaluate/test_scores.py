"""Losses, distances and their standard errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mxcli.flows.evaluate.scores import Scores, WindowScores, standard_error


def window(nll: list[float], kl: list[float] | None = None, agrees: list[bool] | None = None) -> WindowScores:
    count = len(nll)
    return WindowScores(
        np.asarray(nll, np.float32),
        np.asarray(kl or [0.0] * count, np.float32),
        np.asarray(agrees or [True] * count, np.bool_),
        np.asarray([0.5] * count, np.float32),
    )


def test_means_are_over_tokens_not_windows() -> None:
    scores = Scores((window([1.0, 2.0, 3.0]), window([6.0])))
    assert scores.tokens == 4
    assert scores.loss == 3.0
    assert scores.perplexity == pytest.approx(math.e**3, rel=1e-15)
    assert scores.rms_change == 50.0


def test_quantiles_are_by_nearest_rank() -> None:
    scores = Scores((window([0.0] * 4, [0.4, 0.1, 0.3, 0.2]),))
    found = [scores.kl_quantile(share) for share in (0.25, 0.5, 0.51, 0.99, 1.0)]
    assert found == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4], rel=1e-6)
    assert scores.kl_mean == pytest.approx(0.25, rel=1e-6)


def test_agreement_is_in_percent() -> None:
    assert Scores((window([0.0] * 4, agrees=[True, False, True, True]),)).same_top == 75.0


def test_a_change_is_paired_by_token() -> None:
    original = Scores((window([1.0, 5.0]), window([2.0, 4.0])))
    other = Scores((window([1.5, 5.5]), window([2.25, 4.25])))
    change, error = other.difference(original)
    assert change == 0.375
    assert error == pytest.approx(0.125, rel=1e-12)  # two runs, whose means are 0.5 and 0.25


def test_an_error_needs_two_runs() -> None:
    assert standard_error([np.zeros(256, np.float32)]) is None
    assert standard_error([np.zeros(257, np.float32)]) == 0.0


def test_the_error_is_that_of_the_means_of_runs() -> None:
    random = np.random.default_rng(0)
    runs = random.standard_normal((40, 256))
    expected = runs.mean(1).std(ddof=1) / math.sqrt(40)
    assert standard_error([runs.reshape(-1)]) == pytest.approx(expected, rel=1e-12)
    assert standard_error(list(runs.reshape(10, -1))) == pytest.approx(expected, rel=1e-12)


def test_tokens_that_are_alike_are_no_evidence() -> None:
    random = np.random.default_rng(1)
    draws = random.standard_normal(64)
    repeated = np.repeat(draws, 256)
    assert standard_error([repeated]) == pytest.approx(draws.std(ddof=1) / 8, rel=1e-12)


def test_a_loss_beyond_binary64_has_no_perplexity() -> None:
    assert Scores((window([800.0]),)).perplexity == math.inf
