"""Checks of what config.json says of the model: its layers, widths, heads, experts and vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcli.files.checkpoint import read
from mxcli.files.directory import GGUF
from mxcli.files.model_files import CONFIG
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.flows.verify.check import PROBLEM, WARNING, Check, Finding, some
from mxcli.flows.verify.errors import same_bytes
from mxcli.flows.verify.subject import Subject

Config = Mapping[str, object]
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
VOCABULARY = ("vocab_size",)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Keys of the configuration of the part that reads and writes text."""
_OTHER_PARTS = re.compile(
    r"(?i)(^|\.)(visual|vision|vit|image|audio|speech|encoder|decoder|mtp|draft|talker|code)[^.]*\."
)
NUMBERED = re.compile(r"^(?P<stack>(?:.*?\.)?(?:layers|layer|h|blocks|block|blk))\.(?P<number>\d+)\.")
"""The name of a tensor in a list of layers."""
_EXPERT = re.compile(r"^(?P<stack>.*\.experts)\.(?P<number>\d+)\.")

CONVENTIONAL = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("granite", "gpt_oss", "olmo2", "smollm3", "starcoder2", "cohere", "stablelm", "phi", "helium", "seed_oss"),
    }
)
"""Model types whose attention has one projection each for queries, keys, values and outputs, without a gate."""


@dataclass(frozen=True)
class Model:
    """A checkpoint with the configuration of its text part."""

    subject: Subject

    @cached_property
    def config(self) -> Config:
        """The configuration that states the number of layers: the whole, or that of the text part."""
        whole = self.subject.checkpoint.config or {}
        if _number(whole, LAYERS) is not None:
            return whole
        parts = [part for key in TEXT_PARTS if isinstance(part := whole.get(key), Mapping)]
        return parts[0] if parts else whole

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The plain tensors of the text part."""
        view = self.subject.view
        tensors = self.subject.checkpoint.tensors if view is None else view.tensors
        unused = frozenset() if view is None else frozenset(view.unused)
        return {
            name: info
            for name, info in tensors.items()
            if name not in unused and info.role not in ("scale", "codes") and not _OTHER_PARTS.search(name)
        }

    @cached_property
    def stacks(self) -> dict[str, set[int]]:
        """The numbers of the layers by the name of their list."""
        found: dict[str, set[int]] = {}
        view = self.subject.view
        names = (*self.tensors, *(view.unused if view is not None else ()), *self.subject.misfits)
        for match in filter(None, map(NUMBERED.match, names)):
            found.setdefault(match["stack"], set()).add(int(match["number"]))
        return found

    def size(self, *keys: str) -> int | None:
        """Return the first of these numbers that the configuration states."""
        return _number(self.config, keys)

    @property
    def model_type(self) -> str:
        """The model type of the text part."""
        return str(self.config.get("model_type"))

    @property
    def heads(self) -> tuple[int, int, int] | None:
        """The numbers of query heads and of key and value heads, and the size of a head; None if one is not known."""
        heads, hidden = self.size("num_attention_heads", "n_head"), self.size(*HIDDEN)
        if heads is None or hidden is None or self.model_type not in CONVENTIONAL:
            return None
        shared = self.size("num_key_value_heads") or heads
        return heads, shared, self.size("head_dim") or hidden // heads


def _number(config: Config, keys: tuple[str, ...]) -> int | None:
    values = [value for key in keys if type(value := config.get(key)) is int and value > 0]
    return values[0] if values else None


Sized = Callable[[Model], int | None]


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of tensor and what its rows and columns are: `name` is searched in the name without numbers. Rows that are
    `conventional` hold for the model types in CONVENTIONAL only."""

    name: str
    rows: Sized | None
    columns: Sized | None
    stated: str
    conventional: bool = True


def _of(*keys: str) -> Sized:
    return lambda model: model.size(*keys)


def _queries(model: Model) -> int | None:
    return None if model.heads is None else model.heads[0] * model.heads[2]


def _keys(model: Model) -> int | None:
    return None if model.heads is None else model.heads[1] * model.heads[2]


