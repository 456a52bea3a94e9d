"""A diagnosis as text made for pasting into an issue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mxcli.flows.doctor import Diagnosis
from mxcli.output.formats import facts_lines
from mxcli.output.numbers import byte_size
from mxcli.output.screen import Screen


def doctor_text(diagnosis: Diagnosis, screen: Screen) -> str:
    """Aligned facts, one line each."""
    kernel, gpu = diagnosis.kernel, diagnosis.gpu
    return "\n".join(
        [
            f"mxcli {diagnosis.version}",
            *facts_lines(
                {
                    "python": diagnosis.python,
                    "system": diagnosis.system,
                    "packages": _versions(diagnosis.packages),
                    "processor": diagnosis.processor,
                    "threads": f"{diagnosis.threads}",
                    "memory": byte_size(diagnosis.memory_bytes) if diagnosis.memory_bytes else "unknown",
                    "instruction set": f"{kernel.instruction_set or 'none'} in use; "
                    f"this processor has {', '.join(diagnosis.instruction_sets)}",
                    "CPU kernel": kernel.problem or f"compiled by {kernel.compiler or 'an unknown compiler'}",
                    "C++ compiler": diagnosis.compiler_found or "none found (needed only to install mxcli)",
                    "NVIDIA driver": f"{gpu.driver or 'none'}, devices: {gpu.devices}",
                    "GPU packages": _versions(gpu.packages),
                    "GPU": f"not used: {', '.join(gpu.unusable_because)}",
                },
                screen,
            ),
        ]
    )


def doctor_record(diagnosis: Diagnosis) -> dict[str, object]:
    """The same for JSON."""
    return asdict(diagnosis)


def _versions(packages: Mapping[str, str | None]) -> str:
    found = [f"{name} {version}" for name, version in packages.items() if version]
    missing = [name for name, version in packages.items() if version is None]
    return ", ".join(found or ["none"]) + (f" (not installed: {', '.join(missing)})" if missing else "")
