"""Outputs that loaders would misread, refused from headers alone: lists of plain modules that catch a quantized one,
and old scales next to new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mxcli.errors import RefusedError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.layouts import MXCLI, Layout, OnDisk, Weight
from mxcli.files.layouts.layout import module_of
from mxcli.files.layouts.loaders import unread
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG
from mxcli.files.tensors import TensorInfo

_PATTERN = frozenset("*?[:")
"""Characters of which loaders make a pattern."""


def refuse_caught(
    checkpoint: Checkpoint, layout: Layout, configs: Mapping[str, Mapping[str, object]], weights: Sequence[Weight]
) -> None:
    """Raise RefusedError with every weight that loaders would not look for codes of, since the list of modules that
    stay plain catches it, as they read its entries; or with every entry that they cannot read."""
    ignored = layout.ignored(OnDisk({}, configs[CONFIG], configs.get(PRODUCER_CONFIG, {})))
    modules = [module_of(weight) for weight in weights]
    everything = "\n".join(modules)
    # Of thousands of modules, few have the text of an entry in their names.
    entries = (
        [each for each in ignored.entries if each in everything or not _PATTERN.isdisjoint(each)] if ignored else []
    )
    if ignored is None or not entries:
        return
    doubtful = replace(ignored, entries=tuple(entries))
    faults = unread(doubtful)
    if faults:
        raise together(
            RefusedError,
            f"{printable(checkpoint.where)}: not supported by the layout {layout.name}",
            [
                f"{printable(entry)}: stays plain, and loaders of the layout {layout.name} would not find it in their "
                f"list: {fault}. Rename it, or use --layout {MXCLI.name}."
                for entry, fault in faults.items()
            ],
        )
    caught = [(module, entry) for module in modules if (entry := doubtful.by(module)) is not None]
    if caught:
        raise together(
            RefusedError,
            f"{printable(checkpoint.where)}: not supported by the layout {layout.name}",
            [
                f"{module}: loaders of the layout {layout.name} would take it for plain, since '{entry}' is: "
                f"they read {ignored.reading}. Use --exclude '{module}.*', or --layout {MXCLI.name}."
                for module, entry in ((printable(module), printable(entry)) for module, entry in caught)
            ],
        )


def refuse_stale(checkpoint: Checkpoint, kept: Sequence[TensorInfo], weights: Sequence[Weight]) -> None:
    """Raise RefusedError with every scale of the source that belongs to a weight that gets new ones."""
    names = {weight.name for weight in weights}
    stale = [info.name for info in kept if info.role == "scale" and info.name.rpartition("_scale")[0] in names]
    if stale:
        problems = [
            f"{printable(name)}: is named as a scale of {printable(name.rpartition('_scale')[0])}, which gets new "
            "scales: loaders could apply both. Remove it from the source, or keep the weight plain with --exclude."
            for name in stale
        ]
        raise together(RefusedError, f"{printable(checkpoint.where)}: scales of plain weights", problems)
