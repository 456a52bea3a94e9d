"""`mxcli compare`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import STDOUT, listed
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend, planned_site
from mxcli.cli.options import (
    ROUNDING_NAMES,
    SCALE_RULE_NAMES,
    Formats,
    Measuring,
    SchemeOptions,
    Selection,
    Source,
    completes,
)
from mxcli.cli.outputs import Results, deliver_forms, deliver_pages, enforce_limits, stated_limits
from mxcli.cli.progress import advancing
from mxcli.cli.recipes import Requested, requested_options
from mxcli.cli.terminal import INTERRUPTED, Messages, deliver
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.compare import Compared, Comparison, ComparisonPlan, Metrics
    from mxcli.flows.plan.memory import Need
    from mxcli.numerics.combinations import Combinations
    from mxcli.numerics.streams import Sampling
    from mxcli.output.study import Study


@dataclass(frozen=True)
class _Combined:
    """Formats, rules and transforms to combine."""

    heading: ClassVar[str] = "Combinations"
    formats: Formats
    scale_roundings: Annotated[
        str | None,
        typer.Option(
            "--scale-roundings",
            metavar="RULE[,RULE...]",
            autocompletion=completes(*SCALE_RULE_NAMES, listed=True),
            help="Scale rules to compare, separated by commas, each with every format it serves.  [default: for "
            "several formats the dialect's rule for each; for one format floor, ceil, rceil and even, or every rule "
            "for its kind of scale]",
        ),
    ] = None
    roundings: Annotated[
        str | None,
        typer.Option(
            "--roundings",
            metavar="RULE[,RULE...]",
            autocompletion=completes(ROUNDING_NAMES, listed=True),
            help="Element roundings to compare, separated by commas.  [default: the dialect's, usually nearest-even]",
        ),
    ] = None
    hadamards: Annotated[
        str | None,
        typer.Option(
            "--hadamards",
            metavar="none|16|32|64|128[,...]",
            help="Random Hadamard transforms to compare, by the size of their groups.  [default: none]",
        ),
    ] = None
    hadamard_seed: Annotated[
        int | None,
        typer.Option(
            "--hadamard-seed",
            metavar="N",
            help="Seed of the transforms' signs.  [default: Transformer Engine's signs for 16, else seed 0]",
        ),
    ] = None
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="layer|role|kind",
            help="Grouping of the totals: by layer, by role, or by kind of tensor, such as mlp.down_proj.",
        ),
    ] = "role"


@dataclass(frozen=True)
class CompareOptions(Measuring, _Combined):
    """Combinations to measure, and the extent of the measurement."""


_RULES = vary(
    without=("format", "layout", "scale_rounding", "rounding", "hadamard", "hadamard_seed", "fuse"),
    help={"seed": "Seed of stochastic rounding and of --sample.  [default: 0]"},
)


@verb
def compare(
    context: typer.Context,
    source: Source,
    compared: CompareOptions,
    scheme: Annotated[SchemeOptions, _RULES],
    selection: Selection,
    results: Results,
    machine: Machine,
    messages: Messages,
) -> None:
    """Compare formats and rules on the same tensors.

    Combines every format with every scale rule that serves it, every rounding and every transform, along every axis;
    the first combination is the baseline. Each tensor is read once. The best SQNR of a tensor is marked; ties within
    0.01 dB: fewest bits, then first named. A few sentences report what follows from the totals. JSON has the
    single-number metrics by combination; CSV has a row per tensor and combination. With --sample all combinations
    measure the same rows, so their differences are more certain than each value.

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
    from mxcli.numerics.streams import check_seed, stated_sampling

    results.check_dry_run(compared.dry_run)
    results.check([source, scheme.recipe])
    limits = stated_limits(compared.fail_on, dry_run=compared.dry_run)
    sampling = stated_sampling(compared.sample, scheme.seed)
    names = listed(compared.formats, "--formats")
    requested = requested_options(context, scheme, names)
    combinations = _combinations(names, compared, requested)
    is_drawn = any(each.rounding.is_random for each in combinations.schemes)
    check_seed(scheme.seed, is_drawn=sampling is not None or is_drawn)
    options = requested.options(selection.selectors, analysis=True)
    from mxcli.flows.measure.compare import plan_comparison
    from mxcli.flows.measure.totals import check_grouping
    from mxcli.flows.write.restore import open_floats

    check_grouping(compared.by)
    checkpoint = open_floats(source, requantize=selection.requantize)
    requested.check_selectors(checkpoint)
    planned = plan_comparison(checkpoint, combinations, options)
    for layer in planned.decided:
        messages.detail(f"{printable(layer.name)}: {layer.reason}")
    work = _Work(source, checkpoint, planned, sampling, compared.by)
    if compared.dry_run:
        _deliver_plan(work, results, machine, messages)
        return
    result = _measure(work, results, machine, messages)
    _deliver(result, results, messages)
    deliver_pages(results, lambda: _study(result, work), checkpoint, context.obj)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, _measured(result))


