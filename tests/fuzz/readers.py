"""Files read without a verb: headers, every tensor, records, logs, indexes, configurations and recipes."""

from __future__ import annotations

from pathlib import Path
from random import Random

from mxcli.errors import MxcliError
from mxcli.files.checkpoint import check_source, open_checkpoint, read, read_rows
from mxcli.files.directory import read_index
from mxcli.files.gguf import read_settings
from mxcli.files.model_files import read_config, read_producer_config
from mxcli.files.progress import progress_records, read_progress
from mxcli.files.record import read_record
from mxcli.files.tensors import IN_MEMORY
from mxcli.flows.plan.recipe_file import read_recipe

MOST_TENSORS = 40


def read_everything(folder: Path, file: Path, random: Random) -> str:
    """Read what there is with every reader that fits, and return the kinds of error, or "read" if there is none."""
    found: set[str] = set()

    def tried(reader: object, *arguments: object) -> object:
        try:
            return reader(*arguments)  # type: ignore[operator]
        except (MxcliError, OSError, MemoryError) as error:
            text = str(error)
            if len(text) > 60_000:
                raise AssertionError(f"{len(text):,} characters: {text[:200]}") from error
            if isinstance(error, MxcliError) and error.exit_code == 1:
                raise
            found.add(type(error).__name__)
            return None

    tried(_tensors, random.choice((folder, file)), random)
    root = file.parent
    tried(read_record, root)
    tried(read_config, root)
    tried(read_producer_config, root)
    if file.name.endswith(".index.json"):
        tried(read_index, file)
    elif file.name.endswith(".gguf"):
        tried(read_settings, file)
    elif file.name.endswith(".toml"):
        tried(read_recipe, file)
    elif file.name.endswith(".partial"):
        for path in tried(progress_records, root) or ():  # type: ignore[attr-defined]
            tried(read_progress, path)
    return "+".join(sorted(found)) or "read"


def _tensors(source: Path, random: Random) -> None:
    checkpoint = open_checkpoint(source)
    for info in list(checkpoint.tensors.values())[:MOST_TENSORS]:
        whole = read(checkpoint, info)
        if whole.nbytes != info.nbytes and info.offset != IN_MEMORY:
            raise AssertionError(f"{info.name}: {whole.nbytes:,} bytes read of {info.nbytes:,}")
        if len(info.shape) > 1 and info.shape[0] and random.random() < 0.3:
            read(checkpoint, info, info.shape[0] - 1)
        if len(info.shape) == 2 and info.shape[0] > 1 and info.offset != IN_MEMORY and random.random() < 0.3:
            read_rows(checkpoint, info, [0, 1], 1)
    check_source(checkpoint)
