"""Published tables of losses under formats, as rows that `mxcli evaluate --study` repeats on another model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.flows.evaluate.candidates import NONE, SAME, Candidate, of_formats


@dataclass(frozen=True, slots=True)
class Point:
    """A format of weights, that of inputs, and the published perplexity (None: not published)."""

    weights: str
    activations: str
    perplexity: float | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """A published table: its points, the model, text and perplexity of its baseline, and the rules it used."""

    name: str
    meaning: str
    source: str
    model: str
    baseline: float
    points: tuple[Point, ...]
    rules: Mapping[str, Any] = field(default_factory=dict)

    def change(self, point: Point) -> float | None:
        """Return the published change of the loss in nats per token."""
        return None if point.perplexity is None else math.log(point.perplexity / self.baseline)


_PAPER = "Rouhani et al., Microscaling Data Formats for Deep Learning, 2023"
_LLAMA = "LLaMA-7B on wikitext"
_FLOOR = {"scale_rounding": "floor"}
_PERPLEXITY = {
    ("mxint8", SAME): 9.504,
    ("mxfp8_e4m3", SAME): 9.768,
    ("mxfp6_e2m3", SAME): 9.628,
    ("mxfp4_e2m1", SAME): 27.201,
    ("mxfp6_e2m3", "mxfp8_e4m3"): 9.683,
    ("mxfp4_e2m1", "mxfp8_e4m3"): 11.476,
    ("mxfp4_e2m1", "mxfp6_e2m3"): 11.147,
}
_DIRECT = ("mxint8", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1")


def _points(*pairs: tuple[str, str]) -> tuple[Point, ...]:
    return tuple(Point(*pair, _PERPLEXITY.get(pair)) for pair in pairs)


STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            "direct-cast",
            "every MX format for weights alone, and for weights and inputs",
            f"{_PAPER}, tables 2 and 6",
            _LLAMA,
            9.488,
            _points(*((name, each) for name in _DIRECT for each in (NONE, SAME))),
            _FLOOR,
        ),
        Study(
            "mixed",
            "weights and inputs in different MX formats",
            f"{_PAPER}, tables 5 and 6",
            _LLAMA,
            9.488,
            _points(*_PERPLEXITY),
            _FLOOR,
        ),
    )
}


def find_study(name: str) -> Study:
    """Return a study by name. Raises UsageError for an unknown one."""
    if name not in STUDIES:
        known = ", ".join(STUDIES)
        raise UsageError(f"--study {printable(name)}: {known} are known.{did_you_mean(name, STUDIES)}")
    return STUDIES[name]


def of_study(study: Study, given: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yield the candidates of a study, each with the published change; `given` rules replace those of the study."""
    for point in study.points:
        for candidate in of_formats([point.weights], [point.activations], {**study.rules, **given}):
            yield replace(candidate, published=study.change(point))
