"""`mxcli evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import listed
from mxcli.cli.groups import vary, verb
from mxcli.cli.machine import Machine
from mxcli.cli.options import FORMAT_NAMES, DryRun, OptionalFormats, SchemeOptions, completes
from mxcli.cli.outputs import Results, deliver_forms, enforce_limits, stated_limits
from mxcli.cli.progress import progress
from mxcli.cli.terminal import INTERRUPTED, Messages, output_problems, refuse_all
from mxcli.cli.texts import STDIN, check_text, read_text
from mxcli.cli.threads import check_threads, use_threads
from mxcli.cli.writing import stopping
from mxcli.errors import UsageError, printable

if TYPE_CHECKING:
    from mxcli.flows.evaluate.candidates import Candidate
    from mxcli.flows.evaluate.evaluate import Evaluation, EvaluationPlan


@dataclass(frozen=True, slots=True)
class Compared:
    """The candidates that are evaluated next to the original."""

    heading: ClassVar[str] = "Candidates"
    formats: OptionalFormats = None
    activations: Annotated[
        str,
        typer.Option(
            "--activations",
            metavar="none|same|FORMAT[,...]",
            autocompletion=completes(FORMAT_NAMES, listed=True),
            help="Formats of the inputs of quantized layers, each with every format of the weights: none, the same as "
            "the weights, or another. Scales are found for every call.",
        ),
    ] = "none"
    recipes: Annotated[
        list[str] | None,
        typer.Option("--recipe", metavar="FILE", help="A recipe file for the weights. May be repeated."),
    ] = None
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            metavar="NAME",
            autocompletion=completes("mxcli.flows.evaluate.studies:STUDIES"),
            help="The formats of a published table, with its figures next to those of this model: direct-cast, mixed.",
        ),
    ] = None
    per: Annotated[
        str | None,
        typer.Option(
            "--per",
            metavar="layer|block|kind",
            help="With one format or recipe: evaluate each layer, block or kind of layer by itself, all others as they "
            "are, and list those with the largest KL divergence first.",
        ),
    ] = None
    left: Annotated[
        bool,
        typer.Option("--left", help="With --per: quantize all others instead; what helps most when left comes first."),
    ] = False
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="EXPRESSION",
            help="Exit with code 5, after the table, if a candidate matches, such as 'kl_mean>0.05' or "
            "'loss_change>0.02 and bits_per_weight>5'. May be repeated.",
        ),
    ] = None
    dry_run: DryRun = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The text, and how it is read."""

    heading: ClassVar[str] = "Text"
    text: Annotated[
        str | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="The text that is scored, UTF-8; - is stdin. A .jsonl file has a line for each conversation "
            '({"messages": [...]}, by the chat template of the model) or text ({"text": "..."}).',
        ),
    ] = None
    tokens: Annotated[
        int, typer.Option("--tokens", min=2, metavar="N", help="Tokens to read, from the beginning of the text.")
    ] = 16_384
    context_tokens: Annotated[
        int | None,
        typer.Option(
            "--context", min=2, metavar="N", help="Tokens of a window.  [default: 1024, or the most the model reads]"
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            metavar="N",
            help="Tokens from one window to the next; each token is scored once, by the first window that has it.  "
            "[default: the context: windows do not overlap]",
        ),
    ] = None
    compute_dtype: Annotated[
        str | None,
        typer.Option(
            "--compute-dtype", metavar="f32|bf16|f16", help="Type in which the model computes.  [default: f32]"
        ),
    ] = None
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="FILE",
            help="Keep the original's predictions in FILE for later runs, and use them if it exists; scores of windows "
            "are kept in FILE.scores.",
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run from its --baseline FILE.scores.")
    ] = False

    @property
    def kept(self) -> list[str]:
        """The files that are kept for later runs."""
        return [] if self.baseline is None else [self.baseline, f"{self.baseline}.scores"]

    def written(self, *, force: bool) -> list[str]:
        """Return the predictions if they are written, not read."""
        return [] if self.baseline is None or (Path(self.baseline).exists() and not force) else [self.baseline]


_RULE_NAMES = ("scale_rounding", "rounding", "dialect", "hadamard", "hadamard_seed", "seed", "fuse")
_RULES = vary(only=_RULE_NAMES)
_DEVICE_HELP = {"device": "Device to compute on: auto is the first usable NVIDIA GPU, else the CPU."}


