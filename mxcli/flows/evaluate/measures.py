"""Measures of a candidate against the original, as rows: columns of every form, and the names of --fail-on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mxcli.flows.evaluate.evaluate import Evaluated


@dataclass(frozen=True, slots=True)
class Pair:
    """Something evaluated, and the original."""

    own: Evaluated
    original: Evaluated


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a candidate: its unit, meaning and formula, its heading in the table (None: none), the digits it is
    shown with (None: three significant ones), and what it is computed from. `drop` is that of a column."""

    name: str
    unit: str
    meaning: str
    formula: str
    of: Callable[[Pair], float | None]
    heading: str | None = None
    digits: int | None = None
    drop: int = 0
    of_original: bool = True


MEASURES: dict[str, Measure] = {
    row.name: row
    for row in (
        Measure(
            "loss",
            "nats",
            "mean negative log-probability of a token",
            "mean -log q(token)",
            lambda each: each.own.scores.loss,
            "loss",
            4,
            drop=4,
        ),
        Measure(
            "loss_error",
            "nats",
            "standard error of the loss, from means of runs of 256 tokens",
            "s / sqrt(n)",
            lambda each: each.own.scores.loss_error,
        ),
        Measure(
            "perplexity",
            "",
            "exp of the loss",
            "exp(loss)",
            lambda each: each.own.scores.perplexity,
            "perplexity",
            drop=1,
        ),
        Measure(
            "loss_change",
            "nats",
            "loss minus the original's, on the same tokens",
            "mean log p(token) - log q(token)",
            lambda each: each.own.scores.difference(each.original.scores)[0],
            "loss\nchange",
            4,
            of_original=False,
        ),
        Measure(
            "loss_change_error",
            "nats",
            "standard error of that change, paired token by token",
            "s / sqrt(n)",
            lambda each: each.own.scores.difference(each.original.scores)[1],
            of_original=False,
        ),
        Measure(
            "published_change",
            "nats",
            "of a --study: the published change of the loss, on the model and text of the study",
            "log(perplexity / perplexity of the baseline)",
            lambda each: None if each.own.candidate is None else each.own.candidate.published,
            "published\nchange",
            4,
            of_original=False,
        ),
        Measure(
            "kl_mean",
            "nats",
            "mean KL divergence of the predictions from the original's",
            "mean sum p log(p / q)",
            lambda each: each.own.scores.kl_mean,
            "KL\nmean",
            4,
            of_original=False,
        ),
        Measure(
            "kl_error",
            "nats",
            "standard error of the mean KL divergence",
            "s / sqrt(n)",
            lambda each: each.own.scores.kl_error,
            of_original=False,
        ),
        Measure(
            "kl_median",
            "nats",
            "median KL divergence of a token",
            "50 % quantile",
            lambda each: each.own.scores.kl_quantile(0.5),
            of_original=False,
        ),
        Measure(
            "kl_p99",
            "nats",
            "KL divergence that 99 % of the tokens do not exceed",
            "99 % quantile",
            lambda each: each.own.scores.kl_quantile(0.99),
            "KL\n99 %",
            drop=3,
            of_original=False,
        ),
        Measure(
            "kl_max",
            "nats",
            "largest KL divergence of a token",
            "max",
            lambda each: each.own.scores.kl_quantile(1.0),
            of_original=False,
        ),
        Measure(
            "same_top_percent",
            "%",
            "tokens for which the most likely one is the original's",
            "100 mean [argmax q = argmax p]",
            lambda each: each.own.scores.same_top,
            "same top\n%",
            1,
            drop=2,
            of_original=False,
        ),
        Measure(
            "rms_change_percent",
            "%",
            "root mean square change of the probability of the text's tokens",
            "100 sqrt(mean (q(token) - p(token))^2)",
            lambda each: each.own.scores.rms_change,
            "RMS\nchange %",
            drop=5,
            of_original=False,
        ),
        Measure(
            "nonfinite",
            "",
            "tokens whose prediction is not a number",
            "count",
            lambda each: each.own.nonfinite,
        ),
        Measure(
            "bits_per_weight",
            "bits",
            "size of all tensors for each weight, those that stay high counted too",
            "8 bytes / weights",
            lambda each: None if each.own.size is None else each.own.size.bits,
            "bits per\nweight",
            2,
        ),
        Measure(
            "bytes",
            "bytes",
            "size of all tensors",
            "",
            lambda each: None if each.own.size is None else each.own.size.nbytes,
        ),
        Measure(
            "tokens_per_second",
            "1/s",
            "scored tokens a second of this run, emulation included",
            "tokens / seconds",
            lambda each: each.own.tokens_per_second or None,
            "tokens/s",
            drop=6,
        ),
    )
}


def measures_of(each: Pair) -> Mapping[str, float | None]:
    """Return every measure; None where it does not exist or is not a number, as all of a model that predicts NaN."""
    is_original = each.own.candidate is None
    found = {name: row.of(each) if row.of_original or not is_original else None for name, row in MEASURES.items()}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}
