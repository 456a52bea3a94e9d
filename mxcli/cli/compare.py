"""`mxcli compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from mxcli.cli import options, recipes
from mxcli.cli.arguments import STDOUT, listed
from mxcli.cli.forms import (
    Forms,
    Pages,
    check_dry_run,
    check_forms,
    check_pages,
    deliver_forms,
    deliver_pages,
    deliver_plan,
    enforce_limits,
    stated_limits,
    study_of_compared,
)
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import INTERRUPTED, deliver, talk_on_stderr
from mxcli.errors import UsageError, printable
from mxcli.numerics.blocks import axes_of
from mxcli.numerics.streams import check_seed, stated_sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mxcli.flows.measure.compare import Compared, Comparison, Metrics


def compare(
    context: typer.Context,
    source: options.Source,
    formats: options.Formats,
    scale_roundings: options.ScaleRoundings = None,
    roundings: options.Roundings = None,
    hadamards: options.Hadamards = None,
    hadamard_seed: options.HadamardSeed = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "saturate",
    on_indivisible: options.OnIndivisible = "pad",
    axis: options.Axis = None,
    by: options.By = "role",
    sort: options.Sort = "sqnr_db",
    top: options.Top = None,
    wide: options.Wide = False,
    json: options.Json = None,
    jsonl: options.Jsonl = None,
    csv: options.Csv = None,
    markdown: options.Markdown = None,
    html: options.Html = None,
    plots: options.Plots = None,
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
    """Measure several formats and rules side by side.

    Every format is combined with every scale rule that serves it, every rounding and every transform, along every
    axis; the first combination is what the others are held against. Each tensor is read once. The best SQNR of a
    tensor is marked; of several as good to within 0.01 dB the one with the fewest bits, then the one named first.
    Totals add up the tensors' statistics, and a few sentences say what follows from them; those of roundings,
    transforms and axes have bias, binades and block ranges too. JSON has the metrics that are one number, by
    combination; CSV has a row per tensor and combination. With --sample all combinations measure the same rows, so
    that their differences are surer than the uncertainty of each.

    \b
    Examples:
      mxcli compare samples/tiny-llama --formats mxfp8
      mxcli compare samples/tiny-llama --formats mxfp4 --scale-roundings floor,rceil --by kind --top 5
      mxcli compare samples/tiny-llama --formats mxfp8,mxfp6,mxfp4,nvfp4 --top 0
      mxcli compare samples/tiny-llama --formats mxfp4,nvfp4 --sample 0.01 --seed 1
      mxcli compare samples/tiny-llama-captures.safetensors --formats mxfp4,nvfp4 --include @gradient
      mxcli compare samples/tiny-llama-captures.safetensors --formats nvfp4 --axis both --top 0
      mxcli compare samples/tiny-llama-captures.safetensors --formats nvfp4 --hadamards none,16 --include @gradient
      mxcli compare samples/tiny-llama-captures.safetensors --formats nvfp4 --roundings nearest-even,stochastic
      mxcli compare samples/tiny-llama --formats nvfp4 --scale-roundings te,ct --json | jq -r '.conclusion[]'
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    pages = Pages(html, plots)
    check_dry_run(forms, dry_run=dry_run, limits=bool(fail_on))
    check_forms(forms, force=force, sources=[source, recipe])
    check_pages(pages, force=force, sources=[source, recipe], dry_run=dry_run)
    limits = stated_limits(fail_on)
    sampling = stated_sampling(sample, seed)
    talk = talk_on_stderr(quiet=quiet, verbose=verbose, no_color=no_color)
    if hadamard_seed is not None and hadamards is None:
        raise UsageError(f"--hadamard-seed {hadamard_seed} chooses the signs of a transform: add --hadamards none,16.")
    from mxcli.numerics.combinations import combine

    names = listed(formats, "--formats")
    rules, content = recipes.rules_for_formats(
        context, recipe, dialect=dialect, nonfinite=nonfinite, on_indivisible=on_indivisible, axis=axis, seed=seed
    )
    usual = rules.get("hadamard") if hadamards is None else None
    combinations = combine(
        names,
        listed(scale_roundings or rules.get("scale_rounding"), "--scale-roundings"),
        listed(roundings or rules.get("rounding"), "--roundings"),
        listed(hadamards, "--hadamards") if usual is None else [str(usual)],
        axes=axes_of(rules["axis"]),
        dialect=rules["dialect"],
        nonfinite=rules["nonfinite"],
        seed=rules["seed"] or 0,
        hadamard_seed=hadamard_seed if usual is None else rules.get("hadamard_seed"),
    )
    check_seed(seed, is_drawn=sampling is not None or any(recipe.rounding.is_random for recipe in combinations.schemes))
    asked = recipes.options_for_formats(names[0], rules, content, selectors, analysis=True)
    from mxcli.flows.measure.totals import check_grouping

    check_grouping(by)
    from mxcli.flows.measure.compare import make_comparison, plan_comparison
    from mxcli.flows.measure.measure import memory_to_measure
    from mxcli.flows.measure.sampled import bytes_to_read, memory_to_sample
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.write.restore import open_floats
    from mxcli.output.comparison import compared_line, comparison_csv, comparison_json, comparison_text
    from mxcli.output.comparison_plan import PlannedComparison, comparison_plan_json, comparison_plan_text
    from mxcli.output.plan import Site

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    planned = plan_comparison(checkpoint, combinations, asked)
    for layer in planned.decided:
        talk.detail(f"{printable(layer.name)}: {layer.reason}")
    need = memory_to_sample(sampling, *planned.plans) if sampling else memory_to_measure(*planned.plans)
    sizes = {steps[0].tensor.name: bytes_to_read(sampling, steps) for steps in planned.compared}
    if dry_run:
        talk.notes([*checkpoint.notes, *planned.notes])
        site = Site(None, None, found_device(where, talk), where.max_memory)
        check_memory(need, site.max_memory, site.device)
        plan = PlannedComparison(source, checkpoint, planned, need, site, sum(sizes.values()))
        deliver_plan(
            forms, json=lambda: comparison_plan_json(plan), text=lambda screen: comparison_plan_text(plan, screen)
        )
        return
    backend = open_backend(where, talk)
    check_memory(need, where.max_memory, backend.name)
    total, done = sum(sizes.values()), 0
    with progress("compare", talk) as show:

        def on_layer(layer: Compared) -> None:
            nonlocal done
            done += sizes[layer.name]
            show(done, total, layer.name)
            if forms.jsonl == STDOUT:
                deliver(compared_line(layer, combinations))

        result = make_comparison(
            source, checkpoint, planned, backend=backend, by=by, on_layer=on_layer, sampling=sampling
        )
    talk.notes(result.notes)
    deliver_forms(
        forms,
        json=lambda: comparison_json(result),
        csv=lambda: comparison_csv(result),
        lines=lambda streamed: (
            compared_line(layer, combinations)
            for layer in (result.kept if streamed else (*result.layers, *result.kept))
        ),
        text=lambda screen: comparison_text(result, screen, sort, top),
    )
    deliver_pages(pages, lambda: study_of_compared(result, checkpoint, planned), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, _measured(result))


def _measured(result: Comparison) -> Iterator[tuple[str, Metrics]]:
    for layer in result.layers:
        for name, metrics in zip(result.combinations.names, layer.metrics, strict=True):
            yield f"{printable(layer.name)} under {name}", metrics
