"""`mxcli explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import completion, options
from mxcli.cli.streams import deliver, stdout_screen


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            show_default=False,
            autocompletion=completion.topics,
            help="A format, scale rule or recipe, element rounding, dialect, training recipe or metric; lists all "
            "without it.",
        ),
    ] = None,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Explain a format, rule, dialect, training recipe or metric.

    Words, formula, source, and an example that the kernel computes while you wait.

    \b
    Examples:
      mxcli explain
      mxcli explain rceil
      mxcli explain nvfp4
      mxcli explain underflowed
      mxcli explain training
      mxcli explain training:nvfp4
    """
    from mxcli.numerics.training import TRAINING_RECIPES
    from mxcli.output.explanation import TRAINING, find_topics, names_page, topic_page
    from mxcli.output.training import training_table

    screen = stdout_screen(no_color=no_color)
    if name is None:
        deliver(names_page(screen))
        return
    if name.strip().lower() == TRAINING:
        deliver(training_table(TRAINING_RECIPES.values(), screen))
        return
    from mxcli.cli.examples import worked_example

    deliver("\n\n".join(topic_page(topic, worked_example(topic.row), screen) for topic in find_topics(name)))
