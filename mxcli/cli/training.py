"""`mxcli report --training`: the products of captured layers under recipes of low-precision training."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli import completion
from mxcli.cli.arguments import STDOUT
from mxcli.cli.forms import Forms, check_forms
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.recipes import selection_rules
from mxcli.cli.streams import Talk, deliver, stdout_screen
from mxcli.errors import UsageError, printable
from mxcli.numerics.streams import check_draws

if TYPE_CHECKING:
    from mxcli.flows.products.trained_layers import TrainedLayer
    from mxcli.flows.products.training import TrainingReport
    from mxcli.numerics.training import TrainingRecipe

TrainingOf = Annotated[
    str | None,
    typer.Option(
        "--training",
        metavar="RECIPE[,RECIPE...]|all",
        autocompletion=completion.listed_training,
        help="Instead of tensors measure the products of captured layers, fprop, dgrad and wgrad, under recipes of "
        "low-precision training that `mxcli explain training` lists. Captures are those of --products, or SOURCE.",
    ),
]
Draws = Annotated[
    int | None,
    typer.Option(
        "--draws",
        min=1,
        max=64,
        metavar="N",
        help="With --training: stochastic rounding is drawn so many times, and what the mean of the products is off by "
        "is told too.  [default: 1]",
    ),
]


@dataclass(frozen=True, slots=True)
class Training:
    """What is asked of training, each by the name of its parameter: the recipes' names, the source and which of its
    layers, where activations and gradients were captured (None: in the source), the seed of stochastic rounding and how
    often it is drawn."""

    training: str | None
    source: str
    selectors: list[str] | None
    requantize: bool
    products: str | None
    seed: int | None
    draws: int | None


@dataclass(frozen=True, slots=True)
class StatedTraining:
    """That, with the recipes that names mean, and whether every layer is told."""

    asked: Training
    recipes: tuple[TrainingRecipe, ...]
    detailed: bool


_OF_LAYERS = frozenset(("sort", "top", "wide"))
_NO_FORMS = frozenset(("jsonl", "markdown"))
_SERVES = {field.name for record in (Training, Forms, Machine, Talk) for field in fields(record)} - _NO_FORMS
"""Parameters of `report` that have a say beside --training, but for those that every verb has; its recipes say all that
others do."""
_OF_EVERY_VERB = frozenset(("force", "debug"))


def stated_training(context: typer.Context, asked: Training) -> StatedTraining | None:
    """What --training and the options beside it ask for; None without it. Raises UsageError for names that mean
    nothing, for options that say nothing beside it, or without it, and for more draws than there are seeds."""
    if asked.training is None:
        if asked.draws is not None:
            raise UsageError(f"--draws {asked.draws} is of stochastic rounding in training: add --training NAMES.")
        return None
    from mxcli.numerics.training import find_training

    recipes = find_training(asked.training)
    typed = {
        str(parameter.name): max(parameter.opts, key=len)
        for parameter in context.command.params
        if (source := context.get_parameter_source(str(parameter.name))) and source.name == "COMMANDLINE"
    }
    idle = [flag for name, flag in typed.items() if name not in _SERVES | _OF_EVERY_VERB]
    if idle:
        raise UsageError(f"{', '.join(idle)} with --training: its recipes leave nothing to say there; leave it out.")
    check_draws(asked.seed or 0, asked.draws or 1)
    return StatedTraining(asked, tuple(recipes), not typed.keys().isdisjoint(_OF_LAYERS))


def deliver_training(stated: StatedTraining, where: Machine, forms: Forms, talk: Talk, *, force: bool) -> None:
    """Computes the products and writes them in every form that is asked for."""
    from mxcli.output.training import SORTS, training_csv, training_json, training_text

    check_forms(forms, force=force, sources=[stated.asked.source, stated.asked.products], sorts=SORTS)
    report = _report(stated, where, talk)
    talk.notes(report.notes)
    if forms.json is not None:
        deliver(training_json(report), forms.json)
    if forms.csv is not None:
        deliver(training_csv(report), forms.csv, verbatim=True)
    if STDOUT not in (forms.json, forms.csv):
        screen = stdout_screen(no_color=forms.no_color, wide=forms.wide)
        deliver(training_text(report, screen, detailed=stated.detailed, sort=forms.sort, top=forms.top))


def _report(stated: StatedTraining, where: Machine, talk: Talk) -> TrainingReport:
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.plan.plan import Options, make_plan
    from mxcli.flows.products.trained_layers import memory_to_train, trained_model
    from mxcli.flows.products.training import Trial, report_training
    from mxcli.flows.write.restore import open_floats
    from mxcli.numerics.scheme import Rules

    asked = stated.asked
    # Of the plan only what it takes counts: recipes have formats of their own.
    choice = Options("mxfp8", Rules(), on_indivisible="pad", selection=selection_rules(asked.selectors), analysis=True)
    checkpoint = open_floats(asked.source, requantize=asked.requantize)
    if asked.products is None and not checkpoint.captures:
        raise UsageError(
            f"--training needs captured activations and gradients, and {printable(asked.source)} holds none: add "
            "--products CAPTURES."
        )
    plan = make_plan(checkpoint, choice)
    captures = checkpoint if asked.products is None else open_checkpoint(asked.products)
    model = trained_model(checkpoint, captures, plan)
    backend = open_backend(where, talk)
    draws = asked.draws or 1
    check_memory(memory_to_train(model, draws), where.max_memory, backend.name)
    done, total = 0, sum(layer.nbytes for layer in model.layers)
    with progress("report", talk) as show:

        def on_layer(layer: TrainedLayer) -> None:
            nonlocal done
            done += layer.nbytes
            show(done, total, layer.captured.place)

        trial = Trial(stated.recipes, backend, asked.seed or 0, draws)
        return report_training(asked.source, model, trial, on_layer=on_layer)
