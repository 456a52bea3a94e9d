"""`mxcli recommend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import listed
from mxcli.cli.captured import captured
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine, open_backend, planned_site
from mxcli.cli.options import Captures, DryRun, Formats, SaveRecipe, SchemeOptions, Selection, Source
from mxcli.cli.outputs import Results, deliver_forms, ended
from mxcli.cli.progress import advancing
from mxcli.cli.recipes import Requested, requested_options
from mxcli.cli.terminal import Messages, deliver
from mxcli.cli.texts import STDIN
from mxcli.errors import UsageError, did_you_mean, printable, written_to

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.products.loss_error import CapturedGradients
    from mxcli.flows.products.output_error import CapturedInputs
    from mxcli.flows.recommend.candidates import Target
    from mxcli.flows.recommend.recommend import Candidates, Recommendation

SORTS = ("harm", "sqnr_db", "bits_per_element", "elements", "name")
CONFIG_FILES = ("compressed-tensors.json", "llm-compressor.yaml", "modelopt.yaml", "auto-round.json")


@dataclass(frozen=True, slots=True)
class RecommendOptions:
    """Candidate formats, the target, and the files to write."""

    heading: ClassVar[str] = "Target"
    formats: Formats
    bits: Annotated[
        float | None,
        typer.Option("--bits", metavar="B", help="Least harm with at most B stored bits per element, with scales."),
    ] = None
    min_sqnr: Annotated[
        float | None,
        typer.Option("--min-sqnr", metavar="DB", help="Fewest bits with an SQNR of at least DB dB for every tensor."),
    ] = None
    keep_percent: Annotated[
        float | None,
        typer.Option(
            "--keep-percent",
            metavar="P",
            help="Least harm with one format and at most P percent of the elements kept unquantized.",
        ),
    ] = None
    captures: Captures = None
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="A text that the model reads, forward and backward, instead of --captures: harm is then the estimated "
            "change of its loss.",
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="loss|output-error|weight-error",
            help="Harm that is kept low.  [default: loss with --text, or where gradients of all layers were captured; "
            "output-error where inputs were; else weight-error, which does not predict the loss]",
        ),
    ] = None
    save_recipe: SaveRecipe = None
    configs: Annotated[
        str | None,
        typer.Option(
            "--configs",
            metavar="DIR",
            help=f"Write configurations for other producers: {', '.join(CONFIG_FILES)}.",
        ),
    ] = None
    dry_run: DryRun = False

    @property
    def files(self) -> list[str | None]:
        """The files to write whose directory exists."""
        folder = Path(self.configs or "")
        configs = [str(folder / name) for name in CONFIG_FILES] if self.configs and folder.is_dir() else []
        return [self.save_recipe, *configs]


_TARGET = vary(
    help={
        "captures": "Captured inputs of the layers, and gradients: harm is then the estimated change of the loss, or "
        "without gradients the error of the layers' outputs."
    }
)
_SCHEME = vary(
    without=("format", "axis", "hadamard", "hadamard_seed", "seed", "fuse"),
    nonfinite="error",
    on_indivisible="keep",
)
_RESULTS = vary(
    without=("html", "plots"),
    sort="harm",
    help={"sort": f"Order of the table, worst first: {', '.join(SORTS[:-1])} or {SORTS[-1]}."},
)


@verb
def recommend(
    context: typer.Context,
    source: Source,
    wanted: Annotated[RecommendOptions, _TARGET],
    scheme: Annotated[SchemeOptions, _SCHEME],
    selection: Selection,
    results: Annotated[Results, _RESULTS],
    machine: Machine,
    messages: Messages,
) -> None:
    """Choose a format for each layer, and the layers to keep.

    Measures every tensor under every format and finds the optimum: no other choice within the target has less harm.
    Harm is summed over tensors: with --text, or --captures with gradients, the estimated change of the model's loss
    (`mxcli explain loss`), with captured inputs the relative squared error of the layers' outputs, else of the weights,
    which does not predict the loss. Layers that loaders fuse (q, k, v; gate, up) and the experts of
    a layer get the same format. Ties: fewest bits, then first named. Tensors that fit no format are kept and do not
    count. --sort and --top affect the table only. For a page, use `mxcli report --recipe FILE --html`.

    \b
    Examples:
      mxcli recommend samples/tiny-llama --formats mxfp4,nvfp4,mxfp8 --bits 5 --save-recipe tiny-llama-5.toml
      mxcli recommend samples/tiny-llama --formats nvfp4,mxfp6,mxfp8 --min-sqnr 25 --top 5
      mxcli recommend samples/tiny-llama --formats nvfp4 --keep-percent 15 --configs tiny-llama-configs
      mxcli recommend samples/tiny-llama --formats nvfp4 --bits 6 --captures samples/tiny-llama-captures.safetensors
      mxcli recommend samples/tiny-llama --formats nvfp4,mxfp8 --bits 5 --text samples/README.md --top 5
      mxcli recommend samples/tiny-llama --formats mxfp4,mxfp8 --bits 6 --dry-run
      mxcli quantize samples/tiny-llama --recipe tiny-llama-5.toml -o tiny-llama-5
      mxcli report samples/tiny-llama --recipe tiny-llama-5.toml --html tiny-llama-5.html
    """
    _check_objective(wanted)
    results.check_dry_run(wanted.dry_run, {"--save-recipe": wanted.save_recipe, "--configs": wanted.configs})
    sources = [source, scheme.recipe, wanted.captures, None if wanted.text == STDIN else wanted.text]
    results.check(sources, also=wanted.files, folders={"--configs": wanted.configs}, sorts=SORTS)
    names = listed(wanted.formats, "--formats")
    requested = requested_options(context, scheme, names)
    target = _target(names, wanted, requested)
    options = requested.options(selection.selectors)
    from mxcli.flows.recommend.recommend import plan_candidates
    from mxcli.flows.write.restore import open_floats

    checkpoint = open_floats(source, requantize=selection.requantize)
    requested.check_selectors(checkpoint)
    candidates = plan_candidates(checkpoint, names, options, target)
    for planned in zip(*(plan.tensors for plan in candidates.plans), strict=True):
        if not any(each.scheme for each in planned):
            messages.detail(f"{printable(planned[0].tensor.name)}: {planned[0].reason}")
    with captured(wanted, source, machine, messages) as captures:
        work = _work(source, checkpoint, candidates, captures, wanted)
        if wanted.dry_run:
            _deliver_plan(work, results, machine, messages)
            return
        result = _recommend(work, machine, messages)
    written = _write_files(result, work, wanted, messages)
    _deliver(result, written, results, messages)


def _work(
    source: str, checkpoint: Checkpoint, candidates: Candidates, captures: Checkpoint | None, wanted: RecommendOptions
) -> _Work:
    """Return what is measured for the objective; raises UsageError for one that nothing was captured for."""
    from mxcli.flows.products.output_error import CapturedInputs
    from mxcli.flows.recommend.recommend import gradients_for, objective_of
    from mxcli.numerics.metrics import LOSS, OUTPUT_ERROR

    inputs = None if captures is None else CapturedInputs(captures)
    gradients = None if captures is None else gradients_for(candidates, captures)
    wanted_name, best = wanted.objective, objective_of(inputs, gradients)
    needs = {LOSS.name: gradients, OUTPUT_ERROR.name: inputs}
    if wanted_name in needs and needs[wanted_name] is None and not wanted.dry_run:
        what = "gradients of every layer" if wanted_name == LOSS.name else "inputs of layers"
        raise UsageError(f"--objective {wanted_name}: needs captured {what}: give a --text, or --captures with them.")
    name = wanted_name or best.name
    return _Work(
        source,
        checkpoint,
        candidates,
        inputs if name in needs else None,
        gradients if name == LOSS.name else None,
    )


def _check_objective(wanted: RecommendOptions) -> None:
    from mxcli.numerics.metrics import OBJECTIVES

    if wanted.text is not None and wanted.captures is not None:
        raise UsageError("--text with --captures: one of them says what the model read; leave the other out.")
    if wanted.objective is not None and wanted.objective not in OBJECTIVES:
        names = ", ".join(OBJECTIVES)
        raise UsageError(
            f"--objective {printable(wanted.objective)}: it takes {names}.{did_you_mean(wanted.objective, OBJECTIVES)}"
        )


def _target(names: Sequence[str], wanted: RecommendOptions, requested: Requested) -> Target:
    """Return the target, with the names of formats and rules checked."""
    from mxcli.numerics.scheme import resolve_all

    resolve_all(names, replace(requested.rules, scale_rounding=None))
    from mxcli.flows.plan.recipe_text import spelled_format
    from mxcli.flows.recommend.candidates import stated_target

    return stated_target(
        wanted.bits, wanted.min_sqnr, wanted.keep_percent, len({spelled_format(name) for name in names})
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The candidates to measure on a source, captured inputs for the error of outputs, and gradients for the loss."""

    source: str
    checkpoint: Checkpoint
    candidates: Candidates
    inputs: CapturedInputs | None
    gradients: CapturedGradients | None


