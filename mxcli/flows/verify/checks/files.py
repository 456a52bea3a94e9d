"""Checks of files and tensors: complete, consistent with the configuration, found by loaders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.checkpoint import read
from mxcli.files.directory import ShardIndex, read_index
from mxcli.files.model_files import CONFIG, RECORD
from mxcli.files.plain import read_head
from mxcli.files.safetensors import looks_like_safetensors, read_safetensors
from mxcli.files.tensors import DTYPES, IN_MEMORY, Array, TensorInfo
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, WARNING, Check, Finding, some
from mxcli.flows.verify.errors import widened
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.unread import CACHE_SCALES

_PIECE = 1 << 24
_REQUANTIZE = "Requantize it, or update safetensors."


def _misfits(subject: Subject) -> Iterator[Finding]:
    for where, fault in subject.misfits.items():
        yield Finding(where, fault.rstrip("."), "tensors that match the configuration", "Requantize it.")
    if len(subject.misfits) > 1 and not subject.weights:
        yield Finding(
            CONFIG,
            f"none of the {len(subject.misfits):,} weights is what its quantization_config states",
            "the configuration written with these weights",
            f"Restore the {CONFIG} of this checkpoint.",
        )


def _unassigned(subject: Subject, role: str) -> Iterator[TensorInfo]:
    """Yield tensors of a role that belong to no weight, without parts of misfits, which are reported already; none if
    the codes cannot be read."""
    if subject.unread is not None:
        return
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


def _unlisted(subject: Subject) -> Iterator[Finding]:
    """Yield shards that no index names: those next to an index, or several without one."""
    checkpoint = subject.checkpoint
    families = {_SHARD.sub("", file.name) for file in checkpoint.files if _SHARD.search(file.name)}
    found = sorted(path.name for path in checkpoint.root.glob("*.safetensors") if _SHARD.search(path.name))
    listed = {file.name for file in checkpoint.files} if checkpoint.index is not None else set()
    unlisted = [name for name in found if name not in listed and _SHARD.sub("", name) in families]
    if unlisted and len(found) > 1 and (checkpoint.index is not None or len(checkpoint.files) > 1):
        yield Finding(
            checkpoint.index.name if checkpoint.index is not None else f"{min(families)}.safetensors.index.json",
            "missing" if checkpoint.index is None else f"does not name {some(unlisted)}",
            "an index that names every shard: loaders look for tensors there",
            "Copy the index of this checkpoint again.",
        )


_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")


def _documents(subject: Subject) -> Iterator[Finding]:
    """Yield JSON documents of the model that cannot be read; those with a recorded hash are proven by it."""
    for path in sorted(subject.checkpoint.root.glob("*.json")):
        if path.name in (CONFIG, RECORD) or path.name in subject.record.sha256 or not path.is_file():
            continue
        try:
            if 0 < path.stat().st_size <= _LARGEST_DOCUMENT:
                json.loads(path.read_bytes())
            else:
                read_head(path)
        except (InputError, OSError, ValueError, RecursionError) as error:
            yield Finding(path.name, f"cannot be read: {printable(error)}", "a whole JSON document", "Copy it again.")


_LARGEST_DOCUMENT = 1 << 26


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
        "shards",
        PROBLEM,
        "shards that loaders do not find",
        "the files of the directory that are named as shards against the index",
        _unlisted,
    ),
    Check(
        "document",
        PROBLEM,
        "documents of the model that loaders cannot read",
        "every .json file of the directory is parsed",
        _documents,
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
        "safetensors_library",
        PROBLEM,
        "files that the safetensors library used by loaders refuses or reads differently",
        "names, dtypes and shapes in each file as safetensors.safe_open lists them",
        _library,
    ),
    Check("alignment", NOTE, "tensors that cannot be mapped in place", "offset modulo element size", _unaligned),
)
