"""Checks of files and tensors: what is there, fits, and is found by a loader."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mxcli.errors import InputError, UsageError
from mxcli.files.checkpoint import read
from mxcli.files.directory import ShardIndex, read_index
from mxcli.files.model_files import RECORD
from mxcli.files.plain import read_head
from mxcli.files.safetensors import looks_like_safetensors, read_safetensors
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, TensorInfo
from mxcli.flows.verify.check import NOTE, PROBLEM, WARNING, Check, Finding, some
from mxcli.flows.verify.errors import widened
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.restore import StoredWeight
from mxcli.numerics.hadamard import signs_text
from mxcli.numerics.scheme import TENSOR_RULES, Rules, Scheme, overlaid, resolve

CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".output_scale", ".prob_scale", ".prob_output_scale")
"""Scales of attention, which belong to no weight."""
_PIECE = 1 << 24
_AGAIN = "Quantize it again, or update safetensors."


def _misfits(subject: Subject) -> Iterator[Finding]:
    for where, fault in subject.misfits.items():
        yield Finding(
            where, fault.rstrip("."), "tensors as the configuration says, or the reverse", "Quantize it again."
        )


def _left_over(subject: Subject, role: str) -> Iterator[TensorInfo]:
    """Yield tensors of a role that no weight is made of; parts of misfits, which are told already, are left out."""
    tensors = subject.checkpoint.tensors if subject.seen is None else subject.seen.tensors
    told = tuple(name.removesuffix(".weight") + end for name in subject.misfits for end in (".", "_"))
    for name, info in tensors.items():
        alone = info.role == role and name not in subject.weights and name not in subject.misfits
        if alone and not (told and name.startswith(told)):
            yield info


def _codes_alone(subject: Subject) -> Iterator[Finding]:
    for info in _left_over(subject, "codes"):
        yield Finding(
            info.name,
            f"{info.dtype} {list(info.shape)} without a scale",
            "a scale: loaders take such codes for plain numbers, or for scaled by 1",
            "Copy its scale from the original, or quantize it again.",
        )


def _scales_alone(subject: Subject) -> Iterator[Finding]:
    for info in _left_over(subject, "scale"):
        if not info.name.endswith(CACHE_SCALES):
            yield Finding(
                info.name,
                f"{info.dtype} {list(info.shape)} belongs to no quantized weight",
                "its codes: a loader finds no place for it, or a weight is missing",
                "Copy the codes from the original, or leave the scale out.",
            )


def _twice(subject: Subject) -> Iterator[Finding]:
    for name, stored in subject.weights.items():
        parts = {content.entry.name for content in stored.contents}
        if name in subject.checkpoint.tensors and name not in parts:
            yield Finding(
                name,
                f"stored plain, and as {some(sorted(parts))}",
                "one of them: loaders take either",
                "Leave the plain one out.",
            )


def _index(subject: Subject) -> ShardIndex | None:
    path = subject.checkpoint.index
    try:
        return None if path is None else read_index(path)
    except InputError:
        return None


def _misplaced(subject: Subject) -> Iterator[Finding]:
    index = _index(subject)
    if index is None:
        return
    for name, info in subject.checkpoint.tensors.items():
        told = index.weight_map.get(name)
        if told is None:
            yield Finding(
                name,
                f"is in {info.file.name}, and {index.path.name} does not name it",
                "an entry of the weight_map: loaders that follow the index leave it out",
                "Add it to the weight_map.",
            )
        elif told != info.file:
            yield Finding(
                name,
                f"is in {info.file.name}, and {index.path.name} says {told.name}",
                "the shard that holds it",
                "Correct the weight_map.",
            )


def _total_size(subject: Subject) -> Iterator[Finding]:
    index = _index(subject)
    if index is None:
        return
    stored = sum(info.nbytes for info in subject.checkpoint.tensors.values())
    if index.total_size != stored:
        yield Finding(
            index.path.name,
            "states no total_size" if index.total_size is None else f"states total_size {index.total_size}",
            f"{stored:,} bytes, which its tensors hold: tools plan memory by it",
            f"Set metadata.total_size to {stored}.",
        )


def _unaligned(subject: Subject) -> Iterator[Finding]:
    by_file: dict[str, list[TensorInfo]] = {}
    for info in subject.checkpoint.tensors.values():
        if info.offset != IN_MEMORY and info.offset % DTYPES[info.dtype].storage_bytes:
            by_file.setdefault(info.file.name, []).append(info)
    for file, infos in by_file.items():
        yield Finding(
            file,
            f"{len(infos):,} tensors not aligned to their elements, the first {infos[0].name} at {infos[0].offset:,}",
            "nothing: readers that map the file copy them",
        )


def _activation_scales(subject: Subject) -> Iterator[Finding]:
    for name, values in activation_scales(subject):
        if not (np.isfinite(values).all() and (values > 0).all()):
            yield Finding(
                name,
                f"{float(values.reshape(-1)[0]):g}" if values.size else "empty",
                "finite scales above 0: activations are divided or multiplied by it",
                "Calibrate the activations again.",
            )


def activation_scales(subject: Subject) -> Iterator[tuple[str, Array]]:
    """Scale of activations that lie beside weights, by value."""
    for name in subject.seen.unused if subject.seen is not None else ():
        info = subject.checkpoint.tensors[name]
        if info.dtype in ("F32", "F64", "F16", "BF16") and info.elements <= _PIECE:
            yield name, widened(read(subject.checkpoint, info), info.dtype)


def _recorded(subject: Subject) -> Iterator[Finding]:
    root = subject.checkpoint.root
    for name, sha256 in subject.recorded_files.items():
        path = root / name
        if not path.is_file():
            yield Finding(name, "missing", f"the file that {RECORD} records", "Copy it again.")
        elif sha256 is not None and _sha256(path) != sha256:
            yield Finding(name, "other content", f"the SHA-256 that {RECORD} records", "Copy it again.")


def _library(subject: Subject) -> Iterator[Finding]:
    from safetensors import SafetensorError, safe_open

    for path in dict.fromkeys(info.file for info in subject.checkpoint.tensors.values()):
        if not looks_like_safetensors(read_head(path)[0]):
            continue
        ours = {info.name: (info.dtype, info.shape) for info in read_safetensors(path).tensors}
        try:
            with safe_open(path, framework="np") as file:
                names = file.keys()
                slices = [file.get_slice(name) for name in names]
                entries = [(each.get_dtype(), tuple(each.get_shape())) for each in slices]
        except SafetensorError as error:
            yield Finding(path.name, f"refused: {error}", "a file that the safetensors library opens", _AGAIN)
            continue
        theirs = dict(zip(names, entries, strict=True))
        apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if apart:
            yield Finding(path.name, f"reads differently: {some(apart)}", "the same names, dtypes and shapes", _AGAIN)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FILE_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "misfit",
        PROBLEM,
        "tensors that are not what the configuration says: loaders refuse them or read them wrongly",
        "dtype and shape of codes, scales and tensor scales against the format that the configuration names, the grid "
        "of scales included",
        _misfits,
    ),
    Check(
        "codes_without_scale",
        PROBLEM,
        "codes that nothing scales back",
        "tensors of codes, by name and dtype, that no weight is made of",
        _codes_alone,
    ),
    Check(
        "scale_without_codes",
        PROBLEM,
        "scales of nothing",
        "tensors of scales, by name and dtype, that no weight is made of; scales of attention are none of these",
        _scales_alone,
    ),
    Check(
        "stored_twice", PROBLEM, "weights stored both plain and quantized", "the plain name beside the codes", _twice
    ),
    Check(
        "weight_map",
        PROBLEM,
        "tensors that a loader does not find through the index",
        "the shard that the index names for every tensor",
        _misplaced,
    ),
    Check(
        "total_size", WARNING, "an index with the wrong size", "total_size against the bytes of tensors", _total_size
    ),
    Check(
        "activation_scale",
        PROBLEM,
        "scales of activations that are 0, negative, infinite or NaN",
        "every value of input_scale, input_global_scale and activation_scale",
        _activation_scales,
    ),
    Check(
        "recorded_file",
        PROBLEM,
        "files that are gone or changed since they were written",
        f"the files that {RECORD} names, and their SHA-256 where it has them",
        _recorded,
    ),
    Check(
        "safetensors_library",
        PROBLEM,
        "files that the safetensors library, which loaders use, refuses or reads differently",
        "names, dtypes and shapes in each file as safetensors.safe_open lists them",
        _library,
    ),
    Check("alignment", NOTE, "tensors that cannot be mapped in place", "offset modulo element size", _unaligned),
)


ROUNDING = "rounding"
_RULES = ("scale_rounding", ROUNDING, "dialect")


@dataclass(frozen=True, slots=True)
class Stated:
    """Recipes that a weight is said to be made by, those said of itself first; `draws_unknown` where one of them is
    random and nothing says by which seed."""

    schemes: tuple[Scheme, ...] = ()
    draws_unknown: bool = False


def stated_recipes(subject: Subject) -> dict[str, Stated]:
    """Return what is said of each weight: by the record, which of a stack of experts knows the whole alone, and by the
    configuration, which knows no seed. Transforms are those of the configuration, by which codes are read."""
    recorded = {name: _recipe(told) for name, told in subject.recorded_tensors.items()}
    known = tuple(dict.fromkeys(scheme for scheme in recorded.values() if scheme is not None))
    return {name: _stated(subject, stored, recorded.get(name), known) for name, stored in subject.weights.items()}


def _stated(subject: Subject, stored: StoredWeight, own: Scheme | None, known: tuple[Scheme, ...]) -> Stated:
    weight = stored.weight
    schemes = [own] if own is not None else [scheme for scheme in known if scheme.format == weight.format]
    unknown = False
    if subject.layout is not None and subject.layout.names_rules:
        unknown = weight.scheme.rounding.is_random and not any(scheme.rounding.is_random for scheme in schemes)
        schemes += [] if weight.scheme.rounding.is_random else [replace(weight.scheme, nonfinite="saturate")]
    fitting = [replace(scheme, hadamard=weight.scheme.hadamard) for scheme in schemes if scheme.format == weight.format]
    return Stated(tuple(dict.fromkeys(fitting)), unknown)


def _recipe(told: Mapping[str, object]) -> Scheme | None:
    """Return the recipe that the record names; None where it names none that is known."""
    seed = told.get("seed", 0)
    try:
        rules = Rules(seed=seed if isinstance(seed, int) else 0)
        named = {key: str(told[key]) for key in TENSOR_RULES if told.get(key) is not None}
        return resolve(str(told.get("format")), overlaid(rules, named))
    except UsageError:
        return None


def _contradictions(subject: Subject) -> Iterator[Finding]:
    for name, told in subject.recorded_tensors.items():
        stored = subject.weights.get(name)
        if stored is None:
            continue
        ours, theirs = _described(subject, stored), _recorded_rules(told)
        apart = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if apart:
            yield Finding(
                name,
                ", ".join(f"{key} {ours[key]}" for key in apart),
                f"what {RECORD} records: {', '.join(f'{key} {theirs[key]}' for key in apart)}",
                "Copy the config.json again that was written with it.",
            )


def _described(subject: Subject, stored: StoredWeight) -> dict[str, str]:
    """Return how the configuration describes a weight, as far as its layout says so."""
    weight, scheme = stored.weight, stored.weight.scheme
    described = {"format": scheme.format.name}
    if subject.layout is None or not subject.layout.names_rules:
        return described
    transform = "none" if scheme.hadamard is None else signs_text(scheme.hadamard)
    names = (scheme.scale_rule.name, scheme.rounding.name, scheme.dialect.name)
    return {**described, "axis": weight.axis, "transform": transform, **dict(zip(_RULES, names, strict=True))}


def _recorded_rules(told: Mapping[str, object]) -> dict[str, str]:
    """Return the same of what the record says of a tensor; what it does not say is left out."""
    scheme, hadamard = _recipe(told), told.get("hadamard")
    said = {key: str(told[key]) for key in ("axis", *_RULES) if told.get(key) is not None}
    if told.get("format") is not None:
        said["format"] = scheme.format.name if scheme is not None else str(told["format"])
        said["transform"] = str(hadamard.get("signs")) if isinstance(hadamard, Mapping) else "none"
    return said


RECORD_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "recorded_rules",
        PROBLEM,
        "weights that the configuration describes otherwise than the record of their making: they are read wrongly",
        f"the format of every weight that {RECORD} records, and where the layout names them its axis, transform and "
        "rules",
        _contradictions,
    ),
)
