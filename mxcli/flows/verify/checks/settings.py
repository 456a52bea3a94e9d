"""Checks of the settings that describe the codes: values that loaders know."""

from __future__ import annotations

from collections.abc import Iterator

from mxcli.errors import printable
from mxcli.files.layouts import QUANTIZATION_CONFIG
from mxcli.files.layouts.known_settings import unknown_settings
from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding
from mxcli.flows.verify.subject import Subject


def _unknown(subject: Subject) -> Iterator[Finding]:
    if subject.layout is None or subject.unread is not None:
        return  # a format that is not read may have settings that are not known
    disk, view = subject.disk, subject.view
    documents = {CONFIG: disk.settings, PRODUCER_CONFIG: disk.producer_config}
    known = not subject.misfits and view is not None and not view.foreign
    formats = {stored.weight.format.name for stored in subject.weights.values()} if known else set()
    stated = {name: content for name, content in documents.items() if content}
    for setting in unknown_settings(stated, subject.layout.known_settings, formats):
        within = f"{QUANTIZATION_CONFIG}." if setting.document == CONFIG else ""
        yield Finding(
            setting.document,
            f"{within}{printable(setting.path)} {printable(setting.value)}",
            f"what loaders know for these weights: {setting.needs}",
            f"Restore the {setting.document} written with these weights.",
        )


SETTINGS_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "setting",
        PROBLEM,
        "settings of the configuration that no loader knows, or that describe other weights",
        "every setting that loaders of the layout read, against the values they know",
        _unknown,
    ),
)