_WIDE = _of("intermediate_size", "n_inner", "ffn_dim")
_EXPERT_WIDE = _of("moe_intermediate_size", "intermediate_size")
_HIDDEN, _WORDS = _of(*HIDDEN), _of(*VOCABULARY)
ROWS = (
    Row(r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings)\.weight$", _WORDS, None, "vocab_size", False),
    Row(r"(^|\.)(embed_tokens|wte)\.weight$", _WORDS, _HIDDEN, "vocab_size, hidden_size"),
    Row(r"(^|\.)lm_head\.weight$", _WORDS, _HIDDEN, "vocab_size, hidden_size"),
    Row(r"(^|\.)q_proj\.weight$", _queries, _HIDDEN, "num_attention_heads * head_dim, hidden_size"),
    Row(r"(^|\.)[kv]_proj\.weight$", _keys, _HIDDEN, "num_key_value_heads * head_dim, hidden_size"),
    Row(r"(^|\.)self_attn\.o_proj\.weight$", _HIDDEN, _queries, "hidden_size, num_attention_heads * head_dim"),
    Row(r"(^|\.)mlp\.(gate|up)_proj\.weight$", _WIDE, _HIDDEN, "intermediate_size, hidden_size"),
    Row(r"(^|\.)mlp\.down_proj\.weight$", _HIDDEN, _WIDE, "hidden_size, intermediate_size"),
    Row(r"\.experts\.(gate_proj|up_proj|w1|w3)\.weight$", _EXPERT_WIDE, _HIDDEN, "moe_intermediate_size, hidden_size"),
    Row(r"\.experts\.(gate_up_proj|down_proj)$", _of(*EXPERTS), None, "num_local_experts"),
    Row(r"\.experts\.(down_proj|w2)\.weight$", _HIDDEN, _EXPERT_WIDE, "hidden_size, moe_intermediate_size"),
    Row(
        r"(^|\.)(input|post_attention|pre_feedforward|post_feedforward)_layernorm\.weight$",
        _HIDDEN,
        None,
        "hidden_size",
    ),
    Row(r"(^|^model\.|\.model\.)norm\.weight$", _HIDDEN, None, "hidden_size"),
)
"""Every row that matches a tensor holds for it. A vector has rows only."""
_COMPILED = tuple((row, re.compile(row.name)) for row in ROWS)
_NUMBERS = re.compile(r"\.\d+(?=\.)")
_RESTORE = "Restore the config.json of this checkpoint, or the tensors."


def _layers(model: Model) -> Iterator[Finding]:
    stated = model.size(*LAYERS)
    if stated is None or model.subject.checkpoint.kind == GGUF or len(model.stacks) != 1:
        return
    ((stack, numbers),) = model.stacks.items()
    extra = model.size("num_nextn_predict_layers") or 0
    missing = [number for number in range(min(stated, max(numbers) + 2)) if number not in numbers]
    beyond = sorted(number for number in numbers if number >= stated + extra)
    if len(missing) + len(beyond) and (beyond or not model.size("num_hidden_groups")):
        listed = [f"{stack}.{number}" for number in missing[:3]]
        gone = max(stated - len([number for number in numbers if number < stated]), len(missing))
        what = [f"{gone:,} missing ({', '.join(listed)}{', …' if gone > len(listed) else ''})"] if missing else []
        what += [f"{len(beyond):,} too many ({some(f'{stack}.{number}' for number in beyond)})"] if beyond else []
        key = next(key for key in LAYERS if model.config.get(key) == stated)
        yield Finding(
            CONFIG,
            f"{key} is {stated:,}, and {len(numbers):,} layers are here: {', '.join(what)}",
            "as many layers as the configuration states",
            _RESTORE,
        )


def _experts(model: Model) -> Iterator[Finding]:
    stated = model.size(*EXPERTS)
    if stated is None:
        return
    stacks: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, model.tensors)):
        stacks.setdefault(match["stack"], set()).add(int(match["number"]))
    for stack, numbers in stacks.items():
        if numbers != set(range(stated)):
            missing = sorted(set(range(min(stated, max(numbers) + 2))) - numbers)
            listed = f": {some(map(str, missing))} missing" if missing else ""
            yield Finding(stack, f"{len(numbers):,} experts{listed}", f"{stated:,}, as {CONFIG} states", _RESTORE)


def _shapes(model: Model) -> Iterator[Finding]:
    conventional = model.model_type in CONVENTIONAL
    quantized = model.subject.weights
    differing: dict[tuple[str, str, str], list[str]] = {}
    for name, info in model.tensors.items():
        if info.role in ("bias", "buffer", "lora") or not info.shape:
            continue
        kind = _NUMBERS.sub("", name)
        for row, pattern in _COMPILED:
            if (row.conventional and not conventional) or not pattern.search(kind):
                continue
            # A padded weight is stored with more columns than it has.
            needed = [None if part is None else part(model) for part in (row.rows, row.columns)][: len(info.shape)]
            if any(need is not None and need != size for need, size in zip(needed, info.shape, strict=False)):
                stored = quantized.get(name)
                padded = stored is not None and _fits_padded(needed, info.shape, stored.weight.format.block[1] or 1)
                if not padded:
                    wanted = [size if need is None else need for need, size in zip(needed, info.shape, strict=False)]
                    key = (kind, f"{list(info.shape)}", f"{wanted} by {row.stated}")
                    differing.setdefault(key, []).append(name)
    for (_, value, need), names in differing.items():
        more = f" (and {len(names) - 1:,} more of its kind)" if len(names) > 1 else ""
        yield Finding(names[0], f"has shape {value}{more}", f"{need} of {CONFIG}", _RESTORE)


