"""A causal language model of transformers, from a local directory: its outline first, its weights when all is checked.

Nothing is fetched and none of a directory's own code is run.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxcli.backends import AUTO, CPU
from mxcli.errors import EnvironmentFailure, InputError, MxcliError, RefusedError, UsageError, import_extra, printable
from mxcli.files.checkpoint import Checkpoint
from mxcli.files.model_files import CONFIG

PIECE_CHARACTERS = 1 << 20
BYTES = "bytes"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Text:
    """A text, what to call it, and the SHA-256 of its bytes."""

    name: str
    content: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Windows:
    """How much of a text is read: `steps` steps of `batch` windows of `tokens` tokens, without gaps, and of each window
    the next token too, which the last is to predict."""

    steps: int
    batch: int
    tokens: int

    @property
    def step_tokens(self) -> int:
        """Tokens that a step reads."""
        return self.batch * self.tokens

    @property
    def needed(self) -> int:
        """Tokens that the text must have."""
        return self.steps * self.step_tokens + 1

    def of_step(self, ids: NDArray[np.int64], step: int) -> NDArray[np.int64]:
        """[batch, tokens + 1]: the windows of a step, each with the token after it."""
        starts = (step * self.batch + np.arange(self.batch)) * self.tokens
        return np.take(ids, starts[:, None] + np.arange(self.tokens + 1))


def stated_text(name: str, data: bytes) -> Text:
    """The text that bytes spell; raises InputError where there is none, or it is not UTF-8."""
    shown = printable(name)
    if not data:
        raise InputError(f"{shown}: is empty, so that there is nothing to read; give a text.")
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown}: is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start:,}; convert it first."
        ) from error
    return Text(name, content, hashlib.sha256(data).hexdigest())


def byte_tokens(text: str) -> list[int]:
    """Every byte of the text as a token, for models that are made so."""
    return list(text.encode())


def tokens_of(text: Text, encode: Encode, windows: Windows, vocabulary: int) -> NDArray[np.int64]:
    """The first tokens of a text, as many as the windows need.

    The text is encoded in pieces of whole lines, of a million characters at least, until there are enough. Raises
    InputError where there are too few, and RefusedError for a token that the model does not know.
    """
    ids: list[int] = []
    for piece in _pieces(text.content):
        ids += encode(piece)
        if len(ids) >= windows.needed:
            break
    if len(ids) < windows.needed:
        steps = max(0, len(ids) - 1) // windows.step_tokens
        way = f"--steps {steps}" if steps else "fewer --tokens"
        counted = "1 step" if windows.steps == 1 else f"{windows.steps:,} steps"
        raise InputError(
            f"{printable(text.name)}: has {len(ids):,} tokens, and {counted} of {windows.batch:,} x "
            f"{windows.tokens:,} tokens and the one after need {windows.needed:,}; give a longer text, or {way}."
        )
    found = np.array(ids[: windows.needed], np.int64)
    if found.max() >= vocabulary:
        at = int(np.argmax(found >= vocabulary))
        raise RefusedError(
            f"{printable(text.name)}: token {at:,} is {found[at]:,}, and the model knows those below {vocabulary:,} "
            "only; give a text that it can read, or the tokenizer that belongs to it."
        )
    return found


def _pieces(content: str) -> Iterator[str]:
    start = 0
    while start < len(content):
        line_end = content.find("\n", start + PIECE_CHARACTERS)
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
_TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types to compute in."""
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model without weights: `empty` has its modules; `dtype` is what it computes in, by safetensors name.
    `vocabulary` is how many tokens it knows, and `positions` how many it reads at a time (None: not said)."""

    folder: Path
    empty: Any
    dtype: str
    vocabulary: int
    positions: int | None
    nbytes: int


def stated_dtype(word: str | None) -> str | None:
    """The type that a word such as bf16 or bfloat16 names; None: none is named. Raises UsageError for other words."""
    if word is None or word == AUTO:
        return None
    names = {**{name.lower(): name for name in _TORCH}, **{long: name for name, long in _TORCH.items()}}
    if word.lower() not in names:
        raise UsageError(f"unknown dtype '{printable(word)}': {', '.join(name.lower() for name in _TORCH)} can be had.")
    return names[word.lower()]


def outline(checkpoint: Checkpoint, dtype: str | None) -> ModelOutline:
    """The modules of a checkpoint's model, from its config.json alone; it is to compute in `dtype` (None: as it says).

    Raises EnvironmentFailure without transformers, InputError for what it cannot make a causal language model of, and
    RefusedError for a quantized checkpoint.
    """
    folder = checkpoint.root
    shown = printable(folder)
    torch = import_extra("torch", "capturing a model", "capture")
    import_extra("transformers", "capturing a model")
    if checkpoint.config is None:
        raise InputError(f"{shown}: has no {CONFIG}, which says what model it is; give a transformers model directory.")
    if checkpoint.dialect is not None or "quantization_config" in checkpoint.config:
        raise RefusedError(f"{shown}: is quantized already; capture the original, or what `mxcli dequantize` makes.")
    with _transformers(shown, f"read its {CONFIG}"):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(folder, **_LOCAL)
    name = dtype or _own_dtype(config, checkpoint)
    own = getattr(torch, _TORCH[name])
    with _transformers(shown, "make a causal language model of it"), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=own, trust_remote_code=False)
    settings = config.get_text_config()
    embeddings = empty.get_input_embeddings()
    return ModelOutline(
        folder,
        empty,
        name,
        int(getattr(embeddings, "num_embeddings", settings.vocab_size)),
        getattr(settings, "max_position_embeddings", None),
        sum(each.numel() * each.element_size() for each in empty.parameters()),
    )


def load(seen: ModelOutline, device: str) -> tuple[Any, tuple[str, ...]]:
    """The model with its weights on a device, ready to be read from: dropout is off; and what to say of them.

    Raises InputError where weights are missing or of another shape, which would be made up, and EnvironmentFailure
    where there is no memory for them.
    """
    import torch

    shown, kind = printable(seen.folder), type(seen.empty).__name__
    dtype = getattr(torch, _TORCH[seen.dtype])
    with _transformers(shown, f"load {seen.nbytes:,} bytes of weights"):
        from transformers import AutoModelForCausalLM

        model, told = AutoModelForCausalLM.from_pretrained(
            seen.folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **_LOCAL
        )
    if other := sorted(told["mismatched_keys"]):
        name, *shapes = other[0]
        there, needed = (list(shape) for shape in shapes)
        raise InputError(
            f"{shown}: {printable(name)} is {there}, and a {kind} of its {CONFIG} needs {needed} ({len(other):,} of "
            f"its weights have another shape); give the {CONFIG} that belongs to the weights."
        )
    if missing := sorted(told["missing_keys"]):
        raise InputError(
            f"{shown}: lacks {len(missing):,} weights of a {kind}, such as {printable(missing[0])}; give a complete "
            "checkpoint."
        )
    unused = sorted(told["unexpected_keys"])
    notes = (
        f"{shown}: {len(unused):,} of its tensors are no weights of a {kind} and are not used, such as "
        f"{printable(unused[0])}."
        if unused
        else "",
    )
    with enough_memory(f"{device}: out of memory for {seen.nbytes:,} bytes of weights{elsewhere(device)}."):
        return model.to(device).eval(), tuple(filter(None, notes))


def tokenizer(seen: ModelOutline) -> Encode | None:
    """What makes tokens of text, without special ones; None where the directory has no tokenizer."""
    if not any((seen.folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    shown, files = printable(seen.folder), [name for name in TOKENIZER_FILES if (seen.folder / name).is_file()]
    with _transformers(shown, f"load its tokenizer ({', '.join(files)})"):
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(seen.folder, **_LOCAL)

    def encode(text: str) -> list[int]:
        with _transformers(shown, f"make tokens with its tokenizer ({', '.join(files)})"):
            return list(loaded(text, add_special_tokens=False, verbose=False)["input_ids"])

    return encode


def encoder(seen: ModelOutline) -> tuple[Encode, str | None]:
    """The directory's tokenizer, or bytes for tokens, and what to say then."""
    found = tokenizer(seen)
    if found is not None:
        return found, None
    return byte_tokens, f"{printable(seen.folder)} has no tokenizer: every byte of the text is a token."


