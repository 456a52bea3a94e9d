"""Outputs of a verb: the forms of its result, checked before any work and delivered at the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from mxcli.cli.arguments import STDOUT, repeatable
from mxcli.cli.options import METRIC_NAMES, completes
from mxcli.cli.terminal import deliver, folder_problems, output_problems, refuse_all, refuse_source
from mxcli.errors import (
    MxcliError,
    RefusedError,
    UsageError,
    did_you_mean,
    import_extra,
    printable,
    together,
    written_to,
)

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.measure.limits import Condition, Metrics
    from mxcli.flows.measure.report import LayerReport, Report
    from mxcli.output.screen import Screen
    from mxcli.output.study import ProductStudy, Study

_TABLE, _SORT = "Table", "sqnr_db"


@dataclass(frozen=True, slots=True)
class Results:
    """The looks of the table, and files by form (None: not requested, `-`: stdout)."""

    heading: ClassVar[str] = "Output"
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="METRIC",
            rich_help_panel=_TABLE,
            autocompletion=completes(METRIC_NAMES),
            help="Order of the table, worst first: a metric that `mxcli explain` lists, or name.",
        ),
    ] = _SORT
    top: Annotated[
        int | None,
        typer.Option(
            "--top", min=0, metavar="N", rich_help_panel=_TABLE, help="Rows of the table to show; totals cover all."
        ),
    ] = None
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", rich_help_panel=_TABLE, help="Full names and all columns, for any width of the terminal."
        ),
    ] = False
    json: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="[FILE]",
            help="JSON on stdout instead of text, or in FILE with the text on stdout. The next word is FILE if it ends "
            "in .json (not .index.json); --json=FILE takes any name.",
        ),
    ] = None
    jsonl: Annotated[
        str | None,
        typer.Option(
            "--jsonl",
            metavar="[FILE]",
            help="One JSON record per tensor, on stdout as each is done, or in FILE. The next word is FILE if it ends "
            "in .jsonl.",
        ),
    ] = None
    csv: Annotated[
        str | None,
        typer.Option(
            "--csv", metavar="FILE", help="CSV in FILE (- is stdout), with the names of the JSON; null is empty."
        ),
    ] = None
    markdown: Annotated[
        str | None,
        typer.Option("--markdown", metavar="FILE", help="The table as Markdown in FILE (- is stdout)."),
    ] = None
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="A self-contained page: findings, plots and a searchable table."),
    ] = None
    plots: Annotated[
        str | None,
        typer.Option(
            "--plots",
            metavar="DIR",
            help="The plots of that page as PNG and SVG files, in a directory that is new or empty (or --force).",
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace output that exists.")] = False

    @property
    def takes_stdout(self) -> bool:
        """True if a machine-readable form goes to stdout instead of the table."""
        return STDOUT in self._files.values()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that are written."""
        named = (*self._files.values(), self.html)
        return tuple(Path(file) for file in named if file is not None and file != STDOUT)

    @property
    def _files(self) -> dict[str, str | None]:
        return {"--json": self.json, "--jsonl": self.jsonl, "--csv": self.csv, "--markdown": self.markdown}

    def check(
        self,
        sources: Iterable[str | None] = (),
        *,
        also: Iterable[str | None] = (),
        whole: Iterable[str | None] = (),
        folders: Mapping[str, str | None] | None = None,
        sorts: Collection[str] | None = None,
    ) -> None:
        """Refuse, before any work, outputs that cannot be written: two forms on stdout, a file that exists, belongs to
        one of the `sources` or is named twice, and an order that the table does not have.

        `also` are further files to write, `whole` those that a pipe cannot take, `folders` directories by option. A
        table is sorted by one of `sorts` (None: a metric or name).
        """
        taking = [option for option, file in self._files.items() if file == STDOUT]
        if len(taking) > 1:
            raise UsageError(f"{' and '.join(taking)} both write to stdout: give all but one of them a FILE.")
        if sorts is not None or self.sort != _SORT:
            _check_sort(self.sort, sorts)
        wanted, whole = [*self._files.values(), self.html, *also], list(whole)
        files = [file for file in (*wanted, *whole) if file not in (None, STDOUT)]
        spelled = [_spelling(str(file)) for file in files]
        if twice := [file for file, path in zip(files, spelled, strict=True) if spelled.count(path) > 1]:
            raise UsageError(f"{printable(twice[0])} is named for two outputs: give each its own file.")
        if self.html == STDOUT:
            raise UsageError("--html takes a file, not stdout: name one, such as report.html.")
        read = [source for source in sources if source]
        problems = [*output_problems(wanted, force=self.force, sources=read)]
        problems += output_problems(whole, force=self.force, sources=read, streams=False)
        for option, folder in {"--plots": self.plots, **(folders or {})}.items():
            problems += [] if folder is None else folder_problems(option, folder)
        problems += self._problems_of_plots(read)
        refuse_all(problems)

    def check_dry_run(self, dry_run: bool, also: Mapping[str, object] | None = None) -> None:
        """Raise UsageError if a dry run is to write what needs measuring; `also` are further such options."""
        if not dry_run:
            return
        files = {"--jsonl": self.jsonl, "--csv": self.csv, "--markdown": self.markdown}
        wanted = {**files, "--html": self.html, "--plots": self.plots, **(also or {})}
        if measured := [option for option, value in wanted.items() if value is not None]:
            raise UsageError(
                f"--dry-run measures nothing, so there is no {', no '.join(measured)}; --json gives the plan."
            )

    def _problems_of_plots(self, sources: Sequence[str]) -> Iterator[MxcliError]:
        """Yield why the directory of plots may not be written to."""
        if self.plots is None:
            return
        import_extra("matplotlib", "--plots")
        folder = Path(self.plots)
        if not folder.is_dir():
            return
        try:
            refuse_source(folder.iterdir(), sources)
        except RefusedError as problem:
            yield problem
            return
        if not self.force and any(folder.iterdir()):
            yield RefusedError(
                f"{printable(self.plots)}: not empty; use --force to replace the plots in it, or another name."
            )


