"""The files of a directory that make up its model, with or without an index."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import file_problem, read_json_object
from mxcli.files.tensors import TensorInfo
from mxcli.files.trainers.formats import format_of, holds_format, is_state
from mxcli.files.trainers.names import EXTRA_STATE, may_be_left_out, own_names

SAFETENSORS, PYTORCH, GGUF, NUMPY = "safetensors", "pytorch", "gguf", "numpy"
KINDS = {
    ".safetensors": SAFETENSORS,
    ".pt": PYTORCH,
    ".pth": PYTORCH,
    ".bin": PYTORCH,
    ".ckpt": PYTORCH,
    ".gguf": GGUF,
    ".npy": NUMPY,
    ".npz": NUMPY,
}
INDEX_SUFFIX = ".index.json"
INDEX_NAME = re.compile(r"(.+)\.(safetensors|bin)\.index(?:\.(\w+))?\.json")
"""The name of an index: what it is of, their ending, and the variant (`model.safetensors.index.fp16.json`)."""
PARTIAL_SUFFIX = ".partial"
# If one of these exists and no index does, it alone is the model, as for the libraries that wrote it.
SOLE = {SAFETENSORS: "model.safetensors", PYTORCH: "pytorch_model.bin", GGUF: "model.gguf"}
OF_DIFFUSERS = {SAFETENSORS: "diffusion_pytorch_model.safetensors", PYTORCH: "diffusion_pytorch_model.bin"}
USUAL_INDEXES = tuple(SOLE[kind] + INDEX_SUFFIX for kind in (SAFETENSORS, PYTORCH))
# Files with a checkpoint's ending that do not belong to the model next to them, and why.
ASIDE = (
    (r"consolidated.*\.(safetensors|pth)$", "the same model under its maker's own names"),
    (r"adapter_model\.(safetensors|bin)$", "a LoRA adapter"),
)
# Folders of captures of single steps and ranks.
DUMP_FOLDER = re.compile(r"tensor_dumps|(rank|step|iter|iteration)[-_]?\d+")
SHARD_NAME = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[a-z]+)")
MAX_SHARDS = 100_000
WHOLE_NAME = re.compile(r"((?:diffusion_)?(?:pytorch_)?model)(\.[a-z]\w*)?(-\d+-of-\d+)?(\.[a-z]\w*)?\.(\w+)")
"""The name of the weights of a whole model, with a variant before or after the number of a shard."""


def listing(root: Path) -> list[str]:
    """Return the names of the visible files of a directory, sorted. Raises InputError if it cannot be listed."""
    try:
        with os.scandir(root) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
            return sorted(entry.name for entry in visible if not _is_folder(entry))
    except OSError as error:
        raise InputError(f"{printable(root)}: cannot be listed: {printable(error)}.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory, links followed; a link that leads back to itself is none."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def of_kind(kind: str, names: list[str]) -> list[str]:
    """Return the names with an ending of the kind."""
    return [name for name in names if KINDS.get(Path(name).suffix) == kind]


def choose_index(root: Path, names: list[str], notes: list[str]) -> str | None:
    """Return the index to follow: safetensors before PyTorch, the usual name before variants; None without one.

    Raises InputError if there are several and none has the usual name.
    """
    for usual in USUAL_INDEXES:
        if SOLE[SAFETENSORS] in names and usual.startswith(SOLE[PYTORCH]):
            break  # Loaders take the safetensors file.
        found = [name for name in names if name.endswith(Path(usual.removesuffix(INDEX_SUFFIX)).suffix + INDEX_SUFFIX)]
        if usual in found:
            if len(found) > 1:
                notes.append(f"{len(found)} indexes found; {usual} is followed.")
            return usual
        if len(found) > 1:
            raise InputError(
                f"{printable(root)}: {len(found)} indexes and no {usual}; "
                f"give one of them as the source: {', '.join(map(printable, found))}."
            )
        if found:
            return found[0]
    return _variant_index(root, names)


def is_index(name: str) -> bool:
    """Return whether a file has the name of an index, that of a variant included."""
    return name.endswith(INDEX_SUFFIX) or INDEX_NAME.fullmatch(name) is not None


def _variant_index(root: Path, names: list[str]) -> str | None:
    """Return the index of a variant, if all weights of its kind are of that variant; None without one. Raises
    InputError for several."""
    for kind, ending in ((SAFETENSORS, "safetensors"), (PYTORCH, "bin")):
        matches = [match for match in map(INDEX_NAME.fullmatch, names) if match and match[3] and match[2] == ending]
        found = [match[0] for match in matches]
        if not found or not all(any(f".{match[3]}" in name for match in matches) for name in of_kind(kind, names)):
            continue
        if len(found) > 1:
            raise InputError(
                f"{printable(root)}: the weights of {len(found)} variants; give the index of one of them as the "
                f"source: {', '.join(map(printable, found))}."
            )
        return found[0]
    return None


def _without_variants(names: list[str], notes: list[str]) -> list[str]:
    """Return the files without the variants (`model.fp16.safetensors`) of weights that are there without one."""
    matches = {name: match for name in names if (match := WHOLE_NAME.fullmatch(name))}
    plain = {match[1] for match in matches.values() if not (match[2] or match[4])}
    variants = [name for name, match in matches.items() if (match[2] or match[4]) and match[1] in plain]
    if variants:
        notes.append(f"{counted(variants)} another variant of the weights; not read.")
    return [name for name in names if name not in variants]


def model_names(kind: str, names: list[str], notes: list[str]) -> list[str]:
    """Return the files of one kind that make up a model without index; the notes name what is left aside."""
    found = of_kind(kind, names)
    sole = next((name for name in (SOLE.get(kind), OF_DIFFUSERS.get(kind)) if name in found), None)
    if sole is not None:
        others = [name for name in found if name != sole]
        if others:
            notes.append(f"{counted(others)} next to {sole}, which is the model; not read.")
        return [sole]
    reasons = {name: why for name in found for pattern, why in ASIDE if re.fullmatch(pattern, name)}
    kept = _without_variants([name for name in found if name not in reasons], notes)
    if not kept:
        return found
    notes += [f"{printable(name)} is {why}; not read." for name, why in reasons.items()]
    if len(kept) > 1:
        notes.append(f"{counted(kept)} read together; there is no index.")
    return kept


def dump_files(root: Path) -> tuple[str, tuple[Path, ...]]:
    """Return the kind and the weight files of a directory's step and rank folders, in numeric order.

    Raises InputError for several kinds: a source has one, and reading it alone would leave out steps.
    """
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS.values()}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if DUMP_FOLDER.fullmatch(name)]
        for name in names:
            if Path(folder) != root and not name.startswith(".") and Path(name).suffix in KINDS:
                found[KINDS[Path(name).suffix]].append(Path(folder, name))
    held = {kind: sorted(files, key=by_numbers) for kind, files in found.items() if files}
    if len(held) > 1:
        listed = {kind: [path.relative_to(root).as_posix() for path in files] for kind, files in held.items()}
        kinds = " and ".join(f"{counted(names)} {kind}" for kind, names in listed.items())
        raise InputError(
            f"{printable(root)}: {kinds}; captures must be of one kind: keep each in a directory of its own, or give "
            "one file."
        )
    kind = next(iter(held), PYTORCH)
    return kind, tuple(held.get(kind, ()))


def by_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that orders paths by the numbers in them: `step_2` before `step_10`."""
    return [(int(digits or -1), text) for digits, text in re.findall(r"(\d{1,300})|(\D+)", str(path))]


