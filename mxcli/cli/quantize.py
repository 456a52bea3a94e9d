"""`mxcli quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mxcli.cli import options, recipes, writing
from mxcli.cli.arguments import repeatable
from mxcli.cli.forms import Forms, check_dry_run, check_forms, deliver_report
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.streams import INTERRUPTED, deliver, stdout_screen, talk_on_stderr
from mxcli.cli.writing import Writing
from mxcli.errors import UsageError, printable
from mxcli.numerics.streams import check_seed

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.report import Report
    from mxcli.flows.plan.plan import Options, Plan
    from mxcli.flows.write.arrange import Arrangement
    from mxcli.flows.write.quantize import Written
    from mxcli.output.plan import Site


def quantize(
    context: typer.Context,
    source: options.Source,
    format: options.FormatOrRecipe = None,
    output: options.Output = None,
    layout: options.Layout = None,
    scale_rounding: options.ScaleRounding = None,
    rounding: options.Rounding = None,
    seed: options.Seed = None,
    hadamard: options.Hadamard = None,
    hadamard_seed: options.HadamardSeed = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    save_recipe: options.SaveRecipe = None,
    fuse: options.Fuse = None,
    captures: options.Captures = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "error",
    on_indivisible: options.OnIndivisible = "error",
    axis: options.Axis = None,
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
    max_shard_size: writing.MaxShardSize = None,
    shard_range: writing.ShardRange = None,
    resume: writing.Resume = False,
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
    `mxcli report`, and as its last line what was written. A run that was cut short, by Ctrl-C, a kill or a full
    disk, is gone on with by --resume; --shard-range divides one among machines.

    With --captures NVFP4 and fp8_e4m3 layers get stored scales of their inputs too, which fit what was captured (W4A4,
    static FP8); every such layer must be among the captures. Without, loaders quantize weights alone, and inputs of
    FP8 layers as they come.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 --dry-run
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 -o tiny-llama-mxfp8
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-mixed --exclude '*.down_proj' --top 5
      mxcli quantize samples/tiny-llama --format nvfp4 --dry-run --save-recipe tiny-llama.toml
      mxcli quantize samples/tiny-llama --recipe tiny-llama.toml -o tiny-llama-by-recipe
      mxcli quantize samples/tiny-llama --format mxfp4 -o tiny-llama-mxfp4 --resume --max-shard-size 200K
      mxcli quantize samples/tiny-llama --format nvfp4 -o w4a4 --captures samples/tiny-llama-captures.safetensors
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color)
    where = machine(device, threads, max_memory)
    how = writing.asked(force=force, resume=resume, max_shard_size=max_shard_size, shard_range=shard_range)
    check_forms(forms, force=force, sources=[source, recipe, captures], beside=[save_recipe])
    _check_output(output, dry_run=dry_run)
    check_dry_run(forms, dry_run=dry_run)
    talk = talk_on_stderr(quiet=quiet, verbose=verbose, no_color=no_color)
    wanted, content = recipes.merged_options(
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
        axis=axis,
        seed=seed,
        hadamard=hadamard,
        hadamard_seed=hadamard_seed,
    )
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.plan.plan import is_stochastic
    from mxcli.flows.write.arrange import arrange
    from mxcli.flows.write.quantize import quantize_checkpoint, report_from_stats
    from mxcli.flows.write.restore import open_floats

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    plan = _planned(checkpoint, wanted, captures)
    check_seed(seed, is_drawn=is_stochastic([plan]))
    arrangement = arrange(checkpoint, plan, max_shard_bytes=how.max_shard_bytes)
    for task in arrangement.tasks:
        talk.detail(f"{printable(task.step.tensor.name)}: {task.step.reason}")
    if output is None or dry_run:
        result = report_from_stats(source, checkpoint, plan, arrangement)
        talk.notes((*result.notes, *_share_notes(checkpoint, arrangement, how)))
        site = _site(output, found_device(where, talk), where.max_memory)
        check_memory(arrangement.need, site.max_memory, site.device)
        recipes.save_recipe(save_recipe, checkpoint, plan, f"mxcli quantize {printable(source)}")
        _deliver_plan(result, checkpoint, arrangement, site, forms, how)
        return
    backend = open_backend(where, talk)
    check_memory(arrangement.need, where.max_memory, backend.name)
    with writing.manner("quantize", how, talk) as manner:
        written = quantize_checkpoint(
            checkpoint,
            plan,
            output,
            backend=backend,
            max_shard_bytes=how.max_shard_bytes,
            manner=manner,
            command=repeatable(context.obj or ()),
        )
    result = report_from_stats(source, checkpoint, plan, written.arrangement, written.layers)
    talk.notes((*result.notes, *writing.resumed_notes(written.outcome)))
    if not written.outcome.complete:
        deliver_report(result, forms, verb="quantize")
        writing.tell_unfinished(written.outcome, output)
        raise typer.Exit(INTERRUPTED)
    recipes.save_recipe(save_recipe, checkpoint, plan, f"mxcli quantize {printable(source)}")
    ending, record = _written(result, checkpoint, written, how)
    deliver_report(result, forms, verb="quantize", ending=ending, **record)


def _planned(checkpoint: Checkpoint, wanted: Options, captures: str | None) -> Plan:
    from mxcli.flows.plan.plan import make_plan

    plan = make_plan(checkpoint, wanted)
    if captures is None:
        return plan
    from mxcli.backends.cpu import Cpu
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.write.input_scales import with_input_scales

    return with_input_scales(checkpoint, plan, open_checkpoint(captures), backend=Cpu())


def _share_notes(checkpoint: Checkpoint, arrangement: Arrangement, how: Writing) -> list[str]:
    """What of a plan, which is always of the whole output, a share would write."""
    if how.share is None:
        return []
    from mxcli.flows.write.quantize import share_of

    names = [shard.name for shard in share_of(checkpoint, arrangement, how.share).shards]
    return [f"Share {how.share} would write {', '.join(names) or 'no file: there are fewer files than shares'}."]


def _written(result: Report, checkpoint: Checkpoint, written: Written, how: Writing) -> tuple[str, dict[str, object]]:
    """What was written, in a line and for JSON."""
    from mxcli.output.plan import share_line, share_record, written_line, written_record

    arrangement, folder = written.arrangement, str(written.folder)
    if how.share is not None:
        return share_line(arrangement, folder, how.share), share_record(arrangement, folder, how.share)
    return written_line(result, checkpoint, arrangement, folder), written_record(checkpoint, arrangement, folder)


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
    how: Writing,
) -> None:
    """The plan, after whatever would refuse the output has had its say."""
    from mxcli.files.partials import check_place
    from mxcli.files.progress import progress_path, read_progress, refuse_unfinished
    from mxcli.output.plan import output_files, plan_json, plan_text

    if site.folder is not None:
        names = output_files(checkpoint, arrangement)
        folder = Path(site.folder)
        check_place(folder, checkpoint, names, force=how.force, resume=how.resume)
        if not (how.force or how.resume):
            refuse_unfinished(folder, how.share, read_progress(progress_path(folder, how.share)))
    if forms.json is not None:
        deliver(plan_json(result, checkpoint, arrangement, site), forms.json)
    if not forms.takes_stdout:
        screen = stdout_screen(no_color=forms.no_color, wide=forms.wide)
        deliver(plan_text(result, checkpoint, arrangement, site, screen))
