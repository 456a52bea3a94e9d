"""`mxcli products`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.options import FORMAT_NAMES, SchemeOptions, Selection, completes
from mxcli.cli.outputs import Results, deliver_forms, deliver_pages
from mxcli.cli.progress import advancing
from mxcli.cli.recipes import report_decisions, requested_options
from mxcli.cli.terminal import Messages

if TYPE_CHECKING:
    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.plan.plan import Options
    from mxcli.flows.products.report import PlannedProducts, ProductReport
    from mxcli.numerics.scheme import Scheme


@dataclass(frozen=True, slots=True)
class ProductScheme(SchemeOptions):
    """Formats and rules, and other formats of activations and of gradients."""

    activation_format: Annotated[
        str | None,
        typer.Option(
            "--activation-format",
            metavar="FORMAT",
            rich_help_panel="Format",
            autocompletion=completes(FORMAT_NAMES),
            help="Format of X.  [default: that of the weights]",
        ),
    ] = None
    gradient_format: Annotated[
        str | None,
        typer.Option(
            "--gradient-format",
            metavar="FORMAT",
            rich_help_panel="Format",
            autocompletion=completes(FORMAT_NAMES),
            help="Format of dY.  [default: that of the weights]",
        ),
    ] = None

    def schemes(self, options: Options) -> dict[str, Scheme]:
        """Return the schemes of activations and gradients, with the weights' scale rounding if it serves their
        format."""
        from mxcli.flows.plan.overrides import request_in
        from mxcli.flows.products.shapes import DY, X
        from mxcli.numerics.formats import find_format
        from mxcli.numerics.scheme import resolve

        found = {}
        for letter, name in ((X, self.activation_format), (DY, self.gradient_format)):
            fmt = find_format(name or options.format)
            found[letter] = resolve(fmt, request_in(options.default_request, fmt).rules)
        return found


_SORT_HELP = {"sort": "Order of the table, worst first: sqnr_db, relative_error, cosine, bias or name."}


@verb
def products(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", show_default=False, help="The model, as any SOURCE of weights.")
    ],
    captures: Annotated[
        str,
        typer.Argument(
            metavar="CAPTURES",
            show_default=False,
            help="Its captured activations and gradients, a file or a directory.",
        ),
    ],
    scheme: Annotated[ProductScheme, vary(without=("layout", "axis", "fuse"), format="mxfp8_e4m3")],
    selection: Selection,
    results: Annotated[Results, vary(without=("jsonl", "markdown"), help=_SORT_HELP)],
    machine: Machine,
    messages: Messages,
) -> None:
    """Measure the products of layers with quantized operands.

    Computes Y = X W^T, dX = dY W and dW = dY^T X from the weights of the model and the captured activations X and
    gradients dY, and compares them with the products of the unquantized operands. Uses the first 1,024 tokens of each
    layer, step and rank. --sort and --top affect the table only.

    \b
    Examples:
      mxcli products samples/tiny-llama samples/tiny-llama-captures.safetensors --format nvfp4 --top 9
      mxcli products samples/tiny-llama samples/tiny-llama-captures.safetensors --gradient-format mxfp8_e5m2 --json
      mxcli products samples/tiny-llama samples/tiny-llama-captures.safetensors --html products.html
    """
    from mxcli.output.products import SORTS, products_csv, products_json, products_text
    from mxcli.output.study import study_of_products

    results.check([model, scheme.recipe, captures], sorts=SORTS)
    requested = requested_options(context, scheme)
    options = requested.options(selection.selectors, analysis=True)
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.plan import is_stochastic, make_plans
    from mxcli.flows.products.report import plan_products
    from mxcli.flows.write.restore import open_floats
    from mxcli.numerics.streams import check_seed

    checkpoint = open_floats(model, requantize=selection.requantize)
    requested.check_selectors(checkpoint)
    plan = make_plans(checkpoint, options)[0]
    check_seed(scheme.seed, is_drawn=is_stochastic([plan]))
    report_decisions([plan], messages)
    planned = plan_products(checkpoint, open_checkpoint(captures), plan, scheme.schemes(options))
    result = _measure(model, planned, machine, messages)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: products_json(result),
        csv=lambda: products_csv(result),
        text=lambda screen: products_text(result, screen, results.sort, results.top),
    )
    deliver_pages(results, lambda: study_of_products(result), checkpoint, context.obj)


def _measure(model: str, planned: PlannedProducts, machine: Machine, messages: Messages) -> ProductReport:
    from mxcli.flows.products.report import memory_to_multiply, report_products

    backend = open_backend(machine, messages, memory_to_multiply(planned))
    with advancing("products", messages, sum(layer.step.tensor.nbytes for layer in planned.layers)) as advance:

        def on_layer(info: TensorInfo) -> None:
            advance(info.nbytes, info.name)

        result = report_products(model, planned, backend, on_layer=on_layer)
    messages.notes(result.notes)
    return result
