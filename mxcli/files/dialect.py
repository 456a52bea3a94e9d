"""The quantized layout of a source, detected from its configuration and the names and dtypes of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import printable
from mxcli.files.models.stacks import stores_conv1d
from mxcli.files.tensors import DTYPES, FileContents, TensorInfo

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
BYTES = frozenset({"U8", "I8"})
CODES = FP8 | BYTES | {"F4", "F6_E2M3", "F6_E3M2"}
ANY = frozenset(DTYPES)
UNSCALED, UNKNOWN, BLOCKS = "fp8-unscaled", "unknown", "gguf"
MARKED, OLD_MARKED, MARKER, QUANTIZATION_METADATA = "comfyui", "comfy-fp8", ".comfy_quant", "_quantization_metadata"
"""ComfyUI's files, those of its older form, and the tensor and entry of __metadata__ that state how layers are
stored."""
OWN, OWN_SCALE = "mxcli", "_scale"
"""Our own dialect, and the ending of scales in it: a tensor of any name and type may hold codes."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of a configuration, and of its parts that describe a model each, with settings of the codes."""

# quant_method as configurations spell it, to its dialect; other methods are their own dialect.
METHODS = {
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "fp8": "fp8-block",
    "mxfp8": "mxfp8",
    "mxfp4": "gpt-oss",
    "torchao": "torchao",
    "quark": "quark",
    "auto-round": "auto-round",
    "mlx": "mlx",
    "mxcli": "mxcli",
}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that a signature needs: its name's last segment (or the end of it, `_…`), dtypes, dimensions."""

    ending: str
    dtypes: frozenset[str] = ANY
    dims: range = range(65)


@dataclass(frozen=True, slots=True)
class Signature:
    """A dialect and the leaves that must all occur for it, and an entry of a file's __metadata__ ("": none)."""

    dialect: str
    leaves: tuple[Leaf, ...] = ()
    entry: str = ""


_SCALAR, _GRID = range(1), range(2, 65)
# The first matching signature decides.
SIGNATURES = (
    Signature(MARKED, (Leaf("comfy_quant"),)),
    Signature(MARKED, entry=QUANTIZATION_METADATA),
    Signature("bitsandbytes", (Leaf("absmax"),)),
    Signature("gptq", (Leaf("qweight"), Leaf("g_idx"))),
    Signature("awq", (Leaf("qweight"), Leaf("qzeros"))),
    Signature("torchao", (Leaf("_qdata", CODES), Leaf("_scale"))),
    Signature("gpt-oss", (Leaf("_blocks", BYTES), Leaf("_scales", BYTES))),
    Signature("mlx", (Leaf("weight", frozenset({"U32"})), Leaf("scales"))),
    Signature("compressed-tensors", (Leaf("weight_packed"), Leaf("weight_scale"))),
    Signature("fp8-block", (Leaf("weight", FP8), Leaf("weight_scale_inv"))),
    Signature("fp8-block", (Leaf("weight", CODES), Leaf("scale", frozenset({"F8_E8M0"})))),
    Signature("fp8-block", (Leaf("weight", FP8), Leaf("scale", frozenset({"F32"}), _GRID))),
    Signature("mistral", (Leaf("weight", FP8), Leaf("qscale_weight"))),
    Signature("modelopt", (Leaf("weight", CODES), Leaf("weight_scale_2"))),
    Signature("modelopt", (Leaf("weight", FP8), Leaf("weight_scale", frozenset({"F32"}), _SCALAR))),
    Signature("quark", (Leaf("weight", FP8), Leaf("weight_scale", frozenset({"BF16"}), _SCALAR))),
    Signature("quark", (Leaf("weight", BYTES), Leaf("weight_scale", BYTES))),
    Signature("compressed-tensors", (Leaf("weight", CODES), Leaf("weight_scale"))),
    Signature(OLD_MARKED, (Leaf("weight", FP8), Leaf("scale_weight"))),
    Signature(UNSCALED, (Leaf("weight", FP8),)),
)


