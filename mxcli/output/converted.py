"""Outputs of `mxcli convert`: plans, and a line and a record on one that is written."""

from __future__ import annotations

from collections.abc import Sequence

from mxcli.errors import printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.progress import Share
from mxcli.files.record_schema import CONVERTED_FROM
from mxcli.flows.write.convert import Conversion, Converted
from mxcli.output.export import json_text
from mxcli.output.loaders import LOADER, loader_lines
from mxcli.output.numbers import byte_size, counted
from mxcli.output.plans import written_records
from mxcli.output.screen import Screen, folded_lines
from mxcli.output.site import Site, memory_record, memory_words
from mxcli.output.written import accounting_words, output_files, share_line, share_record

UNKNOWN_RULES = "the rules that made the codes are not known, since the source has no record of them"


def _counts(conversion: Conversion) -> str:
    """Return the number of weights by format."""
    listed = ", ".join(f"{count:,} {name}" for name, count in conversion.formats.items())
    return f"{counted(len(conversion.carried), 'weight')} ({listed})"


def _fields(source: str, checkpoint: Checkpoint, conversion: Conversion, notes: Sequence[str]) -> dict[str, object]:
    arrangement = conversion.arrangement
    return {
        "source": source,
        CONVERTED_FROM: conversion.view.layout.name,
        "layout": arrangement.layout.name,
        "weights": len(conversion.carried),
        "formats": conversion.formats,
        "rules_known": conversion.known is not None,
        "files": output_files(checkpoint, arrangement),
        "output_bytes": arrangement.output_bytes,
        "ignored": list(arrangement.ignored),
        "notes": list(notes),
        "loaders": [LOADER.record(verdict) for verdict in arrangement.loaders],
    }


def conversion_text(checkpoint: Checkpoint, conversion: Conversion, site: Site, screen: Screen) -> str:
    """Return the text of what `convert` would write."""
    arrangement = conversion.arrangement
    files, layout = output_files(checkpoint, arrangement), arrangement.layout
    lines = [
        f"would carry {_counts(conversion)} over from {conversion.view.layout.name} to {layout.name}",
        f"layout {layout.name}: {layout.meaning}",
        *([] if conversion.known else [UNKNOWN_RULES]),
        f"final size {byte_size(arrangement.output_bytes)}; {memory_words(conversion.need, site)}",
        f"would write {counted(len(files), 'file')}: {', '.join(map(printable, files))}",
        *loader_lines(arrangement.loaders, arrangement.engines),
        *([] if site.free_bytes is None else [f"free disk {byte_size(site.free_bytes)} at {printable(site.folder)}"]),
    ]
    return "\n".join(line for each in lines for line in folded_lines(each, screen))


def conversion_json(
    source: str, checkpoint: Checkpoint, conversion: Conversion, site: Site, notes: Sequence[str]
) -> str:
    """Return the same as JSON."""
    content = {
        **_fields(source, checkpoint, conversion, notes),
        **memory_record(conversion.need, site),
        "free_disk_bytes": site.free_bytes,
        "output": site.folder,
        "tensors": written_records(conversion.arrangement.tasks),
    }
    return json_text("convert.plan", content)


def converted_line(converted: Converted, share: Share | None) -> str:
    """Return a line on what was written."""
    arrangement = converted.conversion.arrangement
    if share is not None:
        return share_line(arrangement, str(converted.folder), share)
    rules = "" if converted.conversion.known else f"; {UNKNOWN_RULES}"
    return (
        f"written to {printable(converted.folder)}: {_counts(converted.conversion)} carried over from "
        f"{converted.conversion.view.layout.name} to {arrangement.layout.name}{rules}; "
        f"{accounting_words(converted.accounting)}"
    )


def converted_json(
    source: str, checkpoint: Checkpoint, converted: Converted, share: Share | None, notes: Sequence[str]
) -> str:
    """Return the same as JSON."""
    content = {
        **_fields(source, checkpoint, converted.conversion, notes),
        **({} if share is None else share_record(converted.conversion.arrangement, str(converted.folder), share)),
        "output": str(converted.folder),
        "accounting": converted.accounting.record(),
    }
    return json_text("convert", content)