def _spelling(file: str) -> str:
    """Return a path as file systems that ignore case compare it, with links of its directories resolved."""
    path = Path(file)
    return str(path.parent.resolve() / path.name).casefold()


def stream_layer(layer: LayerReport, results: Results) -> None:
    """Write the record of a tensor that is done, if --jsonl goes to stdout."""
    if results.jsonl == STDOUT:
        from mxcli.output.report import layer_line

        deliver(layer_line(layer))


def deliver_report(
    report: Report, results: Results, screen: Screen, *, verb: str, ending: str = "", **more: object
) -> None:
    """Deliver every form of a report, and the table with its `ending` unless another form takes stdout.

    `more` are further JSON keys.
    """
    from mxcli.output.report import layer_line, report_csv, report_json, report_text

    deliver_forms(
        results,
        screen,
        json=lambda: report_json(report, verb, **more),
        csv=lambda: report_csv(report),
        lines=lambda streamed: map(layer_line, report.kept if streamed else (*report.layers, *report.kept)),
        text=lambda screen: ended(report_text(report, screen, results.sort, results.top), ending, screen),
    )


def ended(text: str, ending: str, screen: Screen) -> str:
    """Return the text with a last paragraph, if it is not empty."""
    from mxcli.output.screen import folded_lines

    return "\n".join([text, *folded_lines(ending, screen)]) if ending else text


def deliver_forms(
    results: Results,
    screen: Screen,
    *,
    json: Callable[[], str],
    csv: Callable[[], str] = str,
    lines: Callable[[bool], Iterable[str]] = lambda streamed: (),
    text: Callable[[Screen], str],
) -> None:
    """Deliver every requested form, and the text unless another form takes stdout.

    The argument of `lines` is true if the records of measured tensors were streamed to stdout before.
    """
    if results.json is not None:
        deliver(json(), results.json)
    if results.csv is not None:
        deliver(csv(), results.csv, verbatim=True)
    if results.jsonl is not None:
        left = list(lines(results.jsonl == STDOUT))
        if left or results.jsonl != STDOUT:
            deliver("\n".join(left), results.jsonl)
    if results.markdown is not None:
        from mxcli.output.table import MARKDOWN, page

        deliver(page(text(MARKDOWN)), results.markdown)
    if not results.takes_stdout:
        deliver(text(screen))


def deliver_pages(
    results: Results, study: Callable[[], Study | ProductStudy], checkpoint: Checkpoint, arguments: Sequence[str] | None
) -> None:
    """Write the page and the plots of a study, which is made only if one of them is requested.

    `arguments` are those of the command line.
    """
    if results.html is None and results.plots is None:
        return
    from mxcli.output.study_charts import study_charts

    made = study()
    if results.html is not None:
        from mxcli.flows.doctor import own_version
        from mxcli.flows.write.records import fingerprint
        from mxcli.output.html import html_page
        from mxcli.output.study import PageSource

        command = repeatable(arguments or ())
        deliver(html_page(made, PageSource(command, own_version(), fingerprint(checkpoint))), results.html)
    if results.plots is not None:
        from mxcli.output.plots import write_plots

        folder = Path(results.plots)
        charts = study_charts(made)
        with written_to(folder):
            folder.mkdir(exist_ok=True)
            write_plots(charts, folder)


def stated_limits(
    expressions: Iterable[str] | None, *, dry_run: bool, known: Collection[str] | None = None
) -> list[Condition]:
    """Return the conditions of --fail-on, on metrics of tensors or on others that are `known`; raises UsageError naming
    every expression that is not one."""
    from mxcli.flows.measure.limits import parse_condition
    from mxcli.numerics.metrics import NUMBERS

    if expressions and dry_run:
        raise UsageError("--dry-run measures nothing that --fail-on could judge: leave one of them out.")
    conditions, problems = [], list[str]()
    for expression in expressions or ():
        try:
            conditions.append(parse_condition(expression, NUMBERS if known is None else known))
        except UsageError as error:
            problems += error.reasons
    if problems:
        raise together(UsageError, "--fail-on", problems)
    return conditions


def enforce_limits(conditions: Sequence[Condition], measured: Iterable[tuple[str, Metrics]]) -> None:
    """Raise LimitError naming every measurement that violates a condition, or lacks the metric it needs."""
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
        raise UsageError(f"--sort {printable(sort)}: tensors can be ordered by single numbers only.")
    raise UsageError(
        f"--sort {printable(sort)}: no such metric; `mxcli explain` lists them, and name sorts by name."
        f"{did_you_mean(sort, sortable)}"
    )
