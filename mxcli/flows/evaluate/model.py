"""A model of transformers with the weights of a checkpoint in any layout, decoded to binary32 values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError, RefusedError, UsageError, import_extra, printable
from mxcli.files.checkpoint import Checkpoint, open_checkpoint, read
from mxcli.files.model_counts import excessive_count
from mxcli.files.model_files import CONFIG
from mxcli.files.tensors import Array
from mxcli.flows.capture.model import (
    TORCH_NAMES,
    Encode,
    ModelOutline,
    byte_tokens,
    cpu_hint,
    loading_notes,
    memory_errors,
    outline_from,
    silenced,
    tokenizer,
)
from mxcli.flows.write.dequantize import plain_checkpoint

if TYPE_CHECKING:
    import torch

BYTES_VOCABULARY = 512
"""The largest vocabulary whose tokens are taken for bytes where there is no tokenizer: 256, and special tokens."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that a model is scored by: its class of transformers, and the words for it."""

    name: str
    auto: str
    noun: str


CAUSAL = Task("causal", "AutoModelForCausalLM", "causal language model")
MASKED = Task("masked", "AutoModelForMaskedLM", "masked language model")
TASKS = {task.name: task for task in (CAUSAL, MASKED)}
_MASKED_ENDING = "ForMaskedLM"


def open_model(path: str) -> Checkpoint:
    """Open a model directory with plain values under the names of Hugging Face, from any layout."""
    checkpoint = open_checkpoint(path)
    return checkpoint if checkpoint.dialect is None else plain_checkpoint(checkpoint, Cpu(), "F32")


def task_of(checkpoint: Checkpoint) -> Task:
    """Return the task that the classes of a configuration state; CAUSAL if they state none."""
    classes = (checkpoint.config or {}).get("architectures")
    named = [each for each in classes if isinstance(each, str)] if isinstance(classes, list) else []
    return MASKED if any(each.endswith(_MASKED_ENDING) for each in named) else CAUSAL


def outline_of(checkpoint: Checkpoint, task: Task, dtype: str = "F32") -> ModelOutline:
    """Build the modules of a model from its configuration alone, to compute in `dtype`.

    Raises EnvironmentFailure without transformers, and InputError without a configuration that it can build a model of.
    """
    shown = printable(checkpoint.where)
    torch = import_extra("torch", "evaluating a model", "capture")
    import_extra("transformers", "evaluating a model")
    config = checkpoint.config
    if config is None or not isinstance(config.get("model_type"), str):
        raise InputError(f"{shown}: has no {CONFIG} with a model_type; give a model directory that transformers loads.")
    excess = excessive_count(config, len(checkpoint.tensors))
    if excess is not None:
        raise InputError(
            f"{shown}: its {CONFIG} states {printable(excess)}, and {len(checkpoint.tensors):,} tensors are here; give "
            f"the {CONFIG} that belongs to the weights."
        )
    with silenced(shown, f"make a {task.noun} of its {CONFIG}"), torch.device("meta"):
        import transformers

        known = type(transformers.AutoConfig.for_model(config["model_type"])).from_dict(config)
        auto = getattr(transformers, task.auto)
        empty = auto.from_config(known, dtype=getattr(torch, TORCH_NAMES[dtype]), trust_remote_code=False)
    return outline_from(checkpoint.root, empty, known, dtype)


def loaded(outline: ModelOutline, checkpoint: Checkpoint, device: str) -> tuple[Any, tuple[str, ...]]:
    """Return the model with the weights of a checkpoint, in evaluation mode on a device, and notes.

    Raises InputError if weights are missing or have another shape, and EnvironmentFailure if memory does not suffice.
    """
    import torch

    shown, kind = printable(checkpoint.where), type(outline.empty).__name__
    dtype = getattr(torch, TORCH_NAMES[outline.dtype])
    with silenced(shown, f"load {outline.nbytes:,} bytes of weights"):
        values = {name: as_torch(read(checkpoint, info), info.dtype) for name, info in checkpoint.tensors.items()}
        model, loading = type(outline.empty).from_pretrained(
            None,
            config=outline.empty.config,
            state_dict=values,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    del values
    notes = loading_notes(shown, kind, loading)
    with memory_errors(f"{device}: out of memory for {outline.nbytes:,} bytes of weights{cpu_hint(device)}."):
        return model.to(device).eval(), notes


def as_torch(x: Array, dtype: str) -> torch.Tensor:
    """Return an array as a tensor of its stored dtype."""
    import torch

    if dtype == "BF16":
        return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
    if dtype.startswith("F8") or dtype not in _PLAIN:
        raise RefusedError(f"a tensor of type {printable(dtype)} is not a value that a model computes with.")
    return torch.from_numpy(np.ascontiguousarray(x))


_PLAIN = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def encoder_of(outline: ModelOutline) -> tuple[Encode, str | None]:
    """Return what makes tokens of a text or a conversation, and a note where bytes are the tokens.

    Raises InputError for a directory without a tokenizer, if its vocabulary is not one of bytes.
    """
    found = tokenizer(outline)
    if found is not None:
        return found, None
    shown = printable(outline.folder)
    if outline.vocabulary > BYTES_VOCABULARY:
        raise InputError(
            f"{shown}: has no tokenizer, and its vocabulary of {outline.vocabulary:,} is not one of bytes; copy the "
            "tokenizer of the model (tokenizer.json and tokenizer_config.json) into the directory."
        )
    return _bytes_of(shown), f"{shown} has no tokenizer: every byte of the text is a token."


def _bytes_of(shown: str) -> Callable[[Any], list[int]]:
    def encode(part: Any) -> list[int]:
        if not isinstance(part, str):
            raise InputError(f"{shown}: has no tokenizer, and so no template for conversations; give a plain text.")
        return byte_tokens(part)

    return encode


def masked_positions(count: int, seed: int) -> Array:
    """Return the positions of a window that are masked, ascending: a seventh of them, about 15 % as in BERT (Devlin et
    al. 2019, section 3.1), one of every seven consecutive ones."""
    random = np.random.Generator(np.random.Philox(seed))
    starts = np.arange(0, max(count - 6, 1), 7)
    return starts + random.integers(0, min(7, count), len(starts))


def refuse_other_vocabulary(original: ModelOutline, other: ModelOutline) -> None:
    """Raise RefusedError for a checkpoint that predicts over another vocabulary."""
    if original.vocabulary != other.vocabulary:
        raise RefusedError(
            f"{printable(other.folder)}: has a vocabulary of {other.vocabulary:,}, and {printable(original.folder)} "
            f"one of {original.vocabulary:,}: their predictions are not of the same tokens."
        )


def mask_token(outline: ModelOutline) -> int:
    """Return the token that masks others. Raises InputError for a tokenizer without one."""
    folder = Path(outline.folder)
    with silenced(printable(folder), "load its tokenizer"):
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).mask_token_id
    if found is None:
        raise InputError(f"{printable(folder)}: its tokenizer has no mask token, so nothing can be masked.")
    return int(found)


def parse_compute_dtype(word: str | None) -> str:
    """Return the safetensors name of the type to compute in; F32 unless another is named. Raises UsageError."""
    from mxcli.flows.capture.model import parse_dtype

    found = parse_dtype(word) or "F32"
    if found == "F64":
        raise UsageError("--compute-dtype f64: models compute in f32, bf16 or f16.")
    return found
