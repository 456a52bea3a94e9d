"""A causal language model of transformers from a local directory: outline and checks first, then weights.

Nothing is downloaded, and code in the directory is never run.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxcli.backends import AUTO, CPU
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, UsageError, import_extra, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_counts import excessive_count
from mxcli.files.model_files import CONFIG

CHUNK_CHARACTERS = 1 << 20
BYTES = "bytes"

Encode = Callable[[Any], Sequence[int]]
"""What makes tokens of a text, or of the messages of a conversation."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text, its name, and the SHA-256 of its bytes."""

    name: str
    content: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Windows:
    """The part of a text that is read: `steps` steps of `batch` windows of `tokens` tokens, without gaps, and the token
    after each window, which its last token predicts."""

    steps: int
    batch: int
    tokens: int

    @property
    def step_tokens(self) -> int:
        """Return the tokens that a step reads."""
        return self.batch * self.tokens

    @property
    def needed(self) -> int:
        """Return the tokens that the text must have."""
        return self.steps * self.step_tokens + 1

    def of_step(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """Return the windows of a step, each with the token after it: [batch, tokens + 1]."""
        starts = (step * self.batch + np.arange(self.batch)) * self.tokens
        return np.take(ids, starts[:, None] + np.arange(self.tokens + 1))


def parse_text(name: str, data: bytes) -> Text:
    """Decode a text, with every end of a line as a line feed. Raises InputError if it is empty or not UTF-8."""
    shown = printable(name)
    if not data:
        raise InputError(f"{shown}: is empty; give a text.")
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start:,}; convert it first."
        ) from error
    lines = content.replace("\r\n", "\n").replace("\r", "\n")
    return Text(name, lines, hashlib.sha256(data).hexdigest())


def byte_tokens(text: str) -> list[int]:
    """Return every byte of the text as a token, for byte-level models."""
    return list(text.encode())


def tokens_of(text: Text, encode: Encode, windows: Windows, vocabulary: int) -> NDArray[np.int64]:
    """Return the first tokens of a text, as many as the windows need.

    The text is encoded in chunks of whole lines, of a million characters at least, until there are enough. Raises
    InputError if there are too few, and RefusedError for a token outside the model's vocabulary.
    """
    ids: list[int] = []
    for chunk in _chunks(text.content):
        ids += encode(chunk)
        if len(ids) >= windows.needed:
            break
    if len(ids) < windows.needed:
        steps = max(0, len(ids) - 1) // windows.step_tokens
        fewer = f"--steps {steps}" if steps else "fewer --tokens"
        counted = "1 step" if windows.steps == 1 else f"{windows.steps:,} steps"
        raise InputError(
            f"{printable(text.name)}: has {len(ids):,} tokens, and {counted} of {windows.batch:,} x "
            f"{windows.tokens:,} tokens and the one after need {windows.needed:,}; give a longer text, or {fewer}."
        )
    found = np.array(ids[: windows.needed], np.int64)
    if found.max() >= vocabulary:
        at = int(np.argmax(found >= vocabulary))
        raise RefusedError(
            f"{printable(text.name)}: token {at:,} is {found[at]:,}, and the model's vocabulary has {vocabulary:,}; "
            "use the model's own tokenizer, or another text."
        )
    return found


def _chunks(content: str) -> Iterator[str]:
    start = 0
    while start < len(content):
        line_end = content.find("\n", start + CHUNK_CHARACTERS)
        end = len(content) if line_end < 0 else line_end + 1
        yield content[start:end]
        start = end


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Compute dtypes."""
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without weights: `empty` has its modules; `dtype` is its compute dtype, by safetensors name. `vocabulary`
    is the number of tokens it knows, and `positions` the most it reads at once (None: not stated)."""

    folder: Path
    empty: Any
    dtype: str
    vocabulary: int
    positions: int | None
    nbytes: int


