from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment

from mxcli.backends import cpu, gpus
from mxcli.errors import EnvironmentFailure
from mxcli.flows import doctor


def test_the_machine_as_the_backend_sees_it() -> None:
    found = doctor.examine()
    assert found.version == doctor.own_version() == "0.1.0"
    assert found.kernel.instruction_set == cpu.instruction_set()
    assert found.kernel.compiler is not None
    assert found.threads == cpu.thread_count()
    assert found.packages["numpy"] is not None
    assert found.gpu == gpus.examine()


def test_a_missing_kernel_is_a_finding_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise EnvironmentFailure("the CPU kernel is not installed")

    monkeypatch.setattr("mxcli.backends.abi.kernel_folder", missing)
    assert doctor.examine().kernel == doctor.Kernel(None, None, None, "the CPU kernel is not installed")


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from mxcli.flows.doctor import examine; examine(); print({'torch', 'cupy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_free_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert doctor.free_bytes(tmp_path / "a" / "b") > 0
