"""A report in words: how much is lost, where most of it, and what to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from mxcli.errors import printable
from mxcli.flows.measure.report import KEPT, Report
from mxcli.numerics.metrics import number_of
from mxcli.output.both_axes import axes_concluded
from mxcli.output.numbers import counted, significant
from mxcli.output.report import estimate_sentences
from mxcli.output.series import series_sentences

OUTLIER_DB = 3.0
"""A tensor this far below the median is worth a look."""
NAMED = 3


def findings(report: Report) -> list[str]:
    """Sentences on a report, what matters most first; none if nothing was measured."""
    ends = [*series_sentences(report.by_step), *_kept(report)]
    if report.by_axis and any(totals.sum for totals in report.by_axis.values()):
        return [*estimate_sentences(report.sample), *axes_concluded(report), *ends]
    if report.sum is None:
        return []
    return [*estimate_sentences(report.sample), *_error(report), *_outliers(report), *_saturation(report),
            *_underflow(report), *_range(report), *ends]  # fmt: skip


def _error(report: Report) -> Iterator[str]:
    total = report.sum
    assert total is not None
    over = "the only tensor measured" if len(report.layers) == 1 else f"all {counted(len(report.layers), 'tensor')}"
    if total["mse"] == 0:
        yield f"Exact: {over} can be represented without error."
        return
    sqnr = number_of(total, "sqnr_db")
    if sqnr is None:
        yield f"No SQNR exists over {over}: there is no signal, or the noise is not finite."
        return
    known = _ranked(report, "sqnr_db")
    spread = ""
    if len(known) > 1:
        (low, worst), (high, _) = known[0], known[-1]
        spread = f"; single tensors have {significant(low)} to {significant(high)} dB, {printable(worst)} the least"
    yield f"SQNR is {significant(sqnr)} dB over {over}{spread}."


def _outliers(report: Report) -> Iterator[str]:
    known = _ranked(report, "sqnr_db")
    if len(known) < NAMED:
        return
    middle = median(sqnr for sqnr, _ in known)
    low = [name for sqnr, name in known if sqnr < middle - OUTLIER_DB]
    if low:
        more = f" and {len(low) - NAMED:,} more" if len(low) > NAMED else ""
        verb = "lies" if len(low) == 1 else "lie"
        yield (
            f"{counted(len(low), 'tensor')} {verb} more than {OUTLIER_DB:g} dB below the median of "
            f"{significant(middle)} dB: {', '.join(map(printable, low[:NAMED]))}{more}."
        )


def _saturation(report: Report) -> Iterator[str]:
    total = report.sum
    assert total is not None
    if not total["saturated"]:
        yield "Nothing saturates: no element exceeds what its block's scale lets it reach."
        return
    elements, blocks = number_of(total, "saturated_percent"), number_of(total, "saturated_blocks_percent")
    most = _most(report, "saturated_percent")
    yield f"{significant(elements or 0)} % of elements saturate, in {significant(blocks or 0)} % of blocks{most}."


def _underflow(report: Report) -> Iterator[str]:
    total = report.sum
    assert total is not None
    if not total["underflowed"]:
        yield "Nothing underflows: every element that is not zero keeps a code that is not."
    else:
        share = significant(number_of(total, "underflowed_percent") or 0)
        yield f"{share} % of elements underflow to zero{_most(report, 'underflowed_percent')}."
    lost = number_of(total, "scale_underflowed_blocks")
    if lost:
        yield f"{counted(int(lost), 'block')} lost to a scale that became zero or was clamped."


def _range(report: Report) -> Iterator[str]:
    total = report.sum
    assert total is not None
    used, available = number_of(total, "binades_used"), number_of(total, "binades_available")
    low, high = total["scale_exponent_min"], total["scale_exponent_max"]
    if used is not None and available is not None and low is not None:
        yield (
            f"Scales leave {used:.1f} of {available:.1f} binades of the element format in use on average; their "
            f"exponents run from {low} to {high}."
        )


def _kept(report: Report) -> Iterator[str]:
    roles = Counter(layer.role for layer in report.kept if layer.decision == KEPT)
    if roles:
        listed = ", ".join(f"{role} {count:,}" for role, count in roles.most_common())
        yield f"{counted(sum(roles.values()), 'tensor')} kept as stored: {listed}."


def _ranked(report: Report, name: str) -> list[tuple[float, str]]:
    """The tensors that have a metric, least first."""
    known = [(value, layer.name) for layer in report.layers if (value := number_of(layer.metrics, name)) is not None]
    return sorted(known, key=lambda pair: pair[0])


def _most(report: Report, name: str) -> str:
    ranked = _ranked(report, name)
    return f"; most in {printable(ranked[-1][1])} ({significant(ranked[-1][0])} %)" if len(ranked) > 1 else ""
