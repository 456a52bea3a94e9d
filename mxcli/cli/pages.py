"""`--html` and `--plots`: a result as a page and as pictures, delivered like its other forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mxcli.cli.arguments import STDOUT, repeatable
from mxcli.cli.streams import deliver, on_disk, refuse_existing, refuse_source
from mxcli.errors import InputError, RefusedError, UsageError, printable

if TYPE_CHECKING:
    from mxcli.files.checkpoint import Checkpoint
    from mxcli.flows.compare import Comparison, ComparisonPlan
    from mxcli.flows.plan import Plan
    from mxcli.flows.report import Report
    from mxcli.output.study import Study


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
        from mxcli.flows.fingerprint import fingerprint
        from mxcli.output.html import html_page
        from mxcli.output.study import Provenance

        command = repeatable(arguments or ())
        deliver(html_page(made, Provenance(command, own_version(), fingerprint(checkpoint))), pages.html)
    if pages.plots is not None:
        from mxcli.output.plots import write_plots

        folder = Path(pages.plots)
        charts = study_charts(made)
        with on_disk(folder):
            folder.mkdir(exist_ok=True)
            write_plots(charts, folder)


def study_of(report: Report, checkpoint: Checkpoint, plans: Sequence[Plan]) -> Study:
    """A report and its worst blocks, which are read once more."""
    from mxcli.flows.worst_blocks import worst_blocks
    from mxcli.output.study import study_of_report

    return study_of_report(report, worst_blocks(checkpoint, plans, report.layers))


def study_of_compared(comparison: Comparison, checkpoint: Checkpoint, planned: ComparisonPlan) -> Study:
    """A comparison and the worst blocks under its combinations, of tensors that are read once more; a sample has none,
    so that no more is read than was asked for."""
    from mxcli.flows.worst_blocks import worst_blocks_compared
    from mxcli.output.study import study_of_comparison

    if comparison.sample is not None and not comparison.sample.is_everything:
        return study_of_comparison(comparison)
    if comparison.sample is not None:
        return study_of_comparison(comparison)
    measured = [{layer.name: layer.metrics[at] for layer in comparison.layers} for at in range(len(planned.plans))]
    return study_of_comparison(comparison, worst_blocks_compared(checkpoint, planned.plans, measured))
