"""What `mxcli capture` will record or has recorded: a plan as text and JSON, a result as JSON."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from mxcli.errors import printable
from mxcli.files.capture_writer import CapturedTensor, StepName
from mxcli.flows.capture.plan import CapturePlan
from mxcli.flows.capture.run import CaptureRun
from mxcli.output.export import json_text
from mxcli.output.numbers import ABSENT, byte_size, counted, shape_text
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned


def capture_plan_text(plan: CapturePlan, screen: Screen) -> str:
    """The layers with what of each goes to a step's file, and what that takes."""
    windows = plan.windows
    first, *lines = folded_lines(
        f"{printable(plan.source)}: {counted(len(plan.layers), 'linear layer')}, {plan.model.dtype}; "
        f"{counted(windows.steps, 'step')} of {windows.batch:,} x {windows.tokens:,} tokens of "
        f"{printable(plan.text.name)}",
        screen,
    )
    roles = plan.asked.recorded
    columns = (Column("layer", right=False), Column("weight", right=False, drop=1), *(Column(role) for role in roles))
    tensors = {tensor.name: tensor for tensor in plan.tensors}
    rows: list[Row] = [
        [
            printable(layer.name),
            shape_text((layer.outputs, layer.inputs)),
            *(byte_size(tensors[f"{layer.name}.{role}"].nbytes) for role in roles),
        ]
        for layer in plan.layers
    ]
    sums = [byte_size(nbytes) for nbytes in _bytes_by_role(plan.tensors, roles).values()]
    rows += [None, [f"all {len(plan.layers):,} layers", ABSENT, *sums]]
    steps = windows.steps
    kept = f", of which {len(plan.kept):,} are there" if plan.kept else ""
    needs = (
        f"disk: {byte_size(plan.size.disk)} a step, {byte_size(steps * plan.size.disk)} in all{kept}; "
        f"{byte_size(_free(plan))} available"
    )
    memory = f"memory: about {byte_size(plan.memory_bytes)}, {byte_size(plan.model.nbytes)} of it weights"
    ending = [*folded_lines(needs, screen), *folded_lines(memory, screen)]
    return "\n".join([bold(first, screen), *lines, "", *aligned(columns, rows, screen), "", *ending])


def capture_plan_json(plan: CapturePlan) -> str:
    """The same as one JSON object."""
    return json_text(
        "capture.plan",
        {
            **_asked(plan),
            "disk_bytes_per_step": plan.size.disk,
            "disk_bytes": plan.windows.steps * plan.size.disk,
            "memory_bytes": plan.memory_bytes,
            "weight_bytes": plan.model.nbytes,
            "steps_there": sorted(plan.kept),
            "notes": list(plan.notes),
            "tensors": [
                {
                    "name": tensor.name,
                    "layer": tensor.layer,
                    "role": tensor.role,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "bytes": tensor.nbytes,
                }
                for tensor in plan.tensors
            ],
        },
    )


def capture_json(captured: CaptureRun) -> str:
    """What was recorded, as one JSON object."""
    plan = captured.plan
    return json_text(
        "capture",
        {
            **_asked(plan),
            "bytes": captured.nbytes,
            "seconds": captured.seconds,
            "steps": [
                {
                    "step": step,
                    "file": str(plan.place.folder / str(StepName(step))),
                    "loss": loss,
                    "resumed": step not in captured.made,
                }
                for step, loss in captured.losses.items()
            ],
            "notes": [*plan.notes, *captured.notes],
        },
    )


def _asked(plan: CapturePlan) -> dict[str, object]:
    windows = plan.windows
    return {
        "source": plan.source,
        "output": str(plan.place.folder),
        "text": plan.text.name,
        "layers": [layer.name for layer in plan.layers],
        "roles": list(plan.asked.recorded),
        "dtype": plan.model.dtype,
        "batch": windows.batch,
        "tokens_per_window": windows.tokens,
        "tokens": windows.steps * windows.step_tokens,
        "sample_rows": plan.asked.sample_rows,
        "seed": plan.asked.seed,
        "learning_rate": plan.asked.learning_rate,
    }


def _bytes_by_role(tensors: Sequence[CapturedTensor], roles: Sequence[str]) -> Mapping[str, int]:
    return {role: sum(tensor.nbytes for tensor in tensors if tensor.role == role) for role in roles}


def _free(plan: CapturePlan) -> int:
    folder = plan.place.folder.absolute()
    return shutil.disk_usage(next(parent for parent in (folder, *folder.parents) if parent.is_dir())).free