def parse_dtype(word: str | None) -> str | None:
    """Return the safetensors name of a dtype such as bf16 or bfloat16; None for none. Raises UsageError for other
    words."""
    if word is None or word == AUTO:
        return None
    names = {**{name.lower(): name for name in TORCH_NAMES}, **{long: name for name, long in TORCH_NAMES.items()}}
    if word.lower() not in names:
        raise UsageError(
            f"unknown dtype '{printable(word)}': {', '.join(name.lower() for name in TORCH_NAMES)} are supported."
        )
    return names[word.lower()]


def model_outline(checkpoint: Checkpoint, dtype: str | None) -> ModelOutline:
    """Build the modules of a checkpoint's model from its config.json alone, to compute in `dtype` (None: the model's).

    Raises EnvironmentFailure without transformers, InputError if it states more parts than its tensors can be of, or
    transformers cannot build a causal language model from it, and RefusedError for a quantized checkpoint.
    """
    folder = checkpoint.root
    shown = printable(folder)
    torch = import_extra("torch", "capturing a model", "capture")
    import_extra("transformers", "capturing a model")
    if checkpoint.config is None:
        raise InputError(f"{shown}: has no {CONFIG}; give a transformers model directory.")
    if checkpoint.dialect is not None or "quantization_config" in checkpoint.config:
        raise RefusedError(f"{shown}: is quantized already; capture the original, or the output of `mxcli dequantize`.")
    excess = excessive_count(checkpoint.config, len(checkpoint.tensors))
    if excess is not None:
        raise InputError(
            f"{shown}: its {CONFIG} states {printable(excess)}, and {len(checkpoint.tensors):,} tensors are here; give "
            f"the {CONFIG} that belongs to the weights."
        )
    with silenced(shown, f"read its {CONFIG}"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    name = dtype or _own_dtype(config, checkpoint)
    torch_dtype = getattr(torch, TORCH_NAMES[name])
    with silenced(shown, "make a causal language model of it"), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, trust_remote_code=False)
    return outline_from(folder, empty, config, name)


def outline_from(folder: Path, empty: Any, config: Any, dtype: str) -> ModelOutline:
    """Return the outline of modules without weights, built from a configuration."""
    settings = config.get_text_config()
    embeddings = empty.get_input_embeddings()
    return ModelOutline(
        folder,
        empty,
        dtype,
        int(getattr(embeddings, "num_embeddings", settings.vocab_size)),
        getattr(settings, "max_position_embeddings", None),
        sum(each.numel() * each.element_size() for each in empty.parameters()),
    )


def load_model(outline: ModelOutline, device: str) -> tuple[Any, tuple[str, ...]]:
    """Load the model with its weights on a device, in evaluation mode (no dropout), and return it with notes.

    Raises InputError if weights are missing or have another shape, and EnvironmentFailure if memory does not suffice.
    """
    import torch

    shown, kind = printable(outline.folder), type(outline.empty).__name__
    dtype = getattr(torch, TORCH_NAMES[outline.dtype])
    with silenced(shown, f"load {outline.nbytes:,} bytes of weights"):
        from transformers import AutoModelForCausalLM

        model, loading = AutoModelForCausalLM.from_pretrained(
            outline.folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_LOCAL
        )
    notes = loading_notes(shown, kind, loading)
    with memory_errors(f"{device}: out of memory for {outline.nbytes:,} bytes of weights{cpu_hint(device)}."):
        return model.to(device).eval(), notes


