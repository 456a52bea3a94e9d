"""`mxcli report`."""

from __future__ import annotations

from pathlib import Path

import typer

from mxcli.cli import options, recipes
from mxcli.cli.forms import (
    Forms,
    Pages,
    check_dry_run,
    check_forms,
    check_pages,
    deliver_pages,
    deliver_plan,
    deliver_report,
    enforce_limits,
    stated_limits,
    stream_layer,
    study_of,
)
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.products import deliver_products, sorts_of, stated_products
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, talk_on_stderr
from mxcli.cli.training import Draws, Training, TrainingOf, deliver_training, stated_training
from mxcli.errors import UsageError, printable
from mxcli.numerics.streams import check_seed, stated_sampling


def report(
    context: typer.Context,
    source: options.Source,
    format: options.Format = "mxfp8_e4m3",
    scale_rounding: options.ScaleRounding = None,
    rounding: options.Rounding = None,
    hadamard: options.Hadamard = None,
    hadamard_seed: options.HadamardSeed = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "saturate",
    on_indivisible: options.OnIndivisible = "pad",
    axis: options.Axis = None,
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
    training: TrainingOf = None,
    draws: Draws = None,
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
    layers that loaders fuse (q, k, v; gate, up) share their NVFP4 tensor scale. With --axis both every tensor is
    measured along rows and along columns; captures of several steps are told step by step. --sort and --top order and
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
      mxcli report samples/tiny-llama-captures.safetensors --format nvfp4 --axis both --top 6
      mxcli report samples/tiny-llama --format nvfp4 --products samples/tiny-llama-captures.safetensors --top 9
      mxcli report samples/tiny-llama --training all --products samples/tiny-llama-captures.safetensors
      mxcli report samples/tiny-llama --format e3m2:e8m0:1x16 --json | jq '.totals.sqnr_db'
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    trained = stated_training(context, Training(training, source, selectors, requantize, products, seed, draws))
    if trained is not None:
        talk = talk_on_stderr(quiet=quiet, verbose=verbose, no_color=no_color)
        deliver_training(trained, where, forms, talk, force=force)
        return
    check_dry_run(forms, dry_run=dry_run, limits=bool(fail_on), beside={"--per-block": per_block})
    read = [source, recipe, products]
    check_forms(forms, force=force, sources=read, beside=[per_block], sorts=sorts_of(products))
    pages = Pages(html, plots)
    check_pages(pages, force=force, sources=read, dry_run=dry_run)
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
            "--axis": axis,
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
        axis=axis,
        seed=seed,
        hadamard=hadamard,
        hadamard_seed=hadamard_seed,
        analysis=True,
    )
    from mxcli.flows.measure.measure import measured_tensors, memory_to_measure
    from mxcli.flows.measure.report import LayerReport, Tally, make_report, planned_layers
    from mxcli.flows.measure.sampled import bytes_to_read, memory_to_sample
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.plan.plan import is_stochastic, make_plans
    from mxcli.flows.write.restore import open_floats
    from mxcli.output.measuring_plan import Effort
    from mxcli.output.plan import Site
    from mxcli.output.report_plan import PlannedReport, report_plan_json, report_plan_text

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    plans = make_plans(checkpoint, asked)
    check_seed(seed, is_drawn=sampling is not None or is_stochastic(plans))
    for decided in planned_layers(*plans):
        talk.detail(f"{printable(decided.name)}: {decided.reason}")
    blocks = per_block is not None
    need = memory_to_sample(sampling, *plans) if sampling else memory_to_measure(*plans, per_block=blocks)
    sizes = {steps[0].tensor.name: bytes_to_read(sampling, steps) for steps in measured_tensors(plans)}
    if dry_run:
        site = Site(None, None, found_device(where, talk), where.max_memory)
        check_memory(need, site.max_memory, site.device)
        tensors = [steps[0].tensor for steps in measured_tensors(plans)]
        unmeasured = Tally(source, checkpoint, *plans).report()
        talk.notes(unmeasured.notes)
        ways = "both axes" if len(plans) > 1 else ""
        effort = Effort(tensors, unmeasured.unfinished, ways, need, site, sum(sizes.values()))
        planned = PlannedReport(unmeasured, checkpoint, plans, effort)
        deliver_plan(
            forms, json=lambda: report_plan_json(planned), text=lambda screen: report_plan_text(planned, screen)
        )
        return
    if wanted is not None:
        deliver_products(wanted, source, checkpoint, plans[0], where, forms, talk)
        return
    backend = open_backend(where, talk)
    check_memory(need, where.max_memory, backend.name)
    total, done = sum(sizes.values()), 0
    with progress("report", talk) as show:

        def on_layer(layer: LayerReport) -> None:
            nonlocal done
            done += sizes.pop(layer.name, 0)
            show(done, total, layer.name)
            stream_layer(layer, forms)

        arrays = None if per_block is None else Path(per_block)
        result = make_report(
            source, checkpoint, *plans, backend=backend, on_layer=on_layer, per_block=arrays, sampling=sampling
        )
    talk.notes(result.notes)
    deliver_report(result, forms, verb="report")
    deliver_pages(pages, lambda: study_of(result, checkpoint, plans), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    along = bool(result.by_axis)
    enforce_limits(
        limits,
        (
            (printable(layer.name) + (f" along {layer.axis}s" if along else ""), layer.metrics)
            for layer in result.layers
        ),
    )
