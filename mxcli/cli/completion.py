"""Names that the shell completes, read from the rows when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def formats(incomplete: str) -> list[str]:
    """Names of formats."""
    from mxcli.numerics.formats import FORMATS

    return _beginning(FORMATS, incomplete)


def scale_roundings(incomplete: str) -> list[str]:
    """Names of scale rules and recipes."""
    from mxcli.numerics.scale_rules import MANTISSA_SCALE_RULES, POWER_OF_TWO_SCALE_RULES

    return _beginning([*POWER_OF_TWO_SCALE_RULES, *MANTISSA_SCALE_RULES], incomplete)


def roundings(incomplete: str) -> list[str]:
    """Names of element roundings."""
    from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS

    return _beginning(ELEMENT_ROUNDINGS, incomplete)


def listed_formats(incomplete: str) -> list[str]:
    """Formats, after those that commas separate."""
    return _after_commas(formats, incomplete)


def listed_scale_roundings(incomplete: str) -> list[str]:
    """Scale rules and recipes, after those that commas separate."""
    return _after_commas(scale_roundings, incomplete)


def listed_roundings(incomplete: str) -> list[str]:
    """Element roundings, after those that commas separate."""
    return _after_commas(roundings, incomplete)


def listed_training(incomplete: str) -> list[str]:
    """Training recipes, after those that commas separate."""
    return _after_commas(training, incomplete)


def training(incomplete: str) -> list[str]:
    """Names of training recipes."""
    from mxcli.numerics.training import ALL, TRAINING_RECIPES

    return _beginning((*TRAINING_RECIPES, ALL), incomplete)


def dialects(incomplete: str) -> list[str]:
    """Names of dialects."""
    from mxcli.numerics.dialects import DIALECTS

    return _beginning(DIALECTS, incomplete)


def layouts(incomplete: str) -> list[str]:
    """Names of layouts."""
    from mxcli.files.layouts import LAYOUTS

    return _beginning(LAYOUTS, incomplete)


def metrics(incomplete: str) -> list[str]:
    """Names of metrics."""
    from mxcli.numerics.metrics import METRICS

    return _beginning(METRICS, incomplete)


def topics(incomplete: str) -> list[str]:
    """Everything `mxcli explain` knows."""
    from mxcli.output.explanation import TOPICS

    return _beginning([name for rows in TOPICS.values() for name in rows], incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _after_commas(complete: Callable[[str], list[str]], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in complete(last)]
