"""Checks of files and tensors: complete, consistent with the configuration and the record, found by loaders."""

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
"""Scales of attention, which do not belong to a weight."""
_PIECE = 1 << 24
_REQUANTIZE = "Requantize it, or update safetensors."


def _misfits(subject: Subject) -> Iterator[Finding]:
    for where, fault in subject.misfits.items():
        yield Finding(where, fault.rstrip("."), "tensors that match the configuration", "Requantize it.")


def _unassigned(subject: Subject, role: str) -> Iterator[TensorInfo]:
    """Yield tensors of a role that belong to no weight, without parts of misfits, which are reported already."""
    tensors = subject.checkpoint.tensors if subject.view is None else subject.view.tensors
    reported = tuple(name.removesuffix(".weight") + end for name in subject.misfits for end in (".", "_"))
    for name, info in tensors.items():
        alone = info.role == role and name not in subject.weights and name not in subject.misfits
        if alone and not (reported and name.startswith(reported)):
            yield info


def _codes_alone(subject: Subject) -> Iterator[Finding]:
    for info in _unassigned(subject, "codes"):
        yield Finding(
            info.name,
            f"{info.dtype} {list(info.shape)} without a scale",
            "a scale: loaders read such codes as plain numbers, or with scale 1",
            "Copy its scale from the original, or requantize it.",
        )


def _scales_alone(subject: Subject) -> Iterator[Finding]:
    for info in _unassigned(subject, "scale"):
        if not info.name.endswith(CACHE_SCALES):
            yield Finding(
                info.name,
                f"{info.dtype} {list(info.shape)} belongs to no quantized weight",
                "its codes: loaders cannot assign the scale, or a weight is missing",
                "Copy the codes from the original, or remove the scale.",
            )


def _stored_twice(subject: Subject) -> Iterator[Finding]:
    for name, stored in subject.weights.items():
        parts = {content.entry.name for content in stored.contents}
        if name in subject.checkpoint.tensors and name not in parts:
            yield Finding(
                name,
                f"stored plain and as {some(sorted(parts))}",
                "one of them: loaders differ in which they take",
                "Remove the plain one.",
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
        shard = index.weight_map.get(name)
        if shard is None:
            yield Finding(
                name,
                f"is in {info.file.name} and missing in {index.path.name}",
                "an entry in the weight_map: loaders that follow the index skip the tensor",
                "Add it to the weight_map.",
            )
        elif shard != info.file:
            yield Finding(
                name,
                f"is in {info.file.name}, but {index.path.name} says {shard.name}",
                "the shard that holds the tensor",
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
            f"{stored:,} bytes, the size of its tensors: tools plan memory by it",
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
            "aligned tensors: readers that map the file must copy others",
        )


def _activation_scales(subject: Subject) -> Iterator[Finding]:
    for name, values in activation_scales(subject):
        if not (np.isfinite(values).all() and (values > 0).all()):
            yield Finding(
                name,
                f"{float(values.reshape(-1)[0]):g}" if values.size else "empty",
                "finite scales above 0: activations are divided or multiplied by them",
                "Recalibrate the activations.",
            )


def activation_scales(subject: Subject) -> Iterator[tuple[str, Array]]:
    """Yield the activation scales of weights, by name and value."""
    for name in subject.view.unused if subject.view is not None else ():
        info = subject.checkpoint.tensors[name]
        if info.dtype in ("F32", "F64", "F16", "BF16") and info.elements <= _PIECE:
            yield name, widened(read(subject.checkpoint, info), info.dtype)


def _recorded(subject: Subject) -> Iterator[Finding]:
    root = subject.checkpoint.root
    for name, sha256 in subject.recorded_files.items():
        path = root / name
        if not path.is_file():
            yield Finding(name, "missing", f"the file recorded in {RECORD}", "Copy it again.")
        elif sha256 is not None and _sha256(path) != sha256:
            yield Finding(name, "other content", f"the SHA-256 recorded in {RECORD}", "Copy it again.")


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
            yield Finding(path.name, f"refused: {error}", "a file that the safetensors library opens", _REQUANTIZE)
            continue
        theirs = dict(zip(names, entries, strict=True))
        differing = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if differing:
            yield Finding(
                path.name, f"reads differently: {some(differing)}", "the same names, dtypes and shapes", _REQUANTIZE
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


FILE_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "misfit",
        PROBLEM,
        "tensors that do not match the configuration: loaders refuse or misread them",
        "dtype and shape of codes, scales (their grid too) and tensor scales against the format in the configuration",
        _misfits,
    ),
    Check(
        "codes_without_scale",
        PROBLEM,
        "codes without scales",
        "tensors of codes, by name and dtype, that belong to no weight",
        _codes_alone,
    ),
    Check(
        "scale_without_codes",
        PROBLEM,
        "scales without codes",
        "tensors of scales, by name and dtype, that belong to no weight, except scales of attention",
        _scales_alone,
    ),
    Check(
        "stored_twice",
        PROBLEM,
        "weights stored both plain and quantized",
        "the plain name next to the codes",
        _stored_twice,
    ),
    Check(
        "weight_map",
        PROBLEM,
        "tensors that loaders do not find through the index",
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
        "files that are missing or changed since they were written",
        f"the files named in {RECORD}, and their SHA-256 where recorded",
        _recorded,
    ),
    Check(
        "safetensors_library",
        PROBLEM,
        "files that the safetensors library used by loaders refuses or reads differently",
        "names, dtypes and shapes in each file as safetensors.safe_open lists them",
        _library,
    ),
    Check("alignment", NOTE, "tensors that cannot be mapped in place", "offset modulo element size", _unaligned),
)