def _deliver_plan(work: _Work, results: Results, machine: Machine, messages: Messages) -> None:
    from mxcli.flows.recommend.recommend import memory_to_recommend, objective_of
    from mxcli.output.plans import PlannedRecommendation, recommendation_plan_json, recommendation_plan_text

    need = memory_to_recommend(work.candidates, work.inputs)
    site = planned_site(machine, messages, need)
    plan = PlannedRecommendation(
        work.source, work.checkpoint, work.candidates, objective_of(work.inputs, work.gradients), need, site
    )
    messages.notes(plan.notes)
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: recommendation_plan_json(plan),
        text=lambda screen: recommendation_plan_text(plan, screen),
    )


def _recommend(work: _Work, machine: Machine, messages: Messages) -> Recommendation:
    from mxcli.flows.recommend.recommend import memory_to_recommend
    from mxcli.flows.recommend.recommend import recommend as recommended

    candidates = work.candidates
    backend = open_backend(machine, messages, memory_to_recommend(candidates, work.inputs))
    total = sum(info.nbytes for group in candidates.groups for info in group.tensors)
    with advancing("recommend", messages, total) as advance:

        def on_tensor(info: TensorInfo) -> None:
            advance(info.nbytes, info.name)

        result = recommended(
            work.source,
            work.checkpoint,
            candidates,
            backend=backend,
            inputs=work.inputs,
            gradients=work.gradients,
            on_tensor=on_tensor,
        )
    messages.notes(result.notes)
    for choice in result.choices:
        messages.detail(f"{printable(choice.group.name)}: {choice.option.name}")
    return result


