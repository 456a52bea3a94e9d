"""`mxcli report`."""

from __future__ import annotations

from pathlib import Path

import typer

from mxcli.cli import options, recipes
from mxcli.cli.forms import (
    Forms,
    check_dry_run,
    check_forms,
    deliver_plan,
    deliver_report,
    enforce_limits,
    stated_limits,
    stream_layer,
)
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.pages import Pages, check_pages, deliver_pages, study_of
from mxcli.cli.products import deliver_products, sorts_of, stated_products
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, talk_on_stderr
from mxcli.errors import UsageError, printable
from mxcli.numerics.draws import stated_sampling


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
    products: options.ProductsOf = None,
    activation_format: options.ActivationFormat = None,
    gradient_format: options.GradientFormat = None,
    sample: options.Sample = None,
    seed: options.Seed = None,
    fail_on: options.FailOn = None,
    dry_run: options.DryRun = False,
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
    quantiles are JSON in one cell. `mxcli explain METRIC` says what a column means. --sample is for a quick look
    at what would take long: rows are chosen by --seed and the tensor's name alone.

    \b
    Examples:
      mxcli report samples/tiny-llama
      mxcli report samples/tiny-llama --format mxfp4 --scale-rounding floor --sort saturated_percent --top 5
      mxcli report samples/tiny-llama --format mxfp4 --html report.html --plots plots
      mxcli report samples/tiny-llama --format nvfp4 --sample 0.01 --json
      mxcli report samples/tiny-llama --format nvfp4 --fail-on 'sqnr_db<15 or saturated_percent>5'
      mxcli report samples/tiny-llama-captures.safetensors --format nvfp4 --include @gradient
      mxcli report samples/tiny-llama --format nvfp4 --products samples/tiny-llama-captures.safetensors --top 9
      mxcli report samples/tiny-llama --format e3m2:e8m0:1x16 --json | jq '.totals.sqnr_db'
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    check_dry_run(forms, dry_run=dry_run, limits=bool(fail_on), beside={"--per-block": per_block})
    check_forms(forms, force=force, beside=[per_block], sorts=sorts_of(products))
    pages = Pages(html, plots)
    check_pages(pages, force=force, dry_run=dry_run)
    limits = stated_limits(fail_on)
    sampling = stated_sampling(sample, seed)
    if sampling is not None and per_block is not None:
        raise UsageError("--per-block stores every block, and --sample reads some of them only: leave one of them out.")
    wanted = stated_products(
        products,
        activation_format,
        gradient_format,
        forms,
        {
            "--per-block": per_block,
            "--html": html,
            "--plots": plots,
            "--fail-on": fail_on,
            "--sample": sample,
            "--dry-run": dry_run,
        },
    )
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
    from mxcli.flows.report import LayerReport, Tally, make_report
    from mxcli.flows.restoring import open_floats
    from mxcli.flows.sampled import bytes_to_read, memory_to_sample
    from mxcli.output.measuring_plan import Effort
    from mxcli.output.plan import Site
    from mxcli.output.report_plan import PlannedReport, report_plan_json, report_plan_text

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    plan = make_plan(checkpoint, asked)
    for step in plan.steps:
        talk.detail(f"{printable(step.tensor.name)}: {step.reason}")
    blocks = per_block is not None
    need = memory_to_sample(sampling, plan) if sampling else memory_to_measure(plan, per_block=blocks)
    sizes = {step.tensor.name: bytes_to_read(sampling, (step,)) for step in plan.quantized}
    if dry_run:
        site = Site(None, None, found_device(where, talk), where.max_memory)
        check_memory(need, site.max_memory, site.device)
        tensors = [step.tensor for step in plan.quantized]
        unmeasured = Tally(source, checkpoint, plan).report()
        talk.notes(unmeasured.notes)
        effort = Effort(tensors, len(tensors), "", need, site, sum(sizes.values()))
        planned = PlannedReport(unmeasured, checkpoint, plan, effort)
        deliver_plan(
            forms, json=lambda: report_plan_json(planned), text=lambda screen: report_plan_text(planned, screen)
        )
        return
    backend = open_backend(where, talk)
    if wanted is not None:
        deliver_products(wanted, source, checkpoint, plan, backend, forms, talk)
        return
    check_memory(need, where.max_memory, backend.name)
    total, done = sum(sizes.values()), 0
    with progress("report", talk) as show:

        def on_layer(layer: LayerReport) -> None:
            nonlocal done
            done += sizes[layer.name]
            show(done, total, layer.name)
            stream_layer(layer, forms)

        arrays = None if per_block is None else Path(per_block)
        result = make_report(
            source, checkpoint, plan, backend=backend, on_layer=on_layer, per_block=arrays, sampling=sampling
        )
    talk.notes(result.notes)
    deliver_report(result, forms, verb="report")
    deliver_pages(pages, lambda: study_of(result, checkpoint, plan), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, ((printable(layer.name), layer.metrics) for layer in result.layers))
