"""`mxcli report`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxcli.cli.deprecated import DeprecatedOptions, ran_as_other_verb
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend, planned_site
from mxcli.cli.options import SchemeOptions, Selection, Source
from mxcli.cli.outputs import (
    Results,
    deliver_forms,
    deliver_pages,
    deliver_report,
    enforce_limits,
    stated_limits,
    stream_layer,
)
from mxcli.cli.progress import advancing
from mxcli.cli.recipes import report_decisions, requested_options
from mxcli.cli.terminal import INTERRUPTED, Messages
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.limits import Metrics
    from mxcli.flows.measure.report import LayerReport, Report
    from mxcli.flows.plan.memory import Need
    from mxcli.flows.plan.plan import Plan
    from mxcli.numerics.streams import Sampling
    from mxcli.output.study import Study


@dataclass(frozen=True, slots=True)
class ReportOptions(DeprecatedOptions):
    """The extent of a report, arrays per block, and former options."""

    per_block: Annotated[
        str | None,
        typer.Option(
            "--per-block",
            metavar="FILE.safetensors",
            help="Also store arrays with a value per block: NAME.amax, .decode (the scale), .saturated, .underflowed "
            "and .noise; with --axis both NAME.row.amax, NAME.column.amax and so on.",
        ),
    ] = None


_SEED_HELP = {"seed": "Seed of stochastic rounding and of --sample.  [default: 0]"}


@verb
def report(
    context: typer.Context,
    source: Source,
    scheme: Annotated[SchemeOptions, vary(without=("layout", "fuse"), format="mxfp8_e4m3", help=_SEED_HELP)],
    selection: Selection,
    measuring: ReportOptions,
    results: Results,
    machine: Machine,
    messages: Messages,
) -> None:
    """Report the error of a format, tensor by tensor.

    Measures weights, captured activations and gradients. Layers that loaders fuse (q, k, v; gate, up) share their
    NVFP4 tensor scale. --axis both measures every tensor along rows and along columns; captures with several steps
    are reported per step. --sort and --top affect the table only: JSON and CSV have every tensor in source order. In
    CSV, histograms and quantiles are JSON in one cell. --sample estimates from a fraction of the rows, drawn by
    --seed and the tensor's name. `mxcli explain METRIC` explains a column.

    \b
    Examples:
      mxcli report samples/tiny-llama
      mxcli report samples/tiny-llama --format mxfp4 --scale-rounding floor --sort saturated_percent --top 5
      mxcli report samples/tiny-llama --format mxfp4 --html report.html --plots plots
      mxcli report samples/tiny-llama --format nvfp4 --sample 0.01 --json
      mxcli report samples/tiny-llama --format nvfp4 --fail-on 'sqnr_db<15 or saturated_percent>5'
      mxcli report samples/tiny-llama-captures.safetensors --format nvfp4 --include @gradient
      mxcli report samples/tiny-llama-captures.safetensors --format nvfp4 --axis both --top 6
      mxcli report samples/tiny-llama --format e3m2:e8m0:1x16 --json | jq '.totals.sqnr_db'
    """
    if ran_as_other_verb(context, source, scheme, selection, measuring, (results, machine, messages)):
        return
    results.check_dry_run(measuring.dry_run, {"--per-block": measuring.per_block})
    results.check([source, scheme.recipe], whole=[measuring.per_block])
    limits = stated_limits(measuring.fail_on, dry_run=measuring.dry_run)
    sampling = _sampling(measuring, scheme.seed)
    requested = requested_options(context, scheme)
    options = requested.options(selection.selectors, analysis=True)
    from mxcli.flows.plan.plan import is_stochastic, make_plans
    from mxcli.flows.write.restore import open_floats
    from mxcli.numerics.streams import check_seed

    checkpoint = open_floats(source, requantize=selection.requantize)
    requested.check_selectors(checkpoint)
    plans = make_plans(checkpoint, options)
    check_seed(scheme.seed, is_drawn=sampling is not None or is_stochastic(plans))
    report_decisions(plans, messages)
    work = _Work(source, checkpoint, plans, sampling, measuring.per_block)
    if measuring.dry_run:
        _deliver_plan(work, results, machine, messages)
        return
    result = _measure(work, results, machine, messages)
    deliver_report(result, results, messages.stdout(wide=results.wide), verb="report")
    deliver_pages(results, lambda: _study(result, work), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, _measured(result))


@dataclass(frozen=True, slots=True)
class _Work:
    """The tensors to measure, by plan, and how much of them."""

    source: str
    checkpoint: Checkpoint
    plans: tuple[Plan, ...]
    sampling: Sampling | None
    per_block: str | None

    @property
    def need(self) -> Need:
        from mxcli.flows.measure.measure import memory_to_measure
        from mxcli.flows.measure.sampled import memory_to_sample

        if self.sampling:
            return memory_to_sample(self.sampling, *self.plans)
        return memory_to_measure(*self.plans, per_block=self.per_block is not None)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes to read by tensor."""
        from mxcli.flows.measure.measure import measured_tensors
        from mxcli.flows.measure.sampled import bytes_to_read

        return {
            planned[0].tensor.name: bytes_to_read(self.sampling, planned) for planned in measured_tensors(self.plans)
        }


