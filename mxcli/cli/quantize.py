"""`mxcli quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import STDOUT, repeatable
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, found_device, open_backend
from mxcli.cli.options import (
    Captures,
    SaveRecipe,
    SchemeOptions,
    Selection,
    Source,
)
from mxcli.cli.outputs import Results, deliver_forms, deliver_report
from mxcli.cli.recipes import requested_options, save_recipe
from mxcli.cli.terminal import INTERRUPTED, Messages
from mxcli.cli.writing import WritingFor, check_output, outcome_notes, report_unfinished, write_options
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.report import Report
    from mxcli.flows.plan.plan import Options, Plan
    from mxcli.flows.write.arrange import Arrangement
    from mxcli.flows.write.quantize import Written
    from mxcli.output.site import Site


@dataclass(frozen=True, slots=True)
class QuantizeOptions(WritingFor):
    """The output to write, the inputs that its scales are for, and the recipe to save."""

    heading: ClassVar[str] = "Writing"
    save_recipe: SaveRecipe = None
    captures: Captures = None


_CAPTURES_HELP = {
    "captures": "Captured inputs of the layers: NVFP4 and fp8_e4m3 layers get stored input scales (W4A4, static FP8)."
}


@verb
def quantize(
    context: typer.Context,
    source: Source,
    scheme: Annotated[SchemeOptions, vary(nonfinite="error", on_indivisible="error")],
    selection: Selection,
    writing: Annotated[QuantizeOptions, vary(help=_CAPTURES_HELP)],
    results: Annotated[Results, vary(without=("markdown", "html", "plots"))],
    machine: Machine,
    messages: Messages,
) -> None:
    """Write a quantized checkpoint, and report its error.

    Quantizes linear layers; norms, embeddings, routers, biases and the output head are kept and listed as ignored,
    unless selected. Every obstacle is reported before the first byte is written; the output appears whole or not at
    all, and the source is never changed. stdout has the table of `mxcli report`, and the output on its last line.
    --resume continues an interrupted run; --shard-range divides the work among machines.

    With --captures every NVFP4 and fp8_e4m3 layer must be among the captures. Without, loaders quantize weights only,
    and inputs of FP8 layers at run time.

    \b
    Examples:
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 --dry-run
      mxcli quantize samples/tiny-llama --format mxfp8_e4m3 -o tiny-llama-mxfp8
      mxcli quantize samples/tiny-llama --format nvfp4 -o tiny-llama-mixed --exclude '*.down_proj' --top 5
      mxcli quantize samples/tiny-llama --format nvfp4 --dry-run --save-recipe tiny-llama.toml
      mxcli quantize samples/tiny-llama --recipe tiny-llama.toml -o tiny-llama-by-recipe
      mxcli quantize samples/tiny-llama --format mxfp4 -o tiny-llama-mxfp4 --resume --max-shard-size 200K
      mxcli quantize samples/tiny-llama --format nvfp4 -o w4a4 --captures samples/tiny-llama-captures.safetensors
      mxcli quantize samples/tiny-llama --format mxfp8 --for vllm,transformers --tp 2 --dry-run
    """
    results.check([source, scheme.recipe, writing.captures], also=[writing.save_recipe])
    if writing.output is None and not writing.dry_run:
        raise UsageError("missing option '-o/--output DIR': name the directory to write, or use --dry-run.")
    results.check_dry_run(writing.dry_run)
    engines, requested = writing.named, requested_options(context, scheme)
    options = requested.options(selection.selectors)
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.plan.plan import is_stochastic
    from mxcli.flows.write.restore import open_floats
    from mxcli.numerics.streams import check_seed

    checkpoint = open_floats(source, requantize=selection.requantize)
    requested.check_selectors(checkpoint)
    captured = None if writing.captures is None else open_checkpoint(writing.captures)
    plan = _plan(checkpoint, options, captured, messages)
    check_seed(scheme.seed, is_drawn=is_stochastic([plan]))
    if engines and options.layout is None:
        plan = _plan(checkpoint, _in_layout_for(checkpoint, plan, engines), captured, messages)
    arrangement = _arranged(checkpoint, plan, writing)
    for task in arrangement.tasks:
        messages.detail(f"{printable(task.planned.tensor.name)}: {task.planned.reason}")
    inputs = (*([Path(scheme.recipe)] if scheme.recipe else ()), *(captured.files if captured else ()))
    work = _Work(source, checkpoint, plan, arrangement, writing, inputs)
    if writing.dry_run:
        _deliver_plan(work, results, machine, messages)
        return
    written = _write(work, results, machine, messages, repeatable(context.obj or ()))
    _deliver(work, written, results, messages)


def _plan(checkpoint: Checkpoint, options: Options, captured: Checkpoint | None, messages: Messages) -> Plan:
    from mxcli.flows.plan.plan import make_plan

    plan = make_plan(checkpoint, options)
    if captured is None:
        return plan
    from mxcli.backends.cpu import Cpu
    from mxcli.files.captures import incomplete_notes
    from mxcli.flows.write.input_scales import with_input_scales

    messages.notes(incomplete_notes(captured.root))
    return with_input_scales(checkpoint, plan, captured, backend=Cpu())


def _arranged(checkpoint: Checkpoint, plan: Plan, writing: QuantizeOptions) -> Arrangement:
    from mxcli.flows.verify.incomplete import refuse_incomplete
    from mxcli.flows.write.arrange import arrange

    if not writing.no_verify:
        refuse_incomplete(checkpoint)
    size, devices = writing.max_shard_bytes, writing.tensor_parallel
    return arrange(checkpoint, plan, max_shard_bytes=size, engines=writing.named, devices=devices)


def _in_layout_for(checkpoint: Checkpoint, plan: Plan, engines: Sequence[str]) -> Options:
    """Return the options of a plan with the layout that all engines load."""
    from mxcli.flows.write.layout_choice import layout_for

    return replace(plan.options, layout=layout_for(checkpoint, plan, engines).name)


@dataclass(frozen=True, slots=True)
class _Work:
    """A source, its plan, the arrangement of the output, the options to write it, and the files that are read besides
    the source."""

    source: str
    checkpoint: Checkpoint
    plan: Plan
    arrangement: Arrangement
    writing: QuantizeOptions
    inputs: tuple[Path, ...]

    def others(self, results: Results) -> tuple[Path, ...]:
        """Return the files to write that are not of the output."""
        recipe = self.writing.save_recipe
        return results.paths if recipe in (None, STDOUT) else (*results.paths, Path(str(recipe)))

    def save_recipe(self) -> None:
        """Write the recipe, if requested."""
        save_recipe(self.writing.save_recipe, self.checkpoint, self.plan, f"mxcli quantize {printable(self.source)}")


def _deliver_plan(work: _Work, results: Results, machine: Machine, messages: Messages) -> None:
    """Deliver the plan, after every refusal that the output would meet."""
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.write.quantize import report_from_stats
    from mxcli.output.plans import plan_json, plan_text

    checkpoint, arrangement = work.checkpoint, work.arrangement
    report = report_from_stats(work.source, checkpoint, work.plan, arrangement)
    messages.notes((*report.notes, *_share_notes(work)))
    site = _site(work.writing.output, found_device(machine, messages), machine.max_bytes)
    check_memory(arrangement.need, site.max_memory, site.device)
    _check_output(work, None if site.folder is None else Path(site.folder), results)
    work.save_recipe()
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: plan_json(report, checkpoint, arrangement, site),
        text=lambda screen: plan_text(report, checkpoint, arrangement, site, screen),
    )


def _share_notes(work: _Work) -> list[str]:
    """Return a note on the files that a share would write; the plan is always that of the whole output."""
    share = work.writing.share
    if share is None:
        return []
    from mxcli.flows.write.quantize import share_of

    names = [shard.name for shard in share_of(work.checkpoint, work.arrangement, share).shards]
    return [f"Share {share} would write {', '.join(names) or 'no file: there are fewer files than shares'}."]


def _site(output: str | None, device: str, max_memory: int | None) -> Site:
    from mxcli.flows.doctor import free_bytes
    from mxcli.output.site import Site

    return Site(output, None if output is None else free_bytes(Path(output)), device, max_memory)


def _check_output(work: _Work, folder: Path | None, results: Results) -> None:
    """Refuse what the run would refuse; without a folder, only what is wrong with the source."""
    from mxcli.flows.write.pipeline import planned_draft
    from mxcli.flows.write.records import planned_record

    record = planned_record(work.checkpoint, work.plan, work.arrangement, ())
    draft = planned_draft(work.checkpoint, work.arrangement.shards, work.arrangement.configs, record)
    others, force = work.others(results), results.force
    check_output(work.checkpoint, draft, folder, work.writing, force=force, others=others, inputs=work.inputs)


def _write(work: _Work, results: Results, machine: Machine, messages: Messages, command: list[str]) -> Written:
    from mxcli.flows.write.quantize import quantize_checkpoint

    backend = open_backend(machine, messages, work.arrangement.need)
    others = work.others(results)
    with write_options(
        "quantize", work.writing, messages, force=results.force, others=others, inputs=work.inputs
    ) as manner:
        return quantize_checkpoint(
            work.checkpoint,
            work.plan,
            work.writing.folder,
            backend=backend,
            max_shard_bytes=work.writing.max_shard_bytes,
            engines=work.arrangement.engines,
            devices=work.arrangement.devices,
            options=manner,
            command=command,
        )


def _deliver(work: _Work, written: Written, results: Results, messages: Messages) -> None:
    from mxcli.flows.write.quantize import report_from_stats

    report = report_from_stats(work.source, work.checkpoint, work.plan, written.arrangement, written.layers)
    messages.notes((*report.notes, *outcome_notes(written.outcome)))
    screen = messages.stdout(wide=results.wide)
    if not written.outcome.complete:
        deliver_report(report, results, screen, verb="quantize")
        report_unfinished(written.outcome, work.writing.folder)
        raise typer.Exit(INTERRUPTED)
    work.save_recipe()
    ending, record = _written(report, work, written)
    if written.outcome.was_complete:
        from mxcli.output.report import report_csv, report_json

        deliver_forms(
            results,
            screen,
            json=lambda: report_json(report, "quantize", **record),
            csv=lambda: report_csv(report),
            text=lambda screen: ending,
        )
        return
    deliver_report(report, results, screen, verb="quantize", ending=ending, **record)


def _written(report: Report, work: _Work, written: Written) -> tuple[str, dict[str, object]]:
    """Return what was written, as a line and for JSON."""
    from mxcli.output.written import share_line, share_record, written_line, written_record

    arrangement, folder, share = written.arrangement, str(written.folder), work.writing.share
    if share is not None:
        return share_line(arrangement, folder, share), share_record(arrangement, folder, share)
    return written_line(report, work.checkpoint, arrangement, folder), written_record(
        work.checkpoint, arrangement, folder
    )
