"""Checks of config.json against that of the source: the model is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial

from mxcli.errors import printable
from mxcli.files.directory import GGUF
from mxcli.files.model_files import CONFIG
from mxcli.flows.verify.against.checks import AgainstSource
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding, some

MAY_DIFFER = frozenset(
    {"quantization_config", "compression_config", "quantization", "transformers_version", "torch_dtype", "dtype"}
    | {"_name_or_path", "use_cache", "auto_map", "_commit_hash"}
)
"""Keys of a configuration that do not change what the model computes."""

RENAMED = {"rope_theta": "rope_parameters", "rope_scaling": "rope_parameters", "type": "rope_type"}
"""Keys of configurations, with those that newer versions of transformers write instead."""


def _differing(compared: AgainstSource) -> Iterator[Finding]:
    ours, theirs = compared.subject.checkpoint, compared.originals.checkpoint
    if GGUF in (ours.kind, theirs.kind):
        return
    for path, (one, other) in _changes(ours.config or {}, theirs.config or {}):
        yield Finding(
            CONFIG,
            f"{printable(path)} is {printable(json.dumps(one))[:60]}",
            f"{printable(json.dumps(other))[:60]}, as in the source: the model is another one",
            f"Restore the {CONFIG} of this checkpoint.",
        )


def _changes(
    ours: Mapping[str, object], theirs: Mapping[str, object], within: str = ""
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the path of every value that both configurations have and that differs; producers add and drop keys."""
    for key in ours.keys() & theirs.keys() - MAY_DIFFER:
        one, other = ours[key], theirs[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _changes(one, other, f"{within}{key}.")
        elif one != other and (one == one or other == other):  # NaN is not itself
            yield f"{within}{key}", (one, other)


def _lost(compared: AgainstSource, *, recorded: bool) -> Iterator[Finding]:
    """Yield the settings of the source that the configuration lacks; outputs of mxcli, with a `recorded` origin, keep
    all of them, and other producers leave out the defaults of the model's class."""
    ours, theirs = compared.subject.checkpoint, compared.originals.checkpoint
    if GGUF in (ours.kind, theirs.kind) or compared.subject.record.is_there != recorded:
        return
    config = ours.config or {}
    moved = {key for part in config.values() if isinstance(part, Mapping) for key in part}
    lost = [path for path in _absent(config, theirs.config or {}) if path.rpartition(".")[2] not in moved]
    if lost:
        yield Finding(
            CONFIG,
            f"lacks {some(map(printable, sorted(lost)))}, which the source states",
            "every setting of the source: loaders take a default instead",
            f"Restore the {CONFIG} of this checkpoint.",
        )


def _absent(ours: Mapping[str, object], theirs: Mapping[str, object], within: str = "") -> Iterator[str]:
    """Yield the path of every value that only the source's configuration has; null states nothing."""
    renamed = {old for old, new in RENAMED.items() if new in ours}
    for key in theirs.keys() - MAY_DIFFER - renamed:
        one, other = ours.get(key), theirs[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _absent(one, other, f"{within}{key}.")
        elif key not in ours and other is not None:
            yield f"{within}{key}"


MODEL_CONFIG_CHECKS: tuple[Check[AgainstSource], ...] = (
    Check("model_config", PROBLEM, "a configuration of another model", "every value that both have", _differing),
    Check(
        "lost_setting",
        PROBLEM,
        "settings of the model that are lost",
        "every key of the source's configuration, in outputs of mxcli",
        partial(_lost, recorded=True),
    ),
    Check(
        "left_out_setting",
        WARNING,
        "settings of the model that the producer left out, or that are lost",
        "every key of the source's configuration, in outputs of other producers",
        partial(_lost, recorded=False),
    ),
)
