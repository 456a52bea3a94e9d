"""PEFT adapters that are more than LoRA matrices: they must be merged into their base model first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from mxcli.errors import InputError, printable
from mxcli.files.plain import read_json_object
from mxcli.files.safetensors import read_safetensors

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = re.compile(r"adapter_model\.(safetensors|bin)")
PARTS_OF_ADAPTERS = frozenset({"lora", "buffer"})
OF_INPUTS = frozenset(
    {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"}
)
"""Types of adapters (`peft_type`) that change what a model reads, not its weights."""


def refuse_adapter(root: Path, files: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError if files, chosen of the names in a folder, are an adapter that also holds whole modules of its
    model, or one without matrices to merge."""
    if not files or ADAPTER_CONFIG not in names or not all(map(ADAPTER_FILE.fullmatch, files)):
        return
    config = read_json_object(root / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind in OF_INPUTS:
        raise InputError(
            f"{printable(root)}: a PEFT adapter of type {printable(kind)}, which adds inputs and has no weights of "
            "layers; give its base model."
        )
    modules = config.get("modules_to_save")
    saved = [str(module) for module in modules] if isinstance(modules, list) else []
    found = saved or _whole_tensors(root, files)
    if found:
        listed = ", ".join(map(printable, found[:5])) + (f" and {len(found) - 5:,} more" if len(found) > 5 else "")
        what = "whole modules next to its matrices (modules_to_save: " if saved else "more than LoRA matrices ("
        base = config.get("base_model_name_or_path")
        of_base = f" ({printable(base)})" if isinstance(base, str) and base else ""
        raise InputError(
            f"{printable(root)}: a PEFT adapter with {what}{listed}); merge it into "
            f"its base model{of_base} first: PeftModel.from_pretrained(base, {printable(root)!r})"
            ".merge_and_unload().save_pretrained(OUT)."
        )


def _whole_tensors(root: Path, files: Sequence[str]) -> list[str]:
    """Return the matrices of safetensors files of an adapter that are not its own."""
    infos = [info for file in files if file.endswith(".safetensors") for info in read_safetensors(root / file).tensors]
    return [info.name for info in infos if len(info.shape) > 1 and info.role not in PARTS_OF_ADAPTERS]