def _sampling(measuring: ReportOptions, seed: int | None) -> Sampling | None:
    from mxcli.numerics.streams import stated_sampling

    sampling = stated_sampling(measuring.sample, seed)
    if sampling is not None and measuring.per_block is not None:
        raise UsageError("--per-block stores every block, but --sample reads only some: leave one of them out.")
    return sampling


def _deliver_plan(work: _Work, results: Results, machine: Machine, messages: Messages) -> None:
    from mxcli.flows.measure.measure import measured_tensors
    from mxcli.flows.measure.report import Tally
    from mxcli.output.plans import Effort, PlannedReport, report_plan_json, report_plan_text

    site = planned_site(machine, messages, work.need)
    tensors = [planned[0].tensor for planned in measured_tensors(work.plans)]
    unmeasured = Tally(work.source, work.checkpoint, *work.plans).report()
    messages.notes(unmeasured.notes)
    axes = "both axes" if len(work.plans) > 1 else ""
    effort = Effort(tensors, unmeasured.unfinished, axes, work.need, site, sum(work.sizes.values()))
    planned = PlannedReport(unmeasured, work.checkpoint, work.plans, effort)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: report_plan_json(planned),
        text=lambda screen: report_plan_text(planned, screen),
    )


def _measure(work: _Work, results: Results, machine: Machine, messages: Messages) -> Report:
    from mxcli.flows.measure.report import make_report

    backend = open_backend(machine, messages, work.need)
    sizes = work.sizes
    with advancing("report", messages, sum(sizes.values())) as advance:

        def on_layer(layer: LayerReport) -> None:
            advance(sizes.pop(layer.name, 0), layer.name)
            stream_layer(layer, results)

        result = make_report(
            work.source,
            work.checkpoint,
            *work.plans,
            backend=backend,
            on_layer=on_layer,
            per_block=None if work.per_block is None else Path(work.per_block),
            sampling=work.sampling,
        )
    messages.notes(result.notes)
    return result


def _study(result: Report, work: _Work) -> Study:
    """Return a report with its worst blocks, which are read again."""
    from mxcli.flows.measure.worst_blocks import worst_blocks
    from mxcli.output.study import study_of_report

    return study_of_report(result, worst_blocks(work.checkpoint, work.plans, result.layers))


def _measured(result: Report) -> Iterator[tuple[str, Metrics]]:
    """Yield the name and the metrics of each measurement."""
    for layer in result.layers:
        yield printable(layer.name) + (f" along {layer.axis}s" if result.by_axis else ""), layer.metrics
