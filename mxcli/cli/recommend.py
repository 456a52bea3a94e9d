"""`mxcli recommend`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mxcli.cli import options, recipes
from mxcli.cli.arguments import listed
from mxcli.cli.forms import Forms, check_dry_run, check_forms, deliver_forms, deliver_plan, ended
from mxcli.cli.machine import found_device, machine, open_backend
from mxcli.cli.progress import progress
from mxcli.cli.streams import deliver, on_disk, refuse_existing, talk_on_stderr
from mxcli.errors import InputError, UsageError, printable
from mxcli.numerics.scheme import Rules

SORTS = ("harm", "sqnr_db", "bits_per_element", "elements", "name")
CONFIG_FILES = ("compressed-tensors.json", "llm-compressor.yaml", "modelopt.yaml", "auto-round.json")

Bits = Annotated[
    float | None,
    typer.Option("--bits", metavar="B", help="Least harm with at most B stored bits per element, scales included."),
]
MinSqnr = Annotated[
    float | None,
    typer.Option("--min-sqnr", metavar="DB", help="Fewest bits with an SQNR of at least DB dB for every tensor."),
]
KeepPercent = Annotated[
    float | None,
    typer.Option(
        "--keep-percent",
        metavar="P",
        help="Least harm with one format where at most P percent of the elements are kept as they are.",
    ),
]
Configs = Annotated[
    str | None,
    typer.Option(
        "--configs",
        metavar="DIR",
        help=f"Write the choice for other producers too: {', '.join(CONFIG_FILES)}.",
    ),
]


def recommend(
    context: typer.Context,
    source: options.Source,
    formats: options.Formats,
    bits: Bits = None,
    min_sqnr: MinSqnr = None,
    keep_percent: KeepPercent = None,
    captures: options.Captures = None,
    save_recipe: options.SaveRecipe = None,
    configs: Configs = None,
    scale_rounding: options.ScaleRounding = None,
    rounding: options.Rounding = None,
    dialect: options.Dialect = None,
    selectors: options.Selectors = None,
    recipe: options.Recipe = None,
    requantize: options.Requantize = False,
    nonfinite: options.Nonfinite = "error",
    on_indivisible: options.OnIndivisible = "keep",
    layout: options.Layout = None,
    dry_run: options.DryRun = False,
    sort: options.Sort = "harm",
    top: options.Top = None,
    wide: options.Wide = False,
    json: options.Json = None,
    jsonl: options.Jsonl = None,
    csv: options.Csv = None,
    markdown: options.Markdown = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    max_memory: options.MaxMemory = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
    debug: options.Debug = False,
) -> None:
    """Choose a format for each layer, and which to keep.

    Every tensor is measured under every format, and what is chosen is the best there is: no other choice within
    the target does less harm. Harm is the squared error relative to the squared norm, of weights or, with
    --captures, of the layers' outputs, added up over tensors (`mxcli explain weight-error`). Layers that loaders
    fuse (q, k, v; gate, up) and the experts of a layer get one format together. Of equals the choice with the fewest
    bits is taken, then the first. Tensors that no format fits are kept and do not count. --sort and --top order and
    shorten the table only. The page of a choice is that of `mxcli report --recipe`.

    \b
    Examples:
      mxcli recommend samples/tiny-llama --formats mxfp4,nvfp4,mxfp8 --bits 5 --save-recipe tiny-llama-5.toml
      mxcli recommend samples/tiny-llama --formats nvfp4,mxfp6,mxfp8 --min-sqnr 25 --top 5
      mxcli recommend samples/tiny-llama --formats nvfp4 --keep-percent 15 --configs tiny-llama-configs
      mxcli recommend samples/tiny-llama --formats nvfp4 --bits 6 --captures samples/tiny-llama-captures.safetensors
      mxcli recommend samples/tiny-llama --formats mxfp4,mxfp8 --bits 6 --dry-run
      mxcli quantize samples/tiny-llama --recipe tiny-llama-5.toml -o tiny-llama-5
      mxcli report samples/tiny-llama --recipe tiny-llama-5.toml --html tiny-llama-5.html
    """
    forms = Forms(json, jsonl, csv, sort, top, wide, no_color, markdown)
    where = machine(device, threads, max_memory)
    check_dry_run(forms, dry_run=dry_run, beside={"--save-recipe": save_recipe, "--configs": configs})
    read = [source, recipe, captures]
    check_forms(forms, force=force, sources=read, beside=[save_recipe], sorts=SORTS)
    _check_configs(configs, force=force, sources=read)
    talk = talk_on_stderr(quiet=quiet, verbose=verbose, no_color=no_color)
    names = listed(formats, "--formats")
    rules, content = recipes.rules_for_formats(
        context,
        recipe,
        scale_rounding=scale_rounding,
        rounding=rounding,
        dialect=dialect,
        nonfinite=nonfinite,
        on_indivisible=on_indivisible,
        layout=layout,
    )
    from mxcli.numerics.scheme import resolve_all

    resolve_all(names, Rules(rounding=rules["rounding"], dialect=rules["dialect"], nonfinite=rules["nonfinite"]))
    asked = recipes.options_for_formats(names[0], rules, content, selectors)
    from mxcli.flows.plan.recipe_text import spelled_format
    from mxcli.flows.recommend.candidates import stated_target

    target = stated_target(bits, min_sqnr, keep_percent, len({spelled_format(name) for name in names}))
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.plan.memory import check_memory
    from mxcli.flows.plan.recipe_text import recipe_text
    from mxcli.flows.products.output_error import CapturedInputs
    from mxcli.flows.recommend.producer_configs import producer_files
    from mxcli.flows.recommend.recommend import memory_to_recommend, objective_of, plan_candidates
    from mxcli.flows.recommend.recommend import recommend as recommended
    from mxcli.flows.write.restore import open_floats
    from mxcli.output.export import json_line
    from mxcli.output.plan import Site
    from mxcli.output.recommendation import (
        conclusion,
        recommendation_csv,
        recommendation_json,
        recommendation_text,
        tensor_records,
    )
    from mxcli.output.recommendation_plan import (
        PlannedRecommendation,
        recommendation_plan_json,
        recommendation_plan_text,
    )

    checkpoint = open_floats(source, requantize=requantize)
    recipes.check_recipe(content, checkpoint)
    candidates = plan_candidates(checkpoint, names, asked, target)
    for steps in zip(*(plan.tensors for plan in candidates.plans), strict=True):
        if not any(step.scheme for step in steps):
            talk.detail(f"{printable(steps[0].tensor.name)}: {steps[0].reason}")
    inputs = None if captures is None else CapturedInputs(open_checkpoint(captures))
    need = memory_to_recommend(candidates, inputs)
    if dry_run:
        site = Site(None, None, found_device(where, talk), where.max_memory)
        check_memory(need, site.max_memory, site.device)
        plan = PlannedRecommendation(source, checkpoint, candidates, objective_of(inputs), need, site)
        talk.notes(plan.notes)
        deliver_plan(
            forms,
            json=lambda: recommendation_plan_json(plan),
            text=lambda screen: recommendation_plan_text(plan, screen),
        )
        return
    backend = open_backend(where, talk)
    check_memory(need, where.max_memory, backend.name)
    total, done = sum(info.nbytes for group in candidates.groups for info in group.tensors), 0
    with progress("recommend", talk) as show:

        def on_tensor(info: TensorInfo) -> None:
            nonlocal done
            done += info.nbytes
            show(done, total, info.name)

        result = recommended(source, checkpoint, candidates, backend=backend, inputs=inputs, on_tensor=on_tensor)
    talk.notes(result.notes)
    for choice in result.choices:
        talk.detail(f"{printable(choice.group.name)}: {choice.option.name}")
    files: dict[str, str] = {}
    if configs is not None and result.plan.quantized:
        files, notes = producer_files(checkpoint, result.plan)
        talk.notes(notes)
    if save_recipe is not None:
        comments = [f"mxcli recommend {printable(source)}", *conclusion(result)]
        deliver(recipe_text(result.recipe, comments), save_recipe)
    for name, text in files.items():
        with on_disk(Path(str(configs))):
            Path(str(configs)).mkdir(parents=True, exist_ok=True)
        deliver(text, str(Path(str(configs)) / name))
    written = [file for file in (save_recipe, *(str(Path(str(configs)) / name) for name in files)) if file]
    ending = f"written: {', '.join(map(printable, written))}" if written else ""
    deliver_forms(
        forms,
        json=lambda: recommendation_json(result, written=written),
        csv=lambda: recommendation_csv(result),
        lines=lambda _: map(json_line, tensor_records(result)),
        text=lambda screen: ended(recommendation_text(result, screen, sort, top), ending, screen),
    )


def _check_configs(folder: str | None, *, force: bool, sources: Sequence[str | None]) -> None:
    if folder is None:
        return
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise UsageError(f"--configs {printable(folder)}: no directory; name one to write to.")
    if path.is_dir():
        refuse_existing([str(path / name) for name in CONFIG_FILES], force=force, sources=sources)
    elif not path.parent.is_dir():
        raise InputError(f"{printable(folder)}: the directory around it does not exist; create it first.")