@verb
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="A directory with a language model in any layout, and its tokenizer.",
        ),
    ],
    compared: Compared,
    reading: TextOptions,
    scheme: Annotated[SchemeOptions, _RULES],
    results: Annotated[Results, vary(only=("wide", "json", "csv", "markdown", "force"))],
    machine: Annotated[Machine, vary(only=("device", "threads"), help=_DEVICE_HELP)],
    messages: Annotated[Messages, vary(without=("verbose",))],
    checkpoints: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT]...",
            show_default=False,
            help="Quantized checkpoints of the same model, whose layers take inputs as they are.",
        ),
    ] = None,
) -> None:
    """Evaluate the loss of a model under formats, recipes and checkpoints.

    The model reads a text, once as it is and once for each candidate, on the same windows: loss and perplexity, the
    change of the loss with its standard error (paired by token), the KL divergence from the original's predictions, how
    often the most likely token stays the same, bits per weight and speed. Layers compute with the values that `mxcli
    quantize` and `mxcli dequantize` give; products accumulate in the type of --compute-dtype. Masked language models
    are scored by masked tokens. Values depend on the device and the number of threads.

    \b
    Examples:
      mxcli evaluate samples/tiny-llama --text samples/README.md --formats mxfp8,mxfp4,nvfp4 --context 128
      mxcli evaluate samples/tiny-llama --text samples/README.md --formats nvfp4 --activations none,same --tokens 512
      mxcli evaluate samples/tiny-llama --text samples/README.md --study mixed --tokens 256
      mxcli evaluate samples/tiny-llama --text samples/README.md --formats nvfp4 --per block --tokens 256
      mxcli evaluate samples/tiny-llama --text samples/README.md --formats mxfp8 --dry-run
    """
    from mxcli.flows.evaluate.measures import MEASURES

    name = check_text(reading.text)
    results.check_dry_run(compared.dry_run)
    sources = [model, *(checkpoints or ()), *(compared.recipes or ()), *([] if name == STDIN else [name])]
    results.check(sources, also=reading.written(force=results.force))
    refuse_all(output_problems(reading.kept, force=True, sources=sources))
    limits = stated_limits(compared.fail_on, dry_run=compared.dry_run, known=MEASURES)
    check_threads(machine.threads)
    candidates = tuple(_candidates(compared, scheme, checkpoints or ()))
    if not candidates:
        raise UsageError(
            "nothing to evaluate: name --formats, a --recipe, a --study, or checkpoints of the same model."
        )
    _check_baseline(reading, compared)
    plan = _plan(model, reading, candidates, compared.study)
    messages.notes(plan.notes)
    if compared.dry_run:
        _deliver_plan(plan, results, messages)
        return
    use_threads(machine.threads)
    result = _evaluate(plan, compared, reading, results, machine, messages)
    _deliver(result, results, messages)
    if result.unfinished:
        raise typer.Exit(INTERRUPTED)
    enforce_limits(limits, _measured(result))


def _candidates(compared: Compared, scheme: SchemeOptions, checkpoints: Sequence[str]) -> Iterator[Candidate]:
    """Yield the candidates in the order of the options' help: formats, recipes, checkpoints."""
    from mxcli.flows.evaluate.candidates import of_checkpoint, of_formats, of_recipe
    from mxcli.flows.evaluate.studies import find_study, of_study

    given = {name: scheme.named[name] for name in _RULE_NAMES if scheme.named[name] is not None}
    activations = listed(compared.activations, "--activations")
    if compared.study is not None:
        if compared.activations != "none":
            raise UsageError(f"--activations with --study {compared.study}: the study names those of each row.")
        yield from of_study(find_study(compared.study), given)
    yield from of_formats(listed(compared.formats, "--formats"), activations, given)
    for path in compared.recipes or ():
        yield from (of_recipe(path, each, given) for each in activations)
    yield from map(of_checkpoint, checkpoints)


def _check_baseline(reading: TextOptions, compared: Compared) -> None:
    if compared.left and compared.per is None:
        raise UsageError("--left has no effect without --per layer, block or kind.")
    if compared.per is not None and reading.baseline is not None:
        raise UsageError("--per with --baseline: parts are compared in one run; leave --baseline out.")
    if reading.resume and reading.baseline is None:
        raise UsageError("--resume needs --baseline FILE: the scores of an interrupted run are next to it.")


def _plan(model: str, reading: TextOptions, candidates: tuple[Candidate, ...], study: str | None) -> EvaluationPlan:
    from mxcli.flows.evaluate.evaluate import plan_evaluation
    from mxcli.flows.evaluate.model import parse_compute_dtype
    from mxcli.flows.evaluate.studies import find_study
    from mxcli.flows.evaluate.windows import Reading

    dtype = parse_compute_dtype(reading.compute_dtype)
    how = Reading(reading.tokens, reading.context_tokens, reading.stride)
    text, named = read_text(check_text(reading.text)), None if study is None else find_study(study)
    return plan_evaluation(model, text, candidates, how, dtype, named)


def _deliver_plan(plan: EvaluationPlan, results: Results, messages: Messages) -> None:
    from mxcli.output.evaluation import evaluation_plan_json, evaluation_plan_text

    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: evaluation_plan_json(plan),
        text=lambda screen: evaluation_plan_text(plan, screen),
    )


def _evaluate(
    plan: EvaluationPlan,
    compared: Compared,
    reading: TextOptions,
    results: Results,
    machine: Machine,
    messages: Messages,
) -> Evaluation:
    from mxcli.flows.capture.model import compute_device
    from mxcli.flows.evaluate.evaluate import evaluate_plan
    from mxcli.flows.evaluate.layers import evaluate_parts

    with progress("evaluate", messages, "tokens") as show, stopping("window") as stop:
        if compared.per is not None:
            device = compute_device(machine.device)
            result = evaluate_parts(plan, compared.per, left=compared.left, device=device, stop=stop, on_window=show)
            messages.notes(result.notes)
            return result
        result = evaluate_plan(
            plan,
            device=compute_device(machine.device),
            baseline=None if reading.baseline is None else Path(reading.baseline),
            resume=reading.resume,
            replace=results.force,
            stop=stop,
            on_window=show,
        )
    messages.notes(result.notes)
    return result


def _deliver(result: Evaluation, results: Results, messages: Messages) -> None:
    from mxcli.output.evaluation import evaluation_csv, evaluation_json, evaluation_text

    deliver_forms(
        results,
        messages.stdout(wide=results.wide),
        json=lambda: evaluation_json(result),
        csv=lambda: evaluation_csv(result),
        text=lambda screen: evaluation_text(result, screen),
    )


def _measured(result: Evaluation) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Yield the name and the measures of each candidate."""
    from mxcli.flows.evaluate.measures import Pair, measures_of

    for each in result.evaluated:
        yield printable(each.name), dict(measures_of(Pair(each, result.original)))