def _combinations(names: Sequence[str], compared: CompareOptions, requested: Requested) -> Combinations:
    """Return the combinations to compare; a recipe's rules and transform replace those that are not named."""
    from mxcli.numerics.blocks import axes_of
    from mxcli.numerics.combinations import combine

    if compared.hadamard_seed is not None and compared.hadamards is None:
        raise UsageError(
            f"--hadamard-seed {compared.hadamard_seed} has no effect without a transform: add --hadamards none,16."
        )
    return combine(
        names,
        listed(compared.scale_roundings, "--scale-roundings"),
        listed(compared.roundings, "--roundings"),
        listed(compared.hadamards, "--hadamards"),
        axes=axes_of(requested["axis"]),
        rules=requested.rules,
        hadamard_seed=compared.hadamard_seed,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The combinations to measure on a source, and how much of it."""

    source: str
    checkpoint: Checkpoint
    planned: ComparisonPlan
    sampling: Sampling | None
    by: str

    @property
    def need(self) -> Need:
        from mxcli.flows.measure.measure import memory_to_measure
        from mxcli.flows.measure.sampled import memory_to_sample

        plans = self.planned.plans
        return memory_to_sample(self.sampling, *plans) if self.sampling else memory_to_measure(*plans)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes to read by tensor."""
        from mxcli.flows.measure.sampled import bytes_to_read

        return {plans[0].tensor.name: bytes_to_read(self.sampling, plans) for plans in self.planned.compared}


def _deliver_plan(work: _Work, results: Results, machine: Machine, messages: Messages) -> None:
    from mxcli.output.plans import PlannedComparison, comparison_plan_json, comparison_plan_text

    messages.notes([*work.checkpoint.notes, *work.planned.notes])
    site = planned_site(machine, messages, work.need)
    plan = PlannedComparison(work.source, work.checkpoint, work.planned, work.need, site, sum(work.sizes.values()))
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: comparison_plan_json(plan),
        text=lambda screen: comparison_plan_text(plan, screen),
    )


def _measure(work: _Work, results: Results, machine: Machine, messages: Messages) -> Comparison:
    from mxcli.flows.measure.compare import make_comparison
    from mxcli.output.comparison import compared_line

    backend = open_backend(machine, messages, work.need)
    sizes = work.sizes
    with advancing("compare", messages, sum(sizes.values())) as advance:

        def on_layer(layer: Compared) -> None:
            advance(sizes[layer.name], layer.name)
            if results.jsonl == STDOUT:
                deliver(compared_line(layer, work.planned.combinations))

        result = make_comparison(
            work.source,
            work.checkpoint,
            work.planned,
            backend=backend,
            by=work.by,
            on_layer=on_layer,
            sampling=work.sampling,
        )
    messages.notes(result.notes)
    return result


def _deliver(result: Comparison, results: Results, messages: Messages) -> None:
    from mxcli.output.comparison import compared_line, comparison_csv, comparison_json, comparison_text

    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: comparison_json(result),
        csv=lambda: comparison_csv(result),
        lines=lambda streamed: (
            compared_line(layer, result.combinations)
            for layer in (result.kept if streamed else (*result.layers, *result.kept))
        ),
        text=lambda screen: comparison_text(result, screen, results.sort, results.top),
    )


def _study(result: Comparison, work: _Work) -> Study:
    """Return a comparison with its worst blocks, whose tensors are read again; without them for a sample."""
    from mxcli.flows.measure.worst_blocks import worst_blocks_compared
    from mxcli.output.study import study_of_comparison

    if result.sample is not None:
        return study_of_comparison(result)
    plans = work.planned.plans
    measured = [{layer.name: layer.metrics[at] for layer in result.layers} for at in range(len(plans))]
    return study_of_comparison(result, worst_blocks_compared(work.checkpoint, plans, measured))


def _measured(result: Comparison) -> Iterator[tuple[str, Metrics]]:
    """Yield the name and the metrics of each measurement."""
    for layer in result.layers:
        for name, metrics in zip(result.combinations.names, layer.metrics, strict=True):
            yield f"{printable(layer.name)} under {name}", metrics
