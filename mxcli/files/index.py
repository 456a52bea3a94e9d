"""A shard index (`*.index.json`): which file should hold which tensor, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from mxcli.errors import InputError, printable, together
from mxcli.files.plain import file_problem, read_json_object
from mxcli.files.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The weight map of an index with its shards as paths, in name order, and the total size it claims."""

    path: Path
    weight_map: Mapping[str, Path]
    shards: tuple[Path, ...]
    total_size: object


def read_index(path: Path) -> ShardIndex:
    """The index at `path`; raises InputError naming every shard that is missing, unreadable or outside."""
    shown = printable(path)
    parsed = read_json_object(path)
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{shown}: needs a weight_map from tensor names to file names.")
    if not weight_map:
        raise InputError(f"{shown}: its weight_map is empty; download it again.")
    problems, places = [], {}
    for shard in sorted(set(weight_map.values())):
        if _escapes(shard):
            problems.append(
                f"{shown}: shard '{printable(shard)}' lies outside its directory; shards must lie beside it."
            )
            continue
        places[shard] = path.parent.joinpath(*PurePosixPath(shard).parts)
        problem = file_problem(places[shard])
        if problem:
            problems.append(problem)
    if problems:
        missing = sum("no such file" in problem for problem in problems)
        headline = f"{shown}: {missing} of {len(set(weight_map.values()))} shards are missing"
        raise together(InputError, headline if missing == len(problems) else shown, problems)
    metadata = parsed.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    shards = tuple(dict.fromkeys(places.values()))
    return ShardIndex(path, {name: places[shard] for name, shard in weight_map.items()}, shards, total)


def absent_tensors(index: ShardIndex, found: Mapping[str, TensorInfo]) -> list[str]:
    """A problem for every tensor the index names that no shard holds."""
    shown = printable(index.path)
    return [
        f"{shown}: tensor '{printable(name)}' is neither in {printable(shard.name)} nor elsewhere."
        for name, shard in index.weight_map.items()
        if name not in found
    ]


def index_notes(index: ShardIndex, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Sentences on everything the index says that the shards do not confirm, short of a missing tensor."""
    shown = printable(index.path.name)
    moved = [name for name, info in tensors.items() if index.weight_map.get(name, info.file) != info.file]
    extra = [name for name in tensors if name not in index.weight_map]
    notes = []
    if moved:
        notes.append(f"{shown} places {_some(moved)} in another shard than the one holding it.")
    if extra:
        notes.append(f"{shown} does not name {_some(extra)}, found in the shards; it is read all the same.")
    stored = sum(info.nbytes for info in tensors.values())
    if index.total_size is None:
        notes.append(f"{shown} states no total_size; the tensors hold {stored:,} bytes.")
    elif index.total_size != stored:
        notes.append(f"{shown} states total_size {printable(index.total_size)}; the tensors hold {stored:,} bytes.")
    return notes


def _some(names: list[str]) -> str:
    """The first name and how many more there are."""
    more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
    return f"'{printable(names[0])}'{more}"


def _escapes(shard: str) -> bool:
    parts = (*PurePosixPath(shard).parts, *PureWindowsPath(shard).parts)
    absolute = PurePosixPath(shard).is_absolute() or PureWindowsPath(shard).anchor != ""
    return absolute or ".." in parts or not shard.strip() or "\0" in shard
