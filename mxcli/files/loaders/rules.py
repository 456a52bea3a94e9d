"""The table of loader rules: what each engine does with each layout and format.

A rule that was run has the version and month of the run. The others were read in the source or the documents of the
engine's version. What has no rule is not known. The rows of a layout are in `mxcli/files/loaders/rows/`.
"""

from __future__ import annotations

from mxcli.files.loaders.rows import (
    auto_round,
    compressed_tensors,
    fp8,
    gguf,
    gpt_oss,
    mlx,
    modelopt,
    others,
    quark,
    torchao,
)
from mxcli.files.loaders.rule import LoaderRule

_FAMILIES = (compressed_tensors, modelopt, fp8, gpt_oss, torchao, quark, auto_round, mlx, gguf, others)
RULES: tuple[LoaderRule, ...] = tuple(rule for family in _FAMILIES for rule in family.RULES)
