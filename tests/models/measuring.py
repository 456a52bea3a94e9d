"""Helpers of the tests in this folder: reports and tensors of a model, in process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.files.selection import Rule
from mxcli.flows.measure.report import LayerReport, Report, make_report
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.numerics.scheme import Rules

FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))


def report(source: Path | Checkpoint, format: str, rule: str | None = None, include: tuple[str, ...] = ()) -> Report:
    """What `mxcli report` computes."""
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    selection = tuple(Rule(True, selector) for selector in include)
    options = Options(
        format, Rules(scale_rounding=rule, nonfinite="saturate"), on_indivisible="pad", selection=selection
    )
    return make_report(str(checkpoint.root), checkpoint, make_plan(checkpoint, options), backend=Cpu())


def layer(of: Report, name: str) -> LayerReport:
    """One tensor of a report."""
    return next(layer for layer in of.layers if layer.name == name)


def total(of: Report, key: str) -> Any:
    """A metric of all tensors together."""
    assert of.sum is not None
    return of.sum[key]


def weight(checkpoint: Checkpoint, name: str) -> npt.NDArray[np.float32]:
    """A tensor as binary32, into which every type it may have widens exactly."""
    info = checkpoint.tensors[name]
    x = read(checkpoint, info)
    return (x.astype(np.uint32) << 16).view(np.float32) if info.dtype == "BF16" else x.astype(np.float32)


def fused_amax(checkpoint: Checkpoint, name: str) -> float:
    """The largest magnitude of a weight and of those that loaders fuse with it."""
    return max(float(np.abs(weight(checkpoint, member)).max()) for member in fused(name))


def fused(name: str) -> list[str]:
    """Names of the weights that loaders fuse, such as query, key and value; of any other weight its own."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    members = next((members for members in FUSED if module in members), (module,))
    return [f"{prefix}.{member}.weight" for member in members]


def run(*arguments: object, code: int = 0) -> str:
    """What the program prints, which must exit with the code: its result, or its error where it fails."""
    command = [sys.executable, "-m", "mxcli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout
