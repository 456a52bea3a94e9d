"""Checks of what is next to codes and is not read: tensors, markers and algorithms that change what the codes mean."""

from __future__ import annotations

from collections.abc import Iterator

from mxcli.errors import printable
from mxcli.files.layouts import QUANTIZATION_CONFIG
from mxcli.files.model_files import CONFIG
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.unread import misread_markers, stated_algorithms, unread_algorithm, unread_parts

_INSTEAD = "Use a loader that reads it; mxcli needs the checkpoint that this one was made from."
_REPORTED = frozenset({"scale", "codes"})
"""Roles of tensors that have checks of their own, alone as they are."""


def _unread(subject: Subject) -> Iterator[Finding]:
    view = subject.view
    if subject.layout is None or view is None or subject.unread is not None:
        return
    for algorithm, layer in stated_algorithms(subject.layout, subject.disk).items():
        where = layer or f"{CONFIG}: {QUANTIZATION_CONFIG}"
        yield Finding(printable(where), unread_algorithm("", algorithm), "an algorithm that is read", _INSTEAD)
    for name, fault in misread_markers(subject.checkpoint, subject.layout).items():
        yield Finding(name, fault, "the order of the layout that the tensors fit", _INSTEAD)
    own = subject.transforms.tensors if subject.transforms.refusal is None else frozenset()
    for info, weight in unread_parts(view.tensors, view.dtypes):
        if info.name not in own and info.role not in _REPORTED:
            yield Finding(
                info.name,
                f"{info.dtype} {list(info.shape)} is not read",
                f"nothing next to the codes of {printable(weight)} but their parts: with it, the weight may be another "
                "one",
                _INSTEAD,
            )


UNREAD_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "not_read",
        PROBLEM,
        "tensors, markers and algorithms next to codes that are not read: what the weights are is not known",
        "every tensor named as a part of a quantized weight, X.comfy_quant, and quant_algo",
        _unread,
    ),
)