ROUNDING = "rounding"
_RULES = ("scale_rounding", ROUNDING, "dialect")


@dataclass(frozen=True, slots=True)
class Stated:
    """Schemes that the metadata names for a weight, its own first; `draws_unknown` if one of them is random and its
    seed is not recorded."""

    schemes: tuple[Scheme, ...] = ()
    draws_unknown: bool = False


def stated_schemes(subject: Subject) -> dict[str, Stated]:
    """Return the schemes stated for each weight: by the record, which lists a stack of experts as a whole, and by the
    configuration, which has no seed. Transforms are those of the configuration, which decide how codes are read."""
    recorded = {name: _scheme(record) for name, record in subject.recorded_tensors.items()}
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


def _scheme(record: Mapping[str, object]) -> Scheme | None:
    """Return the scheme that a record names; None unless it is known."""
    seed = record.get("seed", 0)
    try:
        rules = Rules(seed=seed if isinstance(seed, int) else 0)
        named = {key: str(record[key]) for key in TENSOR_RULES if record.get(key) is not None}
        return resolve(str(record.get("format")), overlaid(rules, named))
    except UsageError:
        return None


def _contradictions(subject: Subject) -> Iterator[Finding]:
    for name, record in subject.recorded_tensors.items():
        stored = subject.weights.get(name)
        if stored is None:
            continue
        ours, theirs = _configured_rules(subject, stored), _recorded_rules(record)
        differing = [key for key in ours if key in theirs and ours[key] != theirs[key]]
        if differing:
            yield Finding(
                name,
                ", ".join(f"{key} {ours[key]}" for key in differing),
                f"as recorded in {RECORD}: {', '.join(f'{key} {theirs[key]}' for key in differing)}",
                "Restore the config.json written with it.",
            )


def _configured_rules(subject: Subject, stored: StoredWeight) -> dict[str, str]:
    """Return the rules of a weight that the configuration states."""
    weight, scheme = stored.weight, stored.weight.scheme
    described = {"format": scheme.format.name}
    if subject.layout is None or not subject.layout.names_rules:
        return described
    transform = "none" if scheme.hadamard is None else signs_text(scheme.hadamard)
    names = (scheme.scale_rule.name, scheme.rounding.name, scheme.dialect.name)
    return {**described, "axis": weight.axis, "transform": transform, **dict(zip(_RULES, names, strict=True))}


def _recorded_rules(record: Mapping[str, object]) -> dict[str, str]:
    """Return the rules that the record of a tensor states."""
    scheme, hadamard = _scheme(record), record.get("hadamard")
    rules = {key: str(record[key]) for key in ("axis", *_RULES) if record.get(key) is not None}
    if record.get("format") is not None:
        rules["format"] = scheme.format.name if scheme is not None else str(record["format"])
        rules["transform"] = str(hadamard.get("signs")) if isinstance(hadamard, Mapping) else "none"
    return rules


RECORD_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "recorded_rules",
        PROBLEM,
        "weights whose configuration contradicts the record: they are misread",
        f"the format of every weight recorded in {RECORD}, and its axis, transform and rules if the layout names them",
        _contradictions,
    ),
)
