"""Runs the kernels on a device and says why it chose it."""

from __future__ import annotations

from mxcli.errors import EnvironmentFailure, UsageError, printable


def check_device(device: str) -> None:
    """Raises unless `device` (auto, cpu, cuda or cuda:N) is one that this build computes on; auto is the CPU."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (":" in device and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"unknown device '{printable(device)}': --device takes auto, cpu, cuda or cuda:N.")
    if kind == "cuda":
        raise EnvironmentFailure(
            f"--device {device}: this build has no GPU path; use --device cpu. `mxcli doctor` says what is missing."
        )
