"""Pages of `mxcli explain`: words, formula and source of a row."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.files.layouts import LAYOUTS, Layout
from mxcli.numerics.dialects import ANY, DIALECTS, Dialect, ProducerChoice
from mxcli.numerics.floats import ELEMENTS, SCALES, FloatFormat
from mxcli.numerics.formats import FORMATS, BlockFormat, find_format
from mxcli.numerics.hadamard import TRANSFORMS, Transform
from mxcli.numerics.mantissa_rules import MANTISSA_SCALE_RULES, MantissaScaleRule
from mxcli.numerics.metrics import ESTIMATED, KNOWN, METRICS, OBJECTIVES, OF_SAMPLE, Metric, Objective
from mxcli.numerics.scale_rules import ELEMENT_ROUNDINGS, POWER_OF_TWO_SCALE_RULES, ElementRounding, PowerOfTwoScaleRule
from mxcli.numerics.scheme import scale_rules
from mxcli.numerics.training import TRAINING_RECIPES, TrainingRecipe
from mxcli.output.formats import TEXT_WIDTH, facts_lines, format_page, scalar_facts
from mxcli.output.loaders import layouts_table, loaders_table, rule_sentences
from mxcli.output.screen import Screen, bold
from mxcli.output.training import training_facts

Row = (
    BlockFormat
    | FloatFormat
    | PowerOfTwoScaleRule
    | MantissaScaleRule
    | ElementRounding
    | Dialect
    | Metric
    | Objective
    | Layout
    | TrainingRecipe
    | Transform
)

TABLES: Mapping[str, Callable[[Iterable[Layout], Screen], list[str]]] = {
    "layouts": layouts_table,
    "loaders": loaders_table,
}
"""Tables of all layouts with the engines that load them, and with the formats that each engine loads."""
TRAINING = "training"
"""Prefix of the names of training recipes, some of which are named as their format."""

TOPICS: Mapping[str, Mapping[str, Row]] = {
    "block formats": FORMATS,
    "element and scale formats": ELEMENTS | SCALES,
    "scale rounding rules (power-of-two scales)": POWER_OF_TWO_SCALE_RULES,
    "scale recipes (scales with a mantissa)": MANTISSA_SCALE_RULES,
    "element roundings": ELEMENT_ROUNDINGS,
    "transforms": TRANSFORMS,
    "dialects (--as)": DIALECTS,
    "layouts (--layout)": LAYOUTS,
    "training recipes (mxcli training)": {f"{TRAINING}:{name}": row for name, row in TRAINING_RECIPES.items()},
    "metrics": METRICS,
    "objectives of recommend": OBJECTIVES,
}
_SAMPLED = {
    KNOWN: "the same, since it follows from lengths",
    ESTIMATED: "an estimate for the whole, with its uncertainty",
    OF_SAMPLE: "that of the sample",
}


@dataclass(frozen=True, slots=True)
class Topic:
    """A row and the kind of thing it is."""

    kind: str
    row: Row


def find_topics(name: str) -> list[Topic]:
    """Return the rows with this name or spelling. Raises UsageError with the closest names if there are none."""
    wanted = name.strip().lower()
    names = [wanted, f"{TRAINING}:{wanted}"]
    found = next(
        (those for each in names if (those := [Topic(k, row) for k, known, row in _named() if known == each])), []
    )
    if not found and ":" in wanted and not wanted.startswith(TRAINING):
        return [Topic("block formats", find_format(wanted))]
    if not found:
        close = did_you_mean(wanted, {known for _, known, _ in _named()})
        raise UsageError(f"nothing is called '{printable(name)}': `mxcli explain` lists every name.{close}")
    return found


def names_page(screen: Screen) -> str:
    """Return all names by kind."""
    lines: list[str] = []
    for kind, rows in TOPICS.items():
        lines += [bold(kind, screen), *_wrapped(", ".join(rows), screen), ""]
    return "\n".join([*lines, "`mxcli explain NAME` explains one; a format may be spelled out, as in e3m2:e8m0:1x16."])


def topic_page(topic: Topic, example: list[str], screen: Screen) -> str:
    """Return the page about a row, with its worked example."""
    title, *body = _page(topic.row, screen)
    lines = [bold(title, screen), *body]
    if example:
        lines += ["", *example]
    return "\n".join(lines)


def _page(row: Row, screen: Screen) -> list[str]:
    if isinstance(row, BlockFormat):
        return format_page(row, screen)
    if isinstance(row, FloatFormat):
        return [f"{row.name}: a format of single values", "", *facts_lines(scalar_facts(row), screen)]
    if isinstance(row, Dialect):
        return [
            _title(row, "a dialect"),
            "",
            *_words(row.meaning, screen),
            "",
            *_choices(row, screen),
            "",
            *_facts(row, screen),
            *_exceptions(row, screen),
        ]
    if isinstance(row, Layout):
        held = _facts(row, screen, holds=", ".join(row.formats))
        return [_title(row, "a layout of checkpoints"), "", *_words(row.meaning, screen), "", *held, "",
                *_listed(rule_sentences(row), screen)]  # fmt: skip
    if isinstance(row, Metric):
        unit = f" [{row.unit}]" if row.unit else ""
        better = {"low": "lower is better", "high": "higher is better"}.get(row.better, "neither direction is better")
        facts = {"formula": row.formula, "better": better, "--sample": _SAMPLED[row.sampled], "source": row.source}
        return [
            f"{row.name}{unit}: a metric",
            "",
            *_words(row.meaning, screen),
            "",
            *facts_lines(facts, screen),
        ]
    if isinstance(row, Objective):
        facts = {"formula": row.formula, "source": row.source}
        return [f"{row.name}: an objective", "", *_words(row.meaning, screen), "", *facts_lines(facts, screen)]
    if isinstance(row, Transform):
        return [_title(row, "a transform"), "", *_words(row.meaning, screen), "",
                *_facts(row, screen, formula=row.formula)]  # fmt: skip
    if isinstance(row, TrainingRecipe):
        return [f"{row.name}: a training recipe", "", *_words(row.meaning, screen), "",
                *facts_lines(training_facts(row), screen)]  # fmt: skip
    if isinstance(row, PowerOfTwoScaleRule):
        served = ", ".join(f.name for f in FORMATS.values() if row.name in scale_rules(f))
        return [_title(row, "a scale rounding rule"), "", *_words(row.meaning, screen), "",
                *_facts(row, screen, formula=row.formula, serves=served)]  # fmt: skip
    if isinstance(row, MantissaScaleRule):
        served = ", ".join(f.name for f in FORMATS.values() if row.name in scale_rules(f))
        return [_title(row, "a scale recipe"), "", *_words(row.meaning, screen), "",
                "  T: amax of the tensor, A: amax of the block, S: block scale, x: element", "",
                *_facts(row, screen, formula=row.formula, serves=served)]  # fmt: skip
    return [f"{row.name}: an element rounding", "", *_words(row.meaning, screen), "", *_facts(row, screen)]


def _named() -> Iterator[tuple[str, str, Row]]:
    """Yield kind, name and row of every topic, under each of its aliases and spellings."""
    for kind, rows in TOPICS.items():
        for known, row in rows.items():
            for name in {known, getattr(row, "spelling", known), *getattr(row, "aliases", ())}:
                yield kind, name, row


def _title(row: Dialect | Layout | PowerOfTwoScaleRule | MantissaScaleRule | Transform, kind: str) -> str:
    also = f" (also {', '.join(row.aliases)})" if row.aliases else ""
    return f"{row.name}{also}: {kind}"


def _facts(
    row: Dialect | Layout | PowerOfTwoScaleRule | MantissaScaleRule | ElementRounding | Transform,
    screen: Screen,
    **facts: str,
) -> list[str]:
    return facts_lines({**facts, "source": row.source}, screen)


def _exceptions(dialect: Dialect, screen: Screen) -> list[str]:
    """Return where the producer's bytes are others than ours, after a heading; nothing for none."""
    return ["", "  where its bytes are others", *_listed(dialect.exceptions, screen)] if dialect.exceptions else []