def compute_device(device: str) -> str:
    """`cpu` or `cuda:N` as torch has it; raises EnvironmentFailure for a GPU that it cannot use."""
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
    """What the configuration says, else what most of the weights' bytes are of."""
    stated = str(getattr(config, "dtype", None)).removeprefix("torch.")
    names = {word: name for name, word in _TORCH.items()}
    if stated in names:
        return names[stated]
    sizes: dict[str, int] = {}
    for info in checkpoint.tensors.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    most = max(sizes, key=lambda name: sizes[name])
    return most if most in _TORCH else "F32"


@contextmanager
def enough_memory(sentence: str) -> Iterator[None]:
    """Turns what torch and the machine say of too little memory into an EnvironmentFailure of that sentence."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise EnvironmentFailure(sentence) from error


def elsewhere(device: str) -> str:
    """The way out of a GPU that is too small."""
    return "" if device == CPU else "; use --device cpu"


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory; of the machine's, torch says so in words only."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def _transformers(shown: str, task: str) -> Iterator[None]:
    """Silences transformers, and what it imports, but for errors, and says in one sentence what it cannot do.

    For its own calls only: a failure of ours is no fault of the input, nor is one of the machine, which has an errno.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            enough_memory(f"{shown}: out of memory to {task}; free some, or take a smaller model."),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            from transformers.utils import logging as own

            own.disable_progress_bar()
            yield
    except ImportError as error:
        raise EnvironmentFailure(f"{shown}: transformers cannot {task} here: {_first_line(error)}.") from error
    except MxcliError:
        raise
    except Exception as error:  # whatever kind it has: a configuration can fail every line that reads it
        if getattr(error, "errno", None) is not None:
            raise
        raise InputError(f"{shown}: transformers cannot {task}: {_first_line(error)}.") from error
    finally:
        logging.disable(before)


def _first_line(error: Exception) -> str:
    """What is said first, with what follows a colon at its end; a KeyError says only what lacks."""
    lines = str(error).strip().splitlines() or [""]
    first = " ".join([lines[0], *(line.strip() for line in lines[1:2] if lines[0].endswith(":"))])
    if not first or isinstance(error, KeyError):
        first = f"{type(error).__name__} {first}".strip()
    return printable(first).rstrip(".")