def loading_notes(shown: str, kind: str, loading: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on what transformers loaded of a model. Raises InputError if weights are missing or have another
    shape."""
    if other := sorted(loading["mismatched_keys"]):
        name, *shapes = other[0]
        stored, needed = (list(shape) for shape in shapes)
        raise InputError(
            f"{shown}: {printable(name)} is {stored}, and a {kind} of its {CONFIG} needs {needed} ({len(other):,} of "
            f"its weights have another shape); give the {CONFIG} that belongs to the weights."
        )
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"{shown}: lacks {len(missing):,} weights of a {kind}, such as {printable(missing[0])}; give a complete "
            "checkpoint."
        )
    unused = sorted(loading["unexpected_keys"])
    if not unused:
        return ()
    return (
        f"{shown}: {len(unused):,} of its tensors are not weights of a {kind} and are not used, such as "
        f"{printable(unused[0])}.",
    )


def tokenizer(outline: ModelOutline) -> Encode | None:
    """Load what encodes text, without special tokens; None if the directory has no tokenizer."""
    if not any((outline.folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    shown, files = printable(outline.folder), [name for name in TOKENIZER_FILES if (outline.folder / name).is_file()]
    with silenced(shown, f"load its tokenizer ({', '.join(files)})"):
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(outline.folder, **_LOCAL)

    def encode(text: Any) -> list[int]:
        with silenced(shown, f"make tokens with its tokenizer ({', '.join(files)})"):
            if not isinstance(text, str):
                return list(loaded.apply_chat_template(text, tokenize=True, return_dict=False))
            return list(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def encoder(outline: ModelOutline) -> tuple[Encode, str | None]:
    """Return the directory's tokenizer, or bytes as tokens, with a note in that case."""
    found = tokenizer(outline)
    if found is not None:
        return found, None
    return byte_tokens, f"{printable(outline.folder)} has no tokenizer: every byte of the text is a token."


def compute_device(device: str) -> str:
    """Return `cpu` or `cuda:N` for torch. Raises EnvironmentFailure for a GPU that it cannot use."""
    if device == CPU:
        return CPU
    import torch

    if not torch.cuda.is_available():
        if device == AUTO:
            return CPU
        raise EnvironmentFailure(
            f"--device {device}: torch sees no GPU here; `mxcli doctor` says why, or use --device cpu."
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise EnvironmentFailure(f"--device {device}: torch sees {torch.cuda.device_count()} GPUs, counted from 0.")
    return f"cuda:{index}"


def _own_dtype(config: Any, checkpoint: Checkpoint) -> str:
    """Return the dtype in the configuration, else that of most of the weights' bytes."""
    stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
    names = {word: name for name, word in TORCH_NAMES.items()}
    if stated in names:
        return names[stated]
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    return most if most in TORCH_NAMES else "F32"


@contextmanager
def memory_errors(sentence: str) -> Iterator[None]:
    """Turn out-of-memory errors of torch and the machine into an EnvironmentFailure with that sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise EnvironmentFailure(sentence) from error


def cpu_hint(device: str) -> str:
    """Return the hint for a GPU that is too small."""
    return "" if device == CPU else "; use --device cpu"


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; torch reports the machine's in words only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def silenced(shown: str, task: str) -> Iterator[None]:
    """Silence transformers, and what it imports, except for errors, and report in one sentence what it cannot do.

    For calls of transformers only: other failures are not faults of the input, nor are those of the machine, which have
    an errno.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            memory_errors(f"{shown}: out of memory to {task}; free some, or take a smaller model."),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            from transformers.utils import logging as transformers_logging

            transformers_logging.disable_progress_bar()
            yield
    except ImportError as error:
        raise EnvironmentFailure(f"{shown}: transformers cannot {task} here: {_first_line(error)}.") from error
    except MxcliError:
        raise
    except Exception as error:  # of any type: a configuration can fail every line that reads it
        if getattr(error, "errno", None) is not None:
            raise
        raise InputError(f"{shown}: transformers cannot {task}: {_first_line(error)}.") from error
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    """Return the first line, with the next one after a colon; a KeyError states only the missing key."""
    lines = str(error).strip().splitlines() or [""]
    first = " ".join([lines[0], *(line.strip() for line in lines[1:2] if lines[0].endswith(":"))])
    if not first or isinstance(error, KeyError):
        first = f"{type(error).__name__} {first}".strip()
    return printable(first).rstrip(".")
