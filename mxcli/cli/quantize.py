"""`mxcli quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mxcli.cli import options, recipes
from mxcli.cli.arguments import repeatable
from mxcli.cli.forms import Forms, check_dry_run, check_forms, deliver_report
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import deliver, stdout_screen, talk_on_stderr
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.arrange import Arrangement
    from mxcli.flows.report import Report
    from mxcli.output.plan import Site


def quantize(
    context: typer.Context,
    source: options.Source,
    format: options.FormatOrRecipe = None,
    output: options.Output = None,
    layout: options.Layout = None,
    scale_rounding: options.ScaleRounding = None,
    rounding: options.Rounding = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    save_recipe: options.SaveRecipe = None,
    fuse: options.Fuse = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "error",
    on_indivisible: options.OnIndivisible = "error",
    dry_run: options.DryRun = False,
    sort: options.Sort = "sqnr_db",
    top: options.Top = None,
    wide: options.Wide = False,
    json: options.Json = None,
    jsonl: options.Jsonl = None,
    csv: options.Csv = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Write a quantized checkpoint, and report what it cost.

    Linear layers are quantized; norms, embeddings, routers, biases and the output head are kept and listed as
    ignored, unless selected. Everything that stands in the way is named before the first byte is written, and
    the output appears whole or not at all; the source is never touched. stdout carries the same report as
    `mxcli report`, and as its last line what was written.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 --dry-run
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 -o tiny-llama-mxfp8
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-mixed --exclude '*.down_proj' --top 5
      mxcli quantize samples/tiny-llama --format nvfp4 --dry-run --save-recipe tiny-llama.toml
      mxcli quantize samples/tiny-llama --recipe tiny-llama.toml -o tiny-llama-by-recipe
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color)
    where = machine(device, threads, max_memory)
    check_forms(forms, force=force, beside=[save_recipe])
    _check_output(output, dry_run=dry_run)
    check_dry_run(forms, dry_run=dry_run)
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
        layout=layout,
        fuse=fuse,
    )
    from mxcli.flows.arrange import arrange
    from mxcli.flows.memory import check_memory
    from mxcli.flows.plan import make_plan
    from mxcli.flows.quantize import quantize_checkpoint
    from mxcli.flows.report import report_of
    from mxcli.flows.restoring import open_floats
    from mxcli.output.plan import written_line, written_record

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    plan = make_plan(checkpoint, asked)
    arrangement = arrange(checkpoint, plan)
    for task in arrangement.tasks:
        talk.detail(f"{printable(task.step.tensor.name)}: {task.step.reason}")
    if output is None or dry_run:
        result = report_of(source, checkpoint, plan, arrangement)
        talk.notes(result.notes)
        site = _site(output, found_device(where, talk), where.max_memory)
        check_memory(arrangement.need, site.max_memory, site.device)
        recipes.save_recipe(save_recipe, checkpoint, plan, f"mxcli quantize {printable(source)}")
        _deliver_plan(result, checkpoint, arrangement, site, forms, force=force)
        return
    backend = open_backend(where, talk)
    check_memory(arrangement.need, where.max_memory, backend.name)
    with progress("quantize", talk) as show:
        written = quantize_checkpoint(
            checkpoint,
            plan,
            output,
            backend=backend,
            force=force,
            on_progress=show,
            command=repeatable(context.obj or ()),
        )
    recipes.save_recipe(save_recipe, checkpoint, plan, f"mxcli quantize {printable(source)}")
    result = report_of(source, checkpoint, plan, arrangement, written.layers)
    talk.notes(result.notes)
    ending = written_line(result, checkpoint, arrangement, output)
    record = written_record(checkpoint, arrangement, output)
    deliver_report(result, forms, verb="quantize", ending=ending, **record)


def _site(output: str | None, device: str, max_memory: int | None) -> Site:
    from mxcli.flows.doctor import free_bytes
    from mxcli.output.plan import Site

    return Site(output, None if output is None else free_bytes(Path(output)), device, max_memory)


def _check_output(output: str | None, *, dry_run: bool) -> None:
    if output is None and not dry_run:
        raise UsageError("missing option '-o/--output DIR': name the directory to write, or use --dry-run.")


def _deliver_plan(
    result: Report,
    checkpoint: Checkpoint,
    arrangement: Arrangement,
    site: Site,
    forms: Forms,
    *,
    force: bool,
) -> None:
    """The plan, after whatever would refuse the output has had its say."""
    from mxcli.files.writer_place import check_place
    from mxcli.output.plan import output_files, plan_json, plan_text

    if site.folder is not None:
        check_place(Path(site.folder), checkpoint, output_files(checkpoint, arrangement), force=force)
    if forms.json is not None:
        deliver(plan_json(result, checkpoint, arrangement, site), forms.json)
    if not forms.takes_stdout:
        screen = stdout_screen(no_color=forms.no_color, wide=forms.wide)
        deliver(plan_text(result, checkpoint, arrangement, site, screen))
