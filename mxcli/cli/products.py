"""`mxcli report --products`: the products of layers instead of their tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxcli.cli.arguments import STDOUT
from mxcli.cli.forms import Forms
from mxcli.cli.machine import Machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import Talk, deliver, stdout_screen
from mxcli.errors import UsageError

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.plan.plan import Options, Plan
    from mxcli.numerics.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Products:
    """What is asked of products: where activations and gradients were captured, and their formats (None: as the
    weights)."""

    captures: str
    activation_format: str | None = None
    gradient_format: str | None = None

    def recipes(self, options: Options) -> dict[str, Scheme]:
        """The rules of activations and of gradients; the weights' scale rounding where it serves their format."""
        from mxcli.flows.plan.overrides import request_in
        from mxcli.flows.products.shapes import DY, X
        from mxcli.numerics.formats import find_format
        from mxcli.numerics.scheme import resolve

        found = {}
        for name, format in ((X, self.activation_format), (DY, self.gradient_format)):
            row = find_format(format or options.format)
            found[name] = resolve(row, request_in(options.default_request, row).rules)
        return found


def sorts_of(captures: str | None) -> Collection[str] | None:
    """What products can be sorted by; None where none are asked for."""
    if captures is None:
        return None
    from mxcli.output.products import SORTS

    return SORTS


def stated_products(
    captures: str | None,
    activation_format: str | None,
    gradient_format: str | None,
    forms: Forms,
    others: dict[str, object],
) -> Products | None:
    """What --products and the options beside it ask for; None without it. Raises UsageError for options that say
    nothing without it, or nothing of products."""
    if captures is None:
        if activation_format or gradient_format:
            raise UsageError("--activation-format and --gradient-format are of products: add --products CAPTURES.")
        return None
    meaningless = [
        flag for flag, value in {**others, "--jsonl": forms.jsonl, "--markdown": forms.markdown}.items() if value
    ]
    if meaningless:
        raise UsageError(f"{', '.join(meaningless)} with --products: products have no such form; leave it out.")
    return Products(captures, activation_format, gradient_format)


def deliver_products(
    asked: Products, source: str, checkpoint: Checkpoint, plan: Plan, where: Machine, forms: Forms, talk: Talk
) -> None:
    """Measures the products and writes them in every form that is asked for."""
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.products.report import memory_to_multiply, plan_products, report_products
    from mxcli.output.products import products_csv, products_json, products_text

    planned = plan_products(checkpoint, open_checkpoint(asked.captures), plan, asked.recipes(plan.options))
    backend = open_backend(where, talk)
    check_memory(memory_to_multiply(planned), where.max_memory, backend.name)
    done, total = 0, sum(layer.step.tensor.nbytes for layer in planned.layers)
    with progress("report", talk) as show:

        def on_layer(info: TensorInfo) -> None:
            nonlocal done
            done += info.nbytes
            show(done, total, info.name)

        result = report_products(source, planned, backend, on_layer=on_layer)
    talk.notes(result.notes)
    if forms.json is not None:
        deliver(products_json(result), forms.json)
    if forms.csv is not None:
        deliver(products_csv(result), forms.csv)
    if STDOUT not in (forms.json, forms.csv):
        deliver(products_text(result, stdout_screen(no_color=forms.no_color, wide=forms.wide), forms.sort, forms.top))
