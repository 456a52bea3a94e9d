"""Sources that are not the model that their config.json states: no output of them could be sound."""

from __future__ import annotations

from mxcli.errors import InputError, printable, together
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.directory import SHARD_NAME
from mxcli.flows.verify.checks.check import Findings
from mxcli.flows.verify.checks.expected import Expected
from mxcli.flows.verify.checks.layers import LAYER_CHECKS, Layers
from mxcli.flows.verify.checks.model import MODEL_CHECKS
from mxcli.flows.verify.checks.model_rows import USUAL
from mxcli.flows.verify.checks.text_model import Model
from mxcli.flows.verify.subject import Subject

_MODEL = tuple(check for check in MODEL_CHECKS if check.name in ("layers", "experts", "model_shape", "model_ends"))
_LAYERS = tuple(check for check in LAYER_CHECKS if check.name == "incomplete_layer")


def _is_shard(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is one of several shards, given alone."""
    names = [SHARD_NAME.fullmatch(path.name) for path in checkpoint.files]
    return len(names) == 1 and names[0] is not None and int(names[0][3]) > 1


def refuse_incomplete(checkpoint: Checkpoint) -> None:
    """Raise InputError for a plain source without the layers or experts that its configuration counts, with shapes that
    contradict it, or with a layer that lacks what the others have: `verify` would call every output not sound."""
    if checkpoint.dialect is not None or checkpoint.config is None or _is_shard(checkpoint):
        return
    subject = Subject(checkpoint, None, None, {}, None)
    findings = Findings()
    expected = Expected(subject, USUAL)
    findings.run(_MODEL, Model(subject, expected))
    findings.run(_LAYERS, Layers(subject, expected))
    problems = [
        f"{printable(finding.where)}: {finding.value}; needed: {finding.need}. {finding.way_out}"
        for result in findings.results((*_MODEL, *_LAYERS))
        for finding in result.findings
    ]
    if problems:
        what = "the source is not the model that its config.json states (with --no-verify it is quantized as it is)"
        headline = f"{printable(checkpoint.root)}: {what}"
        raise together(InputError, headline, [f"{headline}: {problems[0]}"] if len(problems) == 1 else problems)