def refuse_gaps(root: Path, names: list[str]) -> None:
    """Raise InputError naming every missing shard that numbered names (`x-00001-of-00003`) imply."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(SHARD_NAME.fullmatch, names)):
        sets.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    missing = []
    for (stem, total, ending), present in sets.items():
        first = 0 if 0 in present else 1
        for number in range(first, first + min(int(total), MAX_SHARDS)):
            if number not in present:
                missing.append(f"{stem}-{number:0{len(total)}d}-of-{total}{ending}")
    if missing:
        problems = [f"{printable(root / name)}: no such file; other shards imply it." for name in missing]
        raise together(InputError, f"{printable(root)}: {len(missing):,} shards are missing", problems)


def refuse_variants(root: Path, kind: str, names: list[str]) -> None:
    """Raise InputError if files are several whole models of a kind that stores one per file."""
    names = [name for name in names if kind == GGUF or name.endswith(".ckpt")]
    if len(names) < 2:
        return
    models = {match[1] if (match := SHARD_NAME.fullmatch(name)) else name for name in names}
    if len(models) > 1:
        raise InputError(
            f"{printable(root)}: {counted(names)} separate models; give one of them as the source instead of the "
            "directory."
        )


def without_weights(root: Path, names: list[str]) -> str:
    """Return why a directory without weights is not a checkpoint, with the fix that its content suggests."""
    shown = printable(root)
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    if any(folder.name == "snapshots" for folder in folders):
        found = ", ".join(sorted(printable(folder) for folder in (root / "snapshots").iterdir()))
        return f"{shown}: a download cache, not a checkpoint; give one of its snapshots: {found}."
    foreign = [name for name in names if name.endswith((".h5", ".msgpack", ".onnx"))]
    if foreign:
        listed = ", ".join(map(printable, foreign[:3]))
        return f"{shown}: no weights that can be read, only {listed}; give safetensors or PyTorch files."
    holding = [printable(folder.name) for folder in folders if _holds_weights(folder)]
    if holding:
        return f"{shown}: no weights in it, but in its folders {', '.join(holding[:10])}; give one of those."
    of_format = format_of(root)
    if of_format:
        return of_format
    state = [name for name in names if is_state(name) and Path(name).suffix in KINDS]
    if state:
        return f"{shown}: no weights in it, only training state ({', '.join(map(printable, state[:5]))}); give a model."
    return f"{shown}: no weights in it; {', '.join(KINDS)} or {INDEX_SUFFIX} files are needed."


def _holds_weights(folder: Path) -> bool:
    """Return whether a folder has weights that can be read, other than parts of a format of several files."""
    names = [name for name in listing(folder) if Path(name).suffix in KINDS and not is_state(name)]
    return bool(names) and not holds_format(folder)


def counted(names: list[str]) -> str:
    """Return the names as a subject with its verb: "a.bin is", "5 files (a.bin, b.bin, c.bin, …) are"."""
    if len(names) == 1:
        return f"{printable(names[0])} is"
    listed = ", ".join(map(printable, names[:3])) + (", …" if len(names) > 3 else "")
    return f"{len(names):,} files ({listed}) are"


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The weight map of an index with its shards as paths, in name order, and the total size it states."""

    path: Path
    weight_map: Mapping[str, Path]
    shards: tuple[Path, ...]
    total_size: object


