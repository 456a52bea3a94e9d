"""`mxcli training`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.groups import typed, vary, verb
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.options import Selection, Source, completes
from mxcli.cli.outputs import Results, deliver_forms, deliver_pages
from mxcli.cli.progress import advancing
from mxcli.cli.recipes import selection_rules
from mxcli.cli.terminal import Messages
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.products.trained_layers import TrainedLayer, TrainedModel

_OF_LAYERS = frozenset(("sort", "top", "wide"))
"""Options that show a row per layer."""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Training recipes, and the captures to compute products of."""

    heading: ClassVar[str] = "Training"
    captures: Annotated[
        str | None,
        typer.Option(
            "--captures",
            metavar="CAPTURES",
            help="Captured activations and gradients, a file or a directory.  [default: those in SOURCE]",
        ),
    ] = None
    recipes: Annotated[
        str,
        typer.Option(
            "--recipes",
            metavar="RECIPE[,RECIPE...]|all",
            autocompletion=completes("mxcli.numerics.training:TRAINING_RECIPES", listed=True, more=("all",)),
            help="Training recipes that `mxcli explain training` lists, separated by commas.",
        ),
    ] = "all"
    draws: Annotated[
        int,
        typer.Option(
            "--draws",
            min=1,
            max=64,
            metavar="N",
            help="Draws of stochastic rounding; with several, the error of the mean product is reported too.",
        ),
    ] = 1
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=0, metavar="N", help="Seed of the first draw; each further draw adds 1.  [default: 0]"
        ),
    ] = None


_SORT_HELP = {"sort": "Order of the table of layers, worst first: sqnr_db, another metric of its columns, or name."}


@verb
def training(
    context: typer.Context,
    source: Source,
    options: TrainingOptions,
    selection: Selection,
    results: Annotated[Results, vary(without=("jsonl", "markdown"), help=_SORT_HELP)],
    machine: Machine,
    messages: Annotated[Messages, vary(without=("verbose",))],
) -> None:
    """Measure the products of layers under training recipes.

    Computes fprop, dgrad and wgrad of every captured linear layer with the operands that a training recipe quantizes,
    and compares them with the products of the unquantized operands. Sums are by recipe and product, and by step if
    the captures have several. --sort, --top and --wide add a row per layer; JSON and CSV have every product.

    \b
    Examples:
      mxcli training samples/tiny-llama --captures samples/tiny-llama-captures.safetensors
      mxcli training samples/tiny-llama --captures samples/tiny-llama-captures.safetensors --recipes nvfp4 --draws 4
      mxcli training samples/tiny-llama --captures samples/tiny-llama-captures.safetensors --html training.html
      mxcli explain training
    """
    from mxcli.numerics.streams import check_draws
    from mxcli.numerics.training import find_training

    recipes = tuple(find_training(options.recipes))
    check_draws(options.seed or 0, options.draws)
    from mxcli.output.study import study_of_training
    from mxcli.output.training import SORTS, training_csv, training_json, training_text

    results.check([source, options.captures], sorts=SORTS)
    detailed = not typed(context).isdisjoint(_OF_LAYERS)
    checkpoint, model = _trained_model(source, options.captures, selection)
    from mxcli.flows.products.trained_layers import memory_to_train
    from mxcli.flows.products.training import Trial, report_training

    backend = open_backend(machine, messages, memory_to_train(model, options.draws))
    with advancing("training", messages, sum(layer.nbytes for layer in model.layers)) as advance:

        def on_layer(layer: TrainedLayer) -> None:
            advance(layer.nbytes, layer.captured.label)

        trial = Trial(recipes, backend, options.seed or 0, options.draws)
        report = report_training(source, model, trial, on_layer=on_layer)
    messages.notes(report.notes)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: training_json(report),
        csv=lambda: training_csv(report),
        text=lambda screen: training_text(report, screen, detailed=detailed, sort=results.sort, top=results.top),
    )
    deliver_pages(results, lambda: study_of_training(report), checkpoint, context.obj)


def _trained_model(source: str, captures: str | None, selection: Selection) -> tuple[Checkpoint, TrainedModel]:
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.plan import Options, make_plan
    from mxcli.flows.products.trained_layers import trained_model
    from mxcli.flows.write.restore import open_floats
    from mxcli.numerics.scheme import Rules

    checkpoint = open_floats(source, requantize=selection.requantize)
    if captures is None and not checkpoint.captures:
        raise UsageError(
            f"training needs captured activations and gradients, and {printable(source)} has none: add "
            "--captures CAPTURES."
        )
    # Only the selection of the plan counts: training recipes have formats of their own.
    rules = selection_rules(selection.selectors)
    plan = make_plan(checkpoint, Options("mxfp8", Rules(), on_indivisible="pad", selection=rules, analysis=True))
    return checkpoint, trained_model(checkpoint, checkpoint if captures is None else open_checkpoint(captures), plan)
