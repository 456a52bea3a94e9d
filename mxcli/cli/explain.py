"""`mxcli explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.options import completes
from mxcli.cli.terminal import Messages, deliver


@verb
def explain(
    messages: Annotated[Messages, vary(only=("no_color", "debug"))],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            show_default=False,
            autocompletion=completes("mxcli.output.explanation:TOPICS"),
            help="A format, scale rule, element rounding, dialect, layout, training recipe or metric; without it, "
            "lists all.",
        ),
    ] = None,
) -> None:
    """Explain a format, rule, dialect, training recipe or metric.

    Shows its definition, formula, source, and an example that the kernel computes on the spot.

    \b
    Examples:
      mxcli explain
      mxcli explain rceil
      mxcli explain nvfp4
      mxcli explain underflowed
      mxcli explain layouts
      mxcli explain loaders
      mxcli explain compressed-tensors
      mxcli explain training
      mxcli explain training:nvfp4
    """
    from mxcli.files.layouts import LAYOUTS
    from mxcli.numerics.training import TRAINING_RECIPES
    from mxcli.output.explanation import TABLES, TRAINING, find_topics, names_page, topic_page
    from mxcli.output.training import training_table

    screen = messages.stdout()
    if name is None:
        deliver(names_page(screen))
        return
    if (table := TABLES.get(name.strip().lower())) is not None:
        deliver("\n".join(table(LAYOUTS.values(), screen)))
        return
    if name.strip().lower() == TRAINING:
        deliver(training_table(TRAINING_RECIPES.values(), screen))
        return
    from mxcli.cli.examples import worked_example

    deliver("\n\n".join(topic_page(topic, worked_example(topic.row), screen) for topic in find_topics(name)))
