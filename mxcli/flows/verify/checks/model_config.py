"""Checks of config.json against that of the source: the model is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from mxcli.errors import printable
from mxcli.files.directory import GGUF
from mxcli.files.model_files import CONFIG
from mxcli.flows.verify.against.checks import AgainstSource
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding

MAY_DIFFER = frozenset(
    {"quantization_config", "compression_config", "quantization", "transformers_version", "torch_dtype", "dtype"}
    | {"_name_or_path", "use_cache", "auto_map", "_commit_hash"}
)
"""Keys of a configuration that do not change what the model computes."""


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
        elif one != other:
            yield f"{within}{key}", (one, other)


MODEL_CONFIG_CHECKS: tuple[Check[AgainstSource], ...] = (
    Check("model_config", PROBLEM, "a configuration of another model", "every value that both have", _differing),
)