def _write_files(result: Recommendation, work: _Work, wanted: RecommendOptions, messages: Messages) -> list[str]:
    """Write the recipe and the configurations that are requested, and return their paths."""
    from mxcli.flows.plan.recipe_text import recipe_text
    from mxcli.flows.recommend.producer_configs import producer_files
    from mxcli.output.recommendation import conclusion

    texts: dict[str, str] = {}
    if wanted.save_recipe is not None:
        comments = [f"mxcli recommend {printable(work.source)}", *conclusion(result)]
        texts[wanted.save_recipe] = recipe_text(result.recipe, comments)
    if wanted.configs is not None and result.plan.quantized:
        folder = Path(wanted.configs)
        files, notes = producer_files(work.checkpoint, result.plan)
        messages.notes(notes)
        with written_to(folder):
            folder.mkdir(parents=True, exist_ok=True)
        texts |= {str(folder / name): text for name, text in files.items()}
    for file, text in texts.items():
        deliver(text, file)
    return list(texts)


def _deliver(result: Recommendation, written: Sequence[str], results: Results, messages: Messages) -> None:
    from mxcli.output.export import json_line
    from mxcli.output.recommendation import (
        recommendation_csv,
        recommendation_json,
        recommendation_text,
        tensor_records,
    )

    ending = f"written: {', '.join(map(printable, written))}" if written else ""
    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: recommendation_json(result, written=written),
        csv=lambda: recommendation_csv(result),
        lines=lambda _: map(json_line, tensor_records(result)),
        text=lambda screen: ended(recommendation_text(result, screen, results.sort, results.top), ending, screen),
    )
