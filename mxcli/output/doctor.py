"""A diagnosis of the machine as text and as a JSON record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mxcli.backends.gpus import Gpu, Version
from mxcli.errors import printable
from mxcli.flows.doctor import Diagnosis
from mxcli.output.formats import facts_lines
from mxcli.output.numbers import byte_size
from mxcli.output.screen import Screen


def doctor_text(diagnosis: Diagnosis, screen: Screen) -> str:
    """Return aligned facts, one line each."""
    kernel = diagnosis.kernel
    return "\n".join(
        [
            f"mxcli {diagnosis.version}",
            *facts_lines(
                {
                    "python": diagnosis.python,
                    "system": diagnosis.system,
                    "packages": _versions(diagnosis.packages),
                    "extras": _extras(diagnosis.extras),
                    "processor": diagnosis.processor,
                    "threads": f"{diagnosis.threads}",
                    "memory": byte_size(diagnosis.memory_bytes) if diagnosis.memory_bytes else "unknown",
                    "instruction set": f"{kernel.instruction_set or 'none'} in use; "
                    f"this processor has {', '.join(diagnosis.instruction_sets)}",
                    "CPU kernel": kernel.problem or f"compiled by {kernel.compiler or 'an unknown compiler'}",
                    "C++ compiler": diagnosis.compiler_found or "none found (needed only to install mxcli)",
                    **_gpu_facts(diagnosis),
                },
                screen,
            ),
        ]
    )


def doctor_record(diagnosis: Diagnosis) -> dict[str, object]:
    """Return the diagnosis for JSON."""
    record = asdict(diagnosis)
    record["gpu"]["usable"] = [gpu.device for gpu in diagnosis.gpu.usable]
    return record


def _gpu_facts(diagnosis: Diagnosis) -> dict[str, str]:
    """Return the driver, each GPU, what it needs, and whether one is usable."""
    state = diagnosis.gpu
    facts = {
        "NVIDIA driver": f"{diagnosis.driver_release or 'installed'}, serves CUDA {_dotted(state.driver)}"
        if state.driver
        else diagnosis.driver_release or "none",
        **{gpu.device: _gpu_words(gpu) for gpu in state.gpus},
        "CuPy": state.cupy or "not installed",
        "NVRTC": _dotted(state.nvrtc) if state.nvrtc else "none",
        "GPU": f"{', '.join(gpu.device for gpu in state.usable)} usable" if state.usable else "none usable",
    }
    for number, problem in enumerate(state.problems, 1):
        facts[f"GPU problem {number}"] = problem
    return facts


def _gpu_words(gpu: Gpu) -> str:
    memory = byte_size(gpu.memory_bytes)
    return f"{printable(gpu.name)}, compute capability {_dotted(gpu.capability)}, {memory}"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _versions(packages: Mapping[str, str | None]) -> str:
    found = [f"{name} {version}" for name, version in packages.items() if version]
    missing = [name for name, version in packages.items() if version is None]
    return ", ".join(found or ["none"]) + (f" (not installed: {', '.join(missing)})" if missing else "")


def _extras(extras: Mapping[str, bool]) -> str:
    """Return the extras that are installed, those that are not, and the command that installs one."""
    found, missing = ([name for name, there in extras.items() if there is wanted] for wanted in (True, False))
    lacks = f"; not installed: {', '.join(missing)} (pip install 'mxcli[NAME]')" if missing else ""
    return ", ".join(found or ["none"]) + lacks
