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
            help="A format, scale rule or recipe, element rounding, dialect or metric; lists all without it.",
        ),
    ] = None,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Explain a format, rule, dialect or metric.

    Words, formula, source, and an example that the kernel computes while you wait.

    \b
    Examples:
      mxcli explain
      mxcli explain rceil
      mxcli explain nvfp4
      mxcli explain underflowed
    """
    from mxcli.output.explanation import find_topics, names_page, topic_page

    screen = stdout_screen(no_color=no_color)
    if name is None:
        deliver(names_page(screen))
        return
    from mxcli.cli.worked import worked_example

    deliver("\n\n".join(topic_page(topic, worked_example(topic.row), screen) for topic in find_topics(name)))
