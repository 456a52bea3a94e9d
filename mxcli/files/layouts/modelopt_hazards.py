"""Errors of loaders with ModelOpt's checkpoints: documents that differ, scales that are missing, weights that more than
codes make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mxcli.errors import printable
from mxcli.files.layouts.layout import OnDisk, Weight, module_of
from mxcli.files.layouts.loaders import Hazard, listed
from mxcli.files.model_files import PRODUCER_CONFIG

EXCLUDED = "exclude_modules"
ADJUSTED = ("NVFP4_AWQ", "NVFP4_SVD")
"""Algorithms whose weights are codes with tensors that change them."""


def stated_by(disk: OnDisk) -> tuple[Mapping[str, object], str]:
    """Return the configuration that counts, and the key of its list of modules that stay plain."""
    quantization = disk.producer_config.get("quantization")
    if isinstance(quantization, Mapping):
        return quantization, EXCLUDED
    return disk.settings, "ignore"


def hazards(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    """Return what loaders get wrong of a checkpoint and the weights that were found in it."""
    found = []
    stated, key = stated_by(disk)
    if key == EXCLUDED:
        needed = {"NVFP4": ("group_size", "kv_cache_quant_algo", key), "MXFP8": ("kv_cache_quant_algo", key)}
        missing = [each for each in needed.get(str(stated.get("quant_algo")).upper(), ()) if each not in stated]
        if missing:
            found.append(
                Hazard(PRODUCER_CONFIG, "incomplete", f"{', '.join(missing)}: vLLM refuses it without", "Add them.")
            )
        both = (set(listed(stated.get(key))), set(listed(disk.settings.get("ignore"))))
        if disk.settings and both[0] != both[1]:
            differing = sorted(both[0] ^ both[1])
            found.append(
                Hazard(
                    f"config.json and {PRODUCER_CONFIG}",
                    f"ignore and {key} differ in {len(differing):,} entries ('{printable(differing[0])}')",
                    "the same modules: loaders read the one or the other",
                    "Make them equal.",
                    certain=False,
                )
            )
    return found + _disagreements(disk) + _missing_input_scales(disk, weights) + _adjusted_layers(weights)


def _adjusted_layers(weights: Sequence[Weight]) -> list[Hazard]:
    """Return a hazard if tensors next to codes change what the weights are."""
    names = [entry.name for weight in weights for entry in weight.adjusting]
    if not names:
        return []
    more = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
    return [
        Hazard(
            f"{printable(names[0])}{more}",
            "changes what the weight is",
            f"a loader that reads it: TensorRT-LLM reads {ADJUSTED[0]}; vLLM 0.33 refuses that algorithm (read)",
            "Load it there, or use mxcli dequantize, whose values contain it.",
            certain=False,
        )
    ]


def _disagreements(disk: OnDisk) -> list[Hazard]:
    """Return a hazard if both documents do not state the same algorithms: loaders read the one or the other. Versions
    of ModelOpt before 0.35 write one document only."""
    quantization = disk.producer_config.get("quantization")
    if not isinstance(quantization, Mapping):
        return []
    ours, theirs = _stated_algorithms(disk.settings), _stated_algorithms(quantization)
    differing = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if not differing or (not disk.settings and _version(disk) < _BOTH_DOCUMENTS):
        return []
    first = differing[0]
    stated = f"{printable(ours.get(first))} and {printable(theirs.get(first))}" if disk.settings else "none and some"
    return [
        Hazard(
            f"config.json and {PRODUCER_CONFIG}",
            f"{printable(first)} is {stated}",
            "the same quantization in both: loaders read the one or the other",
            "Restore the documents written with these weights.",
        )
    ]


_BOTH_DOCUMENTS = (0, 35)


def _stated_algorithms(stated: Mapping[str, object]) -> dict[str, str]:
    """Return the algorithms that a document states, in capitals: that of all layers as quant_algo, and of single
    ones."""
    layers = stated.get("quantized_layers")
    found: Mapping[str, object] = {"quant_algo": stated, **(layers if isinstance(layers, Mapping) else {})}
    return {
        name: str(each["quant_algo"]).upper()
        for name, each in found.items()
        if isinstance(each, Mapping) and each.get("quant_algo") is not None
    }


def _version(disk: OnDisk) -> tuple[int, ...]:
    """Return the version of ModelOpt that wrote the files; () if they do not state it."""
    producer = disk.producer_config.get("producer")
    text = str(producer.get("version")) if isinstance(producer, Mapping) else ""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())


def _missing_input_scales(disk: OnDisk, weights: Sequence[Weight]) -> list[Hazard]:
    """Return a hazard per weight whose activation scale loaders expect and no tensor holds."""
    groups = disk.settings.get("config_groups")
    each = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    weight_only = bool(each) and all(group.get("input_activations") is None for group in each)
    algorithm = str(stated_by(disk)[0].get("quant_algo")).upper()
    if weight_only or algorithm not in ("NVFP4", "FP8"):
        return []
    names = [f"{module_of(weight)}.input_scale" for weight in weights]
    missing = [name for name in names if name not in disk.tensors]
    return [
        Hazard(
            printable(name),
            "missing",
            f"a scale: {algorithm} has quantized activations, and vLLM takes 1 or uninitialized memory without it",
            "Calibrate the activations, or state W4A16_NVFP4 for weights alone.",
            certain=len(missing) < len(names),
        )
        for name in missing
    ]