def _fits_padded(needed: list[int | None], shape: tuple[int, ...], block: int) -> bool:
    """Return whether a matrix has the needed sizes, its columns filled up to whole blocks."""
    rows, columns = needed[0], needed[-1]
    return (rows is None or rows == shape[0]) and (columns is None or -(-columns // block) * block == shape[-1])


def _ends(model: Model) -> Iterator[Finding]:
    """Yield the embedding, the last norm and the output head that a model of text must have and lacks."""
    config, checkpoint = model.config, model.subject.checkpoint
    whole = checkpoint.config or {}
    names = " ".join(map(str, listed)) if isinstance(listed := whole.get("architectures"), list) else ""
    if checkpoint.kind == GGUF or "ForCausalLM" not in names or not model.stacks or _number(config, LAYERS) is None:
        return
    roles = {info.role for info in model.tensors.values()}
    stack = next(iter(model.stacks))
    beginning = stack[: stack.rfind(".") + 1]
    if "embedding" not in roles:
        name = f"{beginning}embed_tokens.weight"
        yield Finding(name, "no embedding is here", f"one: {names} reads tokens", _RESTORE)
    tie = whole.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if "lm_head" not in roles and tie is False:
        value = f"missing, and {CONFIG} says tie_word_embeddings false"
        yield Finding("lm_head.weight", value, "an output head, or true", _RESTORE)
    if tie is True and (head := _other_head(model)) is not None:
        yield Finding(
            CONFIG,
            f"tie_word_embeddings is true, and {head} has other values than the embedding",
            "false: loaders that tie the head ignore it",
            _RESTORE,
        )
    outside = [name for name, info in model.tensors.items() if info.role == "norm" and not NUMBERED.match(name)]
    if model.model_type in CONVENTIONAL and not outside:
        yield Finding(f"{beginning}norm.weight", "missing", f"the norm after the last layer: {names} has it", _RESTORE)


def _other_head(model: Model) -> str | None:
    """Return the plain output head that differs from the embedding of its shape and dtype, or None."""
    plain = [info for name, info in model.tensors.items() if name not in model.subject.weights]
    heads = [info for info in plain if info.role == "lm_head"]
    words = [info for info in plain if info.role == "embedding" and heads and info.shape == heads[0].shape]
    if len(heads) != 1 or len(words) != 1 or heads[0].dtype != words[0].dtype:
        return None
    checkpoint = model.subject.checkpoint
    same = same_bytes(read(checkpoint, heads[0]), read(checkpoint, words[0]))
    return None if same else heads[0].name


def _types(model: Model) -> Iterator[Finding]:
    """Yield plain tensors that hold values by their names and have another type: integers, or the other half type."""
    plain = {name: info for name, info in model.tensors.items() if name not in model.subject.weights}
    halves = Counter(info.dtype for info in plain.values() if info.dtype in ("F16", "BF16"))
    usual = halves.most_common(1)[0][0] if halves else ""
    for name, info in plain.items():
        is_integer = name.endswith("norm.weight") and not DTYPES[info.dtype].is_float
        if is_integer or (info.dtype in halves and info.dtype != usual and halves[info.dtype] * 4 < halves[usual]):
            yield Finding(
                name,
                f"is {info.dtype}",
                f"{usual or 'a float type'}, as the other tensors: these bytes are read as other values",
                "Copy it from the source: mxcli verify … --against SOURCE --repair.",
            )


def _dtype(model: Model) -> Iterator[Finding]:
    stated = next((v for key in ("dtype", "torch_dtype") if isinstance(v := model.config.get(key), str)), None)
    wanted = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}.get(str(stated))
    weights = model.subject.weights
    kept = {
        i.dtype for n, i in model.tensors.items() if n not in weights and i.role in ("embedding", "norm", "lm_head")
    }
    if wanted is not None and kept and wanted not in kept and model.subject.checkpoint.kind != GGUF:
        yield Finding(
            CONFIG,
            f"states {stated}, and plain tensors are {', '.join(sorted(kept))}",
            "the dtype of the tensors: loaders convert them to the one stated",
            _RESTORE,
        )


MODEL_CHECKS: tuple[Check[Model], ...] = (
    Check(
        "layers",
        PROBLEM,
        "layers that the configuration counts and that are not there, or the other way round",
        "the numbers of the layers against num_hidden_layers, n_layer or num_layers",
        _layers,
    ),
    Check(
        "experts",
        PROBLEM,
        "experts that the configuration counts and that are not there, or the other way round",
        "the numbers of the experts of every layer against the number in the configuration",
        _experts,
    ),
    Check(
        "model_shape",
        PROBLEM,
        "shapes that contradict the configuration: loaders refuse the tensors",
        "embeddings against vocab_size; for usual model types also norms and every projection against hidden_size, "
        "intermediate_size, the heads and the experts",
        _shapes,
    ),
    Check(
        "model_ends",
        PROBLEM,
        "models without an embedding, a last norm or an output head",
        "what every ForCausalLM has; the head if tie_word_embeddings is false",
        _ends,
    ),
    Check(
        "odd_type",
        PROBLEM,
        "plain tensors of a type that their bytes were not written in",
        "norms that are integers; F16 among BF16 and the other way round",
        _types,
    ),
    Check(
        "model_dtype",
        WARNING,
        "a configuration with another dtype than the tensors",
        "dtype or torch_dtype against norms, embeddings and output heads",
        _dtype,
    ),
)
