"""The forms a report is asked for in, delivered where each was asked to go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.cli.arguments import STDOUT, repeatable
from mxcli.cli.streams import deliver, on_disk, refuse_existing, refuse_source, stdout_screen
from mxcli.errors import InputError, RefusedError, UsageError, did_you_mean, printable, together

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.compare import Comparison, ComparisonPlan
    from mxcli.flows.measure.limits import Condition, Metrics
    from mxcli.flows.measure.report import LayerReport, Report
    from mxcli.flows.plan.plan import Plan
    from mxcli.output.screen import Screen
    from mxcli.output.study import Study


@dataclass(frozen=True, slots=True)
class Forms:
    """What was asked for: files by form (None: not asked, `-`: stdout), and how the table is to look."""

    json: str | None
    jsonl: str | None
    csv: str | None
    sort: str
    top: int | None
    wide: bool
    no_color: bool
    markdown: str | None = None

    @property
    def takes_stdout(self) -> bool:
        """Whether a machine-readable form goes to stdout instead of the table."""
        return STDOUT in (self.json, self.jsonl, self.csv, self.markdown)


def check_forms(
    forms: Forms,
    *,
    force: bool,
    sources: Iterable[str | None],
    beside: Iterable[str | None] = (),
    sorts: Collection[str] | None = None,
) -> None:
    """Before any work: raises if two forms ask for stdout, a file exists or belongs to one of the `sources`, or the
    table cannot be so sorted: by one of `sorts`, else by a metric or name."""
    asked = {"--json": forms.json, "--jsonl": forms.jsonl, "--csv": forms.csv, "--markdown": forms.markdown}
    taking = [option for option, file in asked.items() if file == STDOUT]
    if len(taking) > 1:
        raise UsageError(f"{' and '.join(taking)} both ask for stdout: give all but one of them a FILE.")
    _check_sort(forms.sort, sorts)
    files = [file for file in (*asked.values(), *beside) if file not in (None, STDOUT)]
    twice = [
        file for file in files if [Path(str(other)).absolute() for other in files].count(Path(str(file)).absolute()) > 1
    ]
    if twice:
        raise UsageError(f"{printable(twice[0])} is named for two things: give each its own file.")
    refuse_existing([*asked.values(), *beside], force=force, sources=sources)


def check_dry_run(
    forms: Forms, *, dry_run: bool, limits: bool = False, beside: Mapping[str, object] | None = None
) -> None:
    """Raises UsageError where a form, or with `limits` a judgement, is asked for that needs measuring; `beside` has
    further options that do."""
    if not dry_run:
        return
    if limits:
        raise UsageError("--dry-run measures nothing that --fail-on could judge: leave one of them out.")
    wanted = {"--jsonl": forms.jsonl, "--csv": forms.csv, "--markdown": forms.markdown, **(beside or {})}
    asked = [option for option, value in wanted.items() if value is not None]
    if asked:
        raise UsageError(f"--dry-run measures nothing, so there is no {', no '.join(asked)}; --json gives the plan.")


def stream_layer(layer: LayerReport, forms: Forms) -> None:
    """A line for a tensor that is done, where lines were asked for on stdout."""
    if forms.jsonl == STDOUT:
        from mxcli.output.report import layer_line

        deliver(layer_line(layer))


def deliver_report(report: Report, forms: Forms, *, verb: str, ending: str = "", **more: object) -> None:
    """Every form asked for, and the table with its `ending` unless another form takes stdout.

    Where lines go to stdout, those of measured tensors were streamed before. `more` are further JSON keys.
    """
    from mxcli.output.report import layer_line, report_csv, report_json, report_text

    deliver_forms(
        forms,
        json=lambda: report_json(report, verb, **more),
        csv=lambda: report_csv(report),
        lines=lambda streamed: map(layer_line, report.kept if streamed else (*report.layers, *report.kept)),
        text=lambda screen: ended(report_text(report, screen, forms.sort, forms.top), ending, screen),
    )


def ended(text: str, ending: str, screen: Screen) -> str:
    """The text with a last paragraph, if there is one."""
    from mxcli.output.screen import folded_lines

    return "\n".join([text, *folded_lines(ending, screen)]) if ending else text


def deliver_forms(
    forms: Forms,
    *,
    json: Callable[[], str],
    csv: Callable[[], str],
    lines: Callable[[bool], Iterable[str]],
    text: Callable[[Screen], str],
) -> None:
    """Every form asked for, where it was asked to go, and the text unless another form takes stdout.

    `lines` is told whether those of measured tensors were streamed to stdout before.
    """
    if forms.json is not None:
        deliver(json(), forms.json)
    if forms.csv is not None:
        deliver(csv(), forms.csv, verbatim=True)
    if forms.jsonl is not None:
        left = list(lines(forms.jsonl == STDOUT))
        if left or forms.jsonl != STDOUT:
            deliver("\n".join(left), forms.jsonl)
    if forms.markdown is not None:
        from mxcli.output.table import MARKDOWN, page

        deliver(page(text(MARKDOWN)), forms.markdown)
    if not forms.takes_stdout:
        deliver(text(stdout_screen(no_color=forms.no_color, wide=forms.wide)))


def deliver_plan(forms: Forms, *, json: Callable[[], str], text: Callable[[Screen], str]) -> None:
    """What would be done: the JSON if asked for, and the text unless that takes stdout."""
    if forms.json is not None:
        deliver(json(), forms.json)
    if not forms.takes_stdout:
        deliver(text(stdout_screen(no_color=forms.no_color, wide=forms.wide)))


def stated_limits(expressions: Iterable[str] | None) -> list[Condition]:
    """What --fail-on states; raises UsageError, naming every expression that means nothing."""
    from mxcli.flows.measure.limits import parse_condition

    conditions, problems = [], list[str]()
    for expression in expressions or ():
        try:
            conditions.append(parse_condition(expression))
        except UsageError as error:
            problems += error.reasons
    if problems:
        raise together(UsageError, "--fail-on", problems)
    return conditions


def enforce_limits(conditions: Sequence[Condition], measured: Iterable[tuple[str, Metrics]]) -> None:
    """Raises LimitError naming every measurement that is beyond a limit, and every one of which that cannot be said."""
    if not conditions:
        return
    from mxcli.flows.measure.limits import check_limits, limit_error

    limits = check_limits(conditions, measured)
    if limits.failures or limits.unevaluated:
        raise limit_error(limits)


def _check_sort(sort: str, sorts: Collection[str] | None) -> None:
    if sorts is not None:
        if sort not in sorts:
            raise UsageError(f"--sort {printable(sort)}: it takes {', '.join(sorts)}.{did_you_mean(sort, sorts)}")
        return
    from mxcli.numerics.metrics import METRICS, NUMBERS

    sortable = ["name", *NUMBERS]
    if sort in sortable:
        return
    if sort in METRICS:
        raise UsageError(f"--sort {printable(sort)}: it is no single number that tensors could be ordered by.")
    raise UsageError(
        f"--sort {printable(sort)}: no such metric; `mxcli explain` lists them, and name sorts by name."
        f"{did_you_mean(sort, sortable)}"
    )


@dataclass(frozen=True, slots=True)
class Pages:
    """What was asked for: the file of the page, and the directory of the plots (None: not asked)."""

    html: str | None
    plots: str | None


def check_pages(pages: Pages, *, force: bool, sources: Sequence[str | None], dry_run: bool = False) -> None:
    """Before any work: raises if what would be written exists (without `force`), belongs to one of the `sources` or
    has nowhere to lie, and where nothing will be measured that it could show."""
    if dry_run and (pages.html or pages.plots):
        raise UsageError("--dry-run measures nothing, so there is no --html and no --plots.")
    if pages.html == STDOUT:
        raise UsageError("--html takes a file, not stdout: name one, such as report.html.")
    refuse_existing([pages.html], force=force, sources=sources)
    if pages.plots is None:
        return
    folder, shown = Path(pages.plots), printable(pages.plots)
    if not folder.parent.is_dir():
        raise InputError(f"{shown}: its directory does not exist; create it first.")
    if folder.exists() and not folder.is_dir():
        raise RefusedError(f"{shown}: a file; --plots takes a directory.")
    refuse_source(folder.iterdir() if folder.is_dir() else (), [source for source in sources if source])
    if folder.is_dir() and not force and any(folder.iterdir()):
        raise RefusedError(f"{shown}: not empty; use --force to replace the plots in it, or another name.")


def deliver_pages(
    pages: Pages, study: Callable[[], Study], checkpoint: Checkpoint, arguments: Sequence[str] | None
) -> None:
    """The page and the plots of a study, which is made only if either was asked for.

    `arguments` are those of the command line.
    """
    if pages.html is None and pages.plots is None:
        return
    from mxcli.output.study_charts import study_charts

    made = study()
    if pages.html is not None:
        from mxcli.flows.doctor import own_version
        from mxcli.flows.write.records import fingerprint
        from mxcli.output.html import html_page
        from mxcli.output.study import PageSource

        command = repeatable(arguments or ())
        deliver(html_page(made, PageSource(command, own_version(), fingerprint(checkpoint))), pages.html)
    if pages.plots is not None:
        from mxcli.output.plots import write_plots

        folder = Path(pages.plots)
        charts = study_charts(made)
        with on_disk(folder):
            folder.mkdir(exist_ok=True)
            write_plots(charts, folder)


def study_of(report: Report, checkpoint: Checkpoint, plans: Sequence[Plan]) -> Study:
    """A report and its worst blocks, which are read once more."""
    from mxcli.flows.measure.worst_blocks import worst_blocks
    from mxcli.output.study import study_of_report

    return study_of_report(report, worst_blocks(checkpoint, plans, report.layers))


def study_of_compared(comparison: Comparison, checkpoint: Checkpoint, planned: ComparisonPlan) -> Study:
    """A comparison and the worst blocks under its combinations, of tensors that are read once more; a sample has none,
    so that no more is read than was asked for."""
    from mxcli.flows.measure.worst_blocks import worst_blocks_compared
    from mxcli.output.study import study_of_comparison

    if comparison.sample is not None and not comparison.sample.is_everything:
        return study_of_comparison(comparison)
    if comparison.sample is not None:
        return study_of_comparison(comparison)
    measured = [{layer.name: layer.metrics[at] for layer in comparison.layers} for at in range(len(planned.plans))]
    return study_of_comparison(comparison, worst_blocks_compared(checkpoint, planned.plans, measured))