def read_index(path: Path) -> ShardIndex:
    """Read the index at `path`. Raises InputError naming every shard that is missing, unreadable or outside."""
    shown = printable(path)
    parsed = read_json_object(path)
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{shown}: needs a weight_map from tensor names to file names.")
    wrong = [
        f"{shown}: weight_map: '{printable(name)}' is {printable(shard)}; it must be a file name."
        for name, shard in weight_map.items()
        if not isinstance(shard, str)
    ]
    if wrong:
        raise together(InputError, shown, wrong)
    if not weight_map:
        raise InputError(f"{shown}: its weight_map is empty; download it again.")
    problems, paths = [], {}
    for shard in sorted(set(weight_map.values())):
        if _escapes(shard):
            problems.append(f"{shown}: shard '{printable(shard)}' is outside its directory; shards must be next to it.")
            continue
        paths[shard] = path.parent.joinpath(*PurePosixPath(shard).parts)
        problem = file_problem(paths[shard])
        if problem:
            problems.append(problem)
    if problems:
        missing = sum("no such file" in problem for problem in problems)
        headline = f"{shown}: {missing} of {len(set(weight_map.values()))} shards are missing"
        raise together(InputError, headline if missing == len(problems) else shown, problems)
    metadata = parsed.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    shards = tuple(dict.fromkeys(paths.values()))
    return ShardIndex(path, {name: paths[shard] for name, shard in weight_map.items()}, shards, total)


def absent_tensors(index: ShardIndex, found: Mapping[str, TensorInfo]) -> list[str]:
    """Return a problem for every tensor of the index that no shard holds."""
    shown = printable(index.path)
    absent = [name for name in index.weight_map if name not in found]
    if absent:
        absent = [name for name, own in own_names(index.weight_map)[0].items() if not {name, own} & found.keys()]
    there = {name.partition(".")[0] for name in found}
    return [
        f"{shown}: tensor '{printable(name)}' is neither in {printable(index.weight_map[name].name)} nor elsewhere."
        for name in absent
        if not (may_be_left_out(name) and name.partition(".")[0] not in there) and not EXTRA_STATE.search(name)
    ]


def index_notes(index: ShardIndex, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return sentences on everything in the index that the shards do not confirm, short of a missing tensor."""
    shown = printable(index.path.name)
    places = dict(index.weight_map)
    if any(name not in places for name in tensors):
        places |= {own: places[name] for name, own in own_names(index.weight_map)[0].items()}
    moved = [name for name, info in tensors.items() if places.get(name, info.file) != info.file]
    extra = [name for name in tensors if name not in places]
    notes = []
    if moved:
        notes.append(f"{shown} places {_some(moved)} in another shard than the one holding it.")
    if extra:
        notes.append(f"{shown} does not name {_some(extra)}, found in the shards; read nevertheless.")
    stored = sum(info.nbytes for info in tensors.values())
    if index.total_size is None:
        notes.append(f"{shown} states no total_size; the tensors hold {stored:,} bytes.")
    elif not _is_size(index.total_size, stored):
        notes.append(f"{shown} states total_size {printable(index.total_size)}; the tensors hold {stored:,} bytes.")
    return notes


def _is_size(stated: object, size: int) -> bool:
    """Return whether an index states this size: as a number, or as the text of one."""
    return str(stated) == str(size) or (isinstance(stated, float) and stated == size)


def _some(names: list[str]) -> str:
    """Return the first name and how many more there are."""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"'{printable(names[0])}'{more}"


def _escapes(shard: str) -> bool:
    parts = (*PurePosixPath(shard).parts, *PureWindowsPath(shard).parts)
    absolute = PurePosixPath(shard).is_absolute() or PureWindowsPath(shard).anchor != ""
    return absolute or ".." in parts or not shard.strip() or "\0" in shard
