"""Formats of several files, none of which is a checkpoint by itself, known by the names of their files, each with the
program that makes one of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcli.errors import InputError, printable

MOST_DEEP, MOST_FILES, MOST_FOLDERS = 3, 20_000, 100


@dataclass(frozen=True, slots=True)
class Format:
    """A format: what it is, the paths of its files below a folder (regexes, matched in full), at least one for each of
    `files` and `at_least` for the first; and what makes a checkpoint of it, `{}` being the source, or the folder
    `levels` above the first file."""

    what: str
    files: tuple[str, ...]
    way_out: str
    at_least: int = 1
    levels: int | None = None


_MEGATRON = "convert it with Megatron Bridge (AutoBridge.export_ckpt) or tools/checkpoint/convert.py of Megatron-LM"
_NEMO = (
    "convert it with NeMo (nemo.collections.llm.export_ckpt with target='hf', or a script convert_*_nemo_to_hf.py of "
    "scripts/checkpoint_converters)"
)
_SLICES = "slices of a model for several devices, each with a part of every matrix"
# The first format whose files are all there decides.
FORMATS = (
    Format("a checkpoint of NeMo", (r"(.*/)?context/(model\.yaml|io\.json)", r"(.*/)?weights/.+"), _NEMO),
    Format("a checkpoint of NeMo", (r"(.*/)?[^/]+\.nemo",), _NEMO),
    Format("an unpacked checkpoint of NeMo", (r"model_config\.yaml", r"(.*/)?model_weights([./].+)"), _NEMO),
    Format(
        "a checkpoint of Megatron",
        (r"(.*/)?mp_rank_\d+(_\d+)*/(model_optim_rng|model_rng|distrib_optim|optim)\.pt",),
        _MEGATRON,
    ),
    Format("a checkpoint of Megatron", (r"latest_checkpointed_iteration\.txt",), _MEGATRON),
    Format("a checkpoint of Megatron", (r"(.*/)?common\.pt", r"(.*/)?(metadata\.json|\.metadata)"), _MEGATRON),
    Format(
        "a checkpoint of DeepSpeed's pipelines, with a file of each layer",
        (r"(.*/)?layer_\d+-model_(\d+-model_)?states\.pt",),
        "convert it with the script of the program that trained it (GPT-NeoX: tools/ckpts/convert_neox_to_hf.py)",
    ),
    Format(
        "a checkpoint of DeepSpeed (ZeRO), whose ranks each hold a part",
        (r"(.*/)?([a-z0-9]+_)?zero_pp_rank_\d+_mp_rank_\d+(_\d+)?_(model|optim)_states\.pt",),
        "make a checkpoint of it with the script that DeepSpeed writes next to it: python zero_to_fp32.py {} OUT "
        "--safe_serialization (also in the package: deepspeed/utils/zero_to_fp32.py)",
        levels=2,
    ),
    Format(
        "a checkpoint of DeepSpeed for several devices",
        (r"(.*/)?mp_rank_\d+_model_states\.pt",),
        "join its parts with the program that trained it, or with ds_to_universal.py of DeepSpeed",
        at_least=2,
    ),
    Format(
        "a universal checkpoint of DeepSpeed",
        (r"(.*/)?zero/.+/fp32\.pt|latest_universal",),
        "load it with DeepSpeed and save its state_dict with safetensors",
    ),
    Format(
        "a checkpoint of torch.distributed.checkpoint, whose files hold parts of tensors",
        (r"(?!(.*/)?optimizer)(.*/)?__\d+_\d+\.distcp",),
        "make one file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {} OUT.pt",
        levels=1,
    ),
    Format(
        "a checkpoint of FSDP, whose ranks each hold a part",
        (r"(.*/)?pytorch_model(_fsdp)?(_\d+)?_rank_?\d+\.bin",),
        "save it with FSDP's full state dict, or as shards and join them with accelerate merge-weights",
    ),
    Format(
        f"Meta's {_SLICES}",
        (r"(.*/)?consolidated\.\d\d\.(pth|pt)",),
        "join them with convert_llama_weights_to_hf.py of transformers (--input_dir {} --output_dir OUT; "
        "convert_llama4_weights_to_hf.py for Llama 4)",
        at_least=2,
        levels=1,
    ),
    Format(
        f"DeepSeek's {_SLICES}",
        (r"(.*/)?model\d+-mp\d+\.safetensors",),
        "give the Hugging Face checkpoint that they were made from by convert.py",
        at_least=2,
    ),
    Format(
        f"vLLM's {_SLICES} (sharded_state)",
        (r"(.*/)?model-rank-\d+-part-\d+\.safetensors",),
        "give the checkpoint that they were made from by save_sharded_state.py",
    ),
    Format(
        f"TensorRT-LLM's {_SLICES}",
        (r"(.*/)?rank\d+\.safetensors",),
        "give the checkpoint that they were made from by convert_checkpoint.py",
        at_least=2,
    ),
    Format(
        f"{_SLICES}, as of Grok",
        (r"(.*/)?[^/]+-TP-\d{3}\.safetensors",),
        "give a checkpoint of whole tensors",
        at_least=2,
    ),
    Format(
        f"metaseq's {_SLICES}",
        (r"(.*/)?[^/]*model_part-\d+(-shard\d+)?\.pt",),
        "join them with metaseq.scripts.convert_to_singleton",
        at_least=2,
    ),
    Format(
        "a checkpoint of Orbax (JAX)",
        (r"(.*/)?(_CHECKPOINT_METADATA|manifest\.ocdbt|ocdbt\.process_\d+/.+)",),
        "restore it with orbax.checkpoint and save it with safetensors.flax.save_file",
    ),
    Format(
        "a checkpoint of TensorFlow",
        (r"(.*/)?([^/]+\.data-\d{5}-of-\d{5}|saved_model\.pb)",),
        "read it with tf.train.load_checkpoint and save it with safetensors under the names of its PyTorch model, or "
        "convert it with the script of its model in transformers",
    ),
    Format(
        "a checkpoint of PaddlePaddle",
        (r"(.*/)?[^/]+\.pdparams",),
        "read it with paddle.load and save it with safetensors",
    ),
)
STATE_FILE = re.compile(
    r"(training_args|optimizer|optim|scheduler|rng_state|scaler|sampler|dl_state_dict|random_states).*"
    r"\.(bin|pt|pth|pkl|safetensors)"
)
"""Files of a folder that are state of training."""


def is_state(name: str) -> bool:
    """Return whether a file of that name is state of training next to a model."""
    return STATE_FILE.fullmatch(name) is not None


def state_note(root: Path, names: Iterable[str]) -> list[str]:
    """Return a sentence on the files of a folder that are state of training, with their bytes."""
    found = [name for name in names if is_state(name)]
    if not found:
        return []
    nbytes = sum(os.path.getsize(root / name) for name in found if (root / name).is_file())
    listed = ", ".join(map(printable, found[:5])) + (f" and {len(found) - 5:,} more" if len(found) > 5 else "")
    return [f"{listed} {'is' if len(found) == 1 else 'are'} training state ({nbytes:,} bytes); not read."]


def refuse_format(root: Path, names: Sequence[str]) -> None:
    """Raise InputError if files in a folder, with those next to them, are of one of FORMATS."""
    found = refusal(root, names, _siblings(root))
    if found:
        raise InputError(found)


def refuse_part(path: Path) -> None:
    """Raise InputError for a file of a format, by itself or with those next to it."""
    root = path.absolute().parent
    for row in FORMATS:
        if len(row.files) > 1:
            continue
        if _is_of(row.files[0], root, path.name):
            like = [name for name in _siblings(root) if _is_of(row.files[0], root, name)]
            if len(like) >= row.at_least:
                raise InputError(
                    f"{printable(path)}: {row.what}; {row.way_out.format(_folder(path.parent, row, path))}."
                )


def format_of(root: Path) -> str | None:
    """Return which of FORMATS a folder is, as a sentence, or None."""
    return refusal(root, list(_below(root)))


def holds_format(folder: Path) -> bool:
    """Return whether the files in a folder are of one of FORMATS."""
    return refusal(folder, _siblings(folder)) is not None


def refusal(root: Path, names: Sequence[str], others: Sequence[str] = ()) -> str | None:
    """Return which of FORMATS has files at these paths below a folder, as a sentence, or None; its second file may be
    one of the `others` too."""
    for row in FORMATS:
        among = (names, [*names, *others])
        found = [
            [name for name in among[min(at, 1)] if _is_of(pattern, root, name)] for at, pattern in enumerate(row.files)
        ]
        if all(found) and len(found[0]) >= row.at_least:
            listed = ", ".join(map(printable, found[0][:2])) + (", …" if len(found[0]) > 2 else "")
            folder = _folder(root, row, root / found[0][0])
            return f"{printable(root)}: {row.what} ({listed}); {row.way_out.format(folder)}."
    return None


def _is_of(pattern: str, root: Path, name: str) -> bool:
    """Return whether a path below a folder is of a format, from the folder or from the one above it."""
    return bool(re.fullmatch(pattern, name) or re.fullmatch(pattern, f"{root.name}/{name}"))


def _folder(root: Path, row: Format, file: Path) -> str:
    """Return the folder to give to a converter."""
    folder = root
    if row.levels is not None:
        folder = Path(os.path.normpath(file.joinpath(*[".."] * row.levels)))
    shown = printable(folder)
    return f"'{shown}'" if re.search(r"\s", shown) else shown


def _siblings(root: Path) -> list[str]:
    try:
        return os.listdir(root)
    except OSError:
        return []


def _below(root: Path, above: str = "", depth: int = 1) -> Iterator[str]:
    """Yield the paths of files below a folder, hidden ones too, down to MOST_DEEP names and not through links."""
    try:
        with os.scandir(root) as entries:
            found = sorted((entry for entry, _ in zip(entries, range(MOST_FILES), strict=False)), key=_name)
    except OSError:
        return
    folders = {entry.name: None for entry in found if entry.is_dir(follow_symlinks=False)}
    yield from (f"{above}{entry.name}" for entry in found if entry.name not in folders)
    if depth < MOST_DEEP:
        for folder in list(folders)[:MOST_FOLDERS]:
            yield from _below(root / folder, f"{above}{folder}/", depth + 1)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name