def detect_dialect(
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, object] | None,
    producer_config: Mapping[str, object] | None = None,
    metadata: Iterable[str] = (),
) -> tuple[str | None, list[str]]:
    """Return the dialect, or None for plain tensors, and notes on it.

    Blocks that a file types itself decide first. Else `config` (config.json) and `producer_config`
    (hf_quant_config.json) decide, but only if some tensor holds codes; without them the tensors' names and dtypes do,
    and `metadata`, the keys of the files' __metadata__.
    Unexplained codes are the dialect "unknown", so that they are never taken for plain numbers.
    """
    if any(info.block_type for info in tensors.values()):
        return BLOCKS, []
    stated = _stated(config, producer_config)
    if stated == OWN and any(f"{name}{OWN_SCALE}" in tensors for name in tensors):
        return OWN, []
    if not any(info.role == "codes" or info.dtype in FP8 for info in tensors.values()):
        if METHODS.get(stated or "") in _BY_SCALES and any(map(_is_weight_scale, tensors.values())):
            return METHODS[stated or ""], ["The configuration and scales say FP8, but no tensor holds codes."]
        return None, [f"The configuration says {printable(stated)}, but no tensor holds codes."] if stated else []
    if stated in METHODS:
        return METHODS[stated], []
    if stated:
        return stated, [f"Quantized by {printable(stated)}, which this program does not read."]
    seen = _seen(tensors.values(), frozenset(metadata))
    if seen is None:
        codes = [printable(info.name) for info in tensors.values() if info.role == "codes" or info.dtype in FP8]
        named = f"{len(codes):,} tensor{'s' * (len(codes) > 1)} ('{codes[0]}'{', …' * (len(codes) > 1)})"
        return UNKNOWN, [f"{named} of codes by name and dtype, and no known layout fits."]
    if seen == UNSCALED:
        return seen, ["FP8 weights without scales: plain casts, or their scales are missing."]
    return seen, [f"No quantization_config; {seen} is recognized by the names and dtypes of the tensors."]


_BY_SCALES = frozenset({"fp8-block", "mxfp8"})
"""Dialects of files whose weights transformers passes through, with scales next to them, if its blocks divide none."""


def _is_weight_scale(info: TensorInfo) -> bool:
    return info.role == "scale" and info.name.rpartition(".")[2] in ("weight_scale_inv", "weight_scale")


