"""The verbs by name, each in a module of its name, which is imported when the verb or its help is needed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from mxcli.cli.groups import GroupedHelp

VERBS: Mapping[str, str] = {
    "inspect": "List the tensors of a checkpoint, from its headers only.",
    "quantize": "Write a quantized checkpoint, and report its error.",
    "merge": "Complete an output that was written in shares.",
    "report": "Report the error of a format, tensor by tensor.",
    "compare": "Compare formats and rules on the same tensors.",
    "recommend": "Choose a format for each layer, and the layers to keep.",
    "training": "Measure the products of layers under training recipes.",
    "products": "Measure the products of layers with quantized operands.",
    "evaluate": "Evaluate the loss of a model under formats, recipes and checkpoints.",
    "convert": "Write a quantized checkpoint in another layout.",
    "dequantize": "Write a quantized checkpoint back as plain floats.",
    "capture": "Record activations, gradients and weights of a model.",
    "verify": "Check a quantized checkpoint.",
    "diff": "Compare two checkpoints, tensor by tensor.",
    "formats": "List the formats with their derived numbers, or one in full.",
    "explain": "Explain a format, rule, dialect, training recipe or metric.",
    "doctor": "Report what this installation and machine can do, and why not.",
    "bench": "Measure the speed of this machine.",
}
"""The first sentence of the help of each verb: the help of `mxcli` needs no other part of one."""


class Verbs(dict[str, Any]):
    """Verbs by name; a command is built when it is first used."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(VERBS))

    def __getitem__(self, name: str) -> Any:
        """Return the command of a verb."""
        if super().__getitem__(name) is None:
            self[name] = _command(name)
        return super().__getitem__(name)

    def values(self) -> Any:
        """Return all commands."""
        return dict(self.items()).values()

    def items(self) -> Any:
        """Return all commands with their names."""
        return {name: self[name] for name in self}.items()


class VerbGroup(TyperGroup):
    """The program: a group of verbs whose help is written from their first sentences."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**{**attributes, "commands": Verbs()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb; None if there is none of that name."""
        if cmd_name not in self.commands:
            return None
        return self.commands[cmd_name]

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the verbs in their order."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line for each verb."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _command(name: str) -> Any:
    verb = getattr(import_module(f"mxcli.cli.{name}"), name)
    if isinstance(verb, typer.Typer):
        return typer.main.get_command(verb)
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    alone.command(name, cls=GroupedHelp)(verb)
    return typer.main.get_command(alone)