def _choices(dialect: Dialect, screen: Screen) -> list[str]:
    """Return a line for each kind of scale and element that the dialect decides about."""
    return facts_lines(
        {
            f"{kind} scales" + ("" if element == ANY else f", {element} elements"): _choice_words(choice)
            for kind, rows in dialect.choices.items()
            for element, choice in rows.items()
        },
        screen,
    )


def _choice_words(choice: ProducerChoice) -> str:
    """Return the rule, the rounding, and the fields that are not at their defaults."""
    default = ProducerChoice(choice.rule)
    others = [
        f"{field.name.replace('_', ' ')} {_value_words(getattr(choice, field.name))}"
        for field in fields(ProducerChoice)
        if field.name not in ("rule", "rounding") and getattr(choice, field.name) != getattr(default, field.name)
    ]
    return "; ".join([f"{choice.rule}, {choice.rounding}", *others])


def _value_words(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{exponent} with {rule}" for rule, exponent in value.items())
    return "yes" if value is True else "no" if value is False else str(value)


def _words(text: str, screen: Screen) -> list[str]:
    sentence = text[:1].upper() + text[1:]
    return _wrapped(sentence if sentence.endswith(".") else sentence + ".", screen)


def _listed(sentences: Sequence[str], screen: Screen) -> list[str]:
    """Return sentences, each begun on a line of its own and continued below with an indentation."""
    width = max(min(screen.width or TEXT_WIDTH, TEXT_WIDTH), 20)
    wrapper = textwrap.TextWrapper(width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [line for each in sentences for line in wrapper.wrap(each)]


def _wrapped(text: str, screen: Screen) -> list[str]:
    width = min(screen.width or TEXT_WIDTH, TEXT_WIDTH)
    return textwrap.wrap(text, max(width, 20), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
