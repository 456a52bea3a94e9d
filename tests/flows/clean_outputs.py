"""Outputs in which every tensor is read by their layout, and no setting, marker or document is of another one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tiny_models import read_header

from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.dialect import MARKER, QUANTIZATION_METADATA
from mxcli.flows.write.omitted import ACTIVATION_SCALES
from mxcli.flows.write.restore import plain_view, quantized_settings

INPUT_SCALES = {
    "compressed-tensors": (".input_global_scale", ".input_scale"),
    "modelopt": (".input_scale",),
    "comfy": (".input_scale",),
}
"""The endings of the scales of inputs that a layout's loaders take."""
CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale")
OF_LAYOUTS = ("qdata", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
"""Last parts of names that only codes and scales have."""


def assert_clean(folder: Path) -> None:
    """Every tensor of an output is read, and nothing in it is left from another layout."""
    checkpoint = open_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    stated = set(quantized_settings(config))
    keys = {key for entries in checkpoint.metadata.values() for key in entries} - {"format"}
    if checkpoint.dialect is None:
        assert not stated, f"a plain output states {stated}"
        assert not keys & {"tensor_names", QUANTIZATION_METADATA}
        assert not (folder / "hf_quant_config.json").exists()
        plain = checkpoint.tensors
    else:
        view = plain_view(checkpoint)
        layout, plain = view.layout, view.tensors
        taken = INPUT_SCALES.get(layout.name, ())
        left = [name for name in view.unused if not name.endswith((*taken, MARKER, "scaled_fp8"))]
        assert not left, f"no loader of {layout.name} reads {left}"
        assert layout.name == "comfy" or not any(name.endswith(MARKER) for name in checkpoint.tensors)
        settings = set(layout.settings_keys) if layout.settings([s.weight for s in view.weights.values()], ()) else ()
        assert stated == set(settings), f"config.json has settings of other layouts: {stated}"
        assert (folder / "hf_quant_config.json").exists() == (layout.name == "modelopt")
        assert (QUANTIZATION_METADATA in keys) == (layout.name == "comfy")
        _check_torchao(checkpoint.files, layout.name, keys)
    others = [
        name
        for name, info in plain.items()
        if (view_name := name.rpartition(".")[2]) in OF_LAYOUTS
        or view_name.lstrip("_") in OF_LAYOUTS
        or name.endswith(ACTIVATION_SCALES)
        or (info.role == "scale" and not name.endswith(CACHE))
    ]
    assert not others, f"left as plain tensors: {others}"


def _check_torchao(files: Iterable[Path], layout: str, keys: set[str]) -> None:
    """The headers of torchao describe every parameter, those of other layouts none."""
    if layout != "torchao":
        assert "tensor_names" not in keys
        return
    for shard in files:
        described = json.loads(read_header(shard)["__metadata__"]["tensor_names"])
        assert set(described) <= keys