def quantization_settings(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the settings of the codes in a configuration: its own, else those of the first part of it that has some;
    empty without any."""
    for part in (config, *(part for part in config.values() if isinstance(part, Mapping))):
        for key in QUANTIZATION_KEYS:
            found = part.get(key)
            if isinstance(found, Mapping) and found:
                inner = found.get(QUANTIZATION_KEYS[0])
                return inner if isinstance(inner, Mapping) and inner else found
    return {}


def _stated(config: Mapping[str, object] | None, producer_config: Mapping[str, object] | None) -> str | None:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))] if config else []
    for part in parts:
        for key in QUANTIZATION_KEYS:
            found = part.get(key) if part else None
            method = found.get("quant_method") if isinstance(found, dict) else None
            if isinstance(method, str) and method:
                return method.lower()
            if isinstance(found, dict) and "quant_algo" in found:
                return "modelopt"
    quantization = producer_config.get("quantization") if producer_config else None
    if isinstance(quantization, dict) and quantization.get("quant_algo"):
        return "modelopt"
    return "mlx" if any(map(_states_mlx, parts)) else None


def _states_mlx(part: Mapping[str, object]) -> bool:
    """Return whether a configuration has the settings of MLX, which name no method."""
    found = [part.get(key) for key in ("quantization", QUANTIZATION_KEYS[0])]
    return any(isinstance(each, dict) and {"group_size", "bits"} <= each.keys() for each in found)


def _seen(tensors: Iterable[TensorInfo], metadata: frozenset[str]) -> str | None:
    """Return the dialect of the first signature whose leaves and entry all occur."""
    present = {(info.name.rpartition(".")[2], info.dtype, len(info.shape)) for info in tensors}
    for signature in SIGNATURES:
        if signature.entry and signature.entry not in metadata:
            continue
        if all(_occurs(leaf, present) for leaf in signature.leaves):
            return signature.dialect
    return None


def _occurs(leaf: Leaf, present: set[tuple[str, str, int]]) -> bool:
    exact = not leaf.ending.startswith("_")
    return any(
        dtype in leaf.dtypes and dims in leaf.dims and (name == leaf.ending if exact else name.endswith(leaf.ending))
        for name, dtype, dims in present
    )


def remarks(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[Path, Mapping[str, str]],
    tied: Mapping[str, str],
    config: Mapping[str, object] | None,
) -> list[str]:
    """Return notes on alignment, empty tensors, missing metadata, adapters, shared storage and odd names."""
    infos = tensors.values()
    notes = []
    bare = [path.name for path, entries in metadata.items() if "format" not in entries]
    if bare:
        notes.append(f"{_counted(bare, 'file')} without a format in __metadata__; outputs get the usual 'pt'.")
    unaligned = [info.name for info in infos if info.file in metadata and not _aligned(info)]
    if unaligned:
        notes.append(f"{_counted(unaligned, 'tensor')} not aligned to the element size.")
    empty = [info.name for info in infos if not info.elements]
    if empty:
        notes.append(f"{_counted(empty, 'tensor')} without elements.")
    wide = [info.name for info in infos if info.dtype == "F64"]
    if wide:
        notes.append(f"{_counted(wide, 'tensor')} of F64, rounded to binary32 before being quantized or measured.")
    lora = [info.name for info in infos if info.role == "lora"]
    if lora:
        whole = len(lora) == len(tensors)
        notes.append(
            f"LoRA adapter: all {len(lora):,} tensors belong to it; it is not a model by itself."
            if whole
            else f"{_counted(lora, 'tensor')} of a LoRA adapter among other tensors."
        )
    shared = [name for name, stored in tied.items() if name in tensors and stored in tensors]
    if shared:
        notes.append(f"{_counted(shared, 'tensor')} sharing the storage of another; listed under each name.")
    odd = [info.name for info in infos if not info.name.isprintable() or not info.name.strip()]
    if odd:
        notes.append(f"{_counted(odd, 'name')} empty or with control characters, shown escaped.")
    if stores_conv1d(tensors) and not _is_gpt2(config):
        notes.append("Fused attention weights are stored [in, out] as in GPT-2: their reduction runs over dimension 0.")
    return notes


def file_notes(contents: Mapping[Path, FileContents]) -> list[str]:
    """Return the notes of files; a note that several files share is given once."""
    notes: dict[str, list[tuple[Path, str]]] = {}
    for path, part in contents.items():
        for note in part.notes:
            notes.setdefault(note.removeprefix(f"{printable(path)}: "), []).append((path, note))
    return [
        alike[0][1] if len(alike) == 1 else f"{_counted([path.name for path, _ in alike], 'file')}, each: {note}"
        for note, alike in notes.items()
    ]


def _aligned(info: TensorInfo) -> bool:
    return info.offset % DTYPES[info.dtype].storage_bytes == 0


def _is_gpt2(config: Mapping[str, object] | None) -> bool:
    return config is not None and config.get("model_type") == "gpt2"


def _counted(names: Iterable[str], noun: str) -> str:
    """Return number, noun and the first name: "3 tensors ('a', …)"."""
    listed = list(names)
    plural = noun if len(listed) == 1 else f"{noun}s"
    return f"{len(listed):,} {plural} ('{printable(listed[0])}'{', …' if len(listed) > 1 else ''})"
