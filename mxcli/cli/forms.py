"""The forms a report is asked for in, delivered where each was asked to go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen
from mxcli.errors import UsageError, did_you_mean, printable

if TYPE_CHECKING:
    from mxcli.flows.report import LayerReport, Report


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

    @property
    def takes_stdout(self) -> bool:
        """Whether a machine-readable form goes to stdout instead of the table."""
        return STDOUT in (self.json, self.jsonl, self.csv)


def check_forms(forms: Forms, *, force: bool, beside: Iterable[str | None] = ()) -> None:
    """Before any work: raises if two forms ask for stdout, a file exists, or the table cannot be so sorted."""
    asked = {"--json": forms.json, "--jsonl": forms.jsonl, "--csv": forms.csv}
    taking = [option for option, file in asked.items() if file == STDOUT]
    if len(taking) > 1:
        raise UsageError(f"{' and '.join(taking)} both ask for stdout: give all but one of them a FILE.")
    _check_sort(forms.sort)
    refuse_existing([*asked.values(), *beside], force=force)


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

    if forms.json is not None:
        deliver(report_json(report, verb, **more), forms.json)
    if forms.csv is not None:
        deliver(report_csv(report), forms.csv)
    if forms.jsonl is not None:
        layers = report.kept if forms.jsonl == STDOUT else (*report.layers, *report.kept)
        if layers or forms.jsonl != STDOUT:
            deliver("\n".join(map(layer_line, layers)), forms.jsonl)
    if not forms.takes_stdout:
        screen = stdout_screen(no_color=forms.no_color, wide=forms.wide)
        text = report_text(report, screen, forms.sort, forms.top)
        deliver("\n".join(filter(None, (text, ending))))


def _check_sort(sort: str) -> None:
    from mxcli.numerics.metrics import METRICS

    sortable = ["name", *METRICS]
    if sort not in sortable:
        raise UsageError(
            f"--sort {printable(sort)}: no such metric; `mxcli explain` lists them, and name sorts by name."
            f"{did_you_mean(sort, sortable)}"
        )
