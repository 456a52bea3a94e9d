"""`mxcli report`."""

from __future__ import annotations

from pathlib import Path

import typer

from mxcli.cli import options, recipes
from mxcli.cli.forms import Forms, check_forms, deliver_report, enforce_limits, stated_limits, stream_layer
from mxcli.cli.machine import machine, open_backend
from mxcli.cli.pages import Pages, check_pages, deliver_pages, study_of
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, talk_on_stderr
from mxcli.errors import printable


def report(
    context: typer.Context,
    source: options.Source,
    format: options.Format = "mxfp8_e4m3",
    scale_rounding: options.ScaleRounding = None,
    rounding: options.Rounding = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "saturate",
    on_indivisible: options.OnIndivisible = "pad",
    sort: options.Sort = "sqnr_db",
    top: options.Top = None,
    wide: options.Wide = False,
    json: options.Json = None,
    jsonl: options.Jsonl = None,
    csv: options.Csv = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    plots: options.Plots = None,
    per_block: options.PerBlock = None,
    fail_on: options.FailOn = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Measure what a format costs, tensor by tensor.

    Nothing is written but the files asked for. Weights, captured activations and gradients are measured;
    layers that loaders fuse (q, k, v; gate, up) share their NVFP4 tensor scale. --sort and --top order and
    shorten the table only: JSON and CSV hold every tensor, in the order of the source. In CSV, histograms and
    quantiles are JSON in one cell. `mxcli explain METRIC` says what a column means.

    \b
    Examples:
      mxcli report samples/tiny-llama
      mxcli report samples/tiny-llama --format mxfp4 --scale-rounding floor --sort saturated_percent --top 5
      mxcli report samples/tiny-llama --format mxfp4 --html report.html --plots plots
      mxcli report samples/tiny-llama --format nvfp4 --fail-on 'sqnr_db<15 or saturated_percent>5'
      mxcli report samples/tiny-llama-captures.safetensors --format nvfp4 --include @gradient
      mxcli report samples/tiny-llama --format e3m2:e8m0:1x16 --json | jq '.totals.sqnr_db'
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    check_forms(forms, force=force, beside=[per_block])
    pages = Pages(html, plots)
    check_pages(pages, force=force)
    limits = stated_limits(fail_on)
    talk = talk_on_stderr(quiet=quiet, verbose=verbose, no_color=no_color)
    asked, content = recipes.merged_options(
        context,
        recipe,
        selectors,
        format=format,
        scale_rounding=scale_rounding,
        rounding=rounding,
        dialect=dialect,
        nonfinite=nonfinite,
        on_indivisible=on_indivisible,
        analysis=True,
    )
    from mxcli.flows.measuring import memory_to_measure
    from mxcli.flows.memory import check_memory
    from mxcli.flows.plan import make_plan
    from mxcli.flows.report import LayerReport, make_report
    from mxcli.flows.restoring import open_floats

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    plan = make_plan(checkpoint, asked)
    for step in plan.steps:
        talk.detail(f"{printable(step.tensor.name)}: {step.reason}")
    backend = open_backend(where, talk)
    check_memory(memory_to_measure(plan, per_block=per_block is not None), where.max_memory, backend.name)
    sizes = {step.tensor.name: step.tensor.nbytes for step in plan.quantized}
    total, done = sum(sizes.values()), 0
    with progress("report", talk) as show:

        def on_layer(layer: LayerReport) -> None:
            nonlocal done
            done += sizes[layer.name]
            show(done, total, layer.name)
            stream_layer(layer, forms)

        arrays = None if per_block is None else Path(per_block)
        result = make_report(source, checkpoint, plan, backend=backend, on_layer=on_layer, per_block=arrays)
    talk.notes(result.notes)
    deliver_report(result, forms, verb="report")
    deliver_pages(pages, lambda: study_of(result, checkpoint, plan), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, ((printable(layer.name), layer.metrics) for layer in result.layers), talk)
