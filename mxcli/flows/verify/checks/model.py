"""Checks of what config.json says of the model: its layers, widths, heads, experts and vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from mxcli.files.checkpoint import read
from mxcli.files.directory import GGUF
from mxcli.files.model_files import CONFIG
from mxcli.files.roles import role_of
from mxcli.files.tensors import DTYPES
from mxcli.flows.verify.checks.check import PROBLEM, WARNING, Check, Finding, some
from mxcli.flows.verify.checks.model_rows import FAMILIES, REQUIRED, ROWS
from mxcli.flows.verify.checks.text_model import CONVENTIONAL, EXPERTS, NUMBERED, Model
from mxcli.flows.verify.errors import same_bytes

_EXPERT = re.compile(r"^(?P<stack>.*\.experts)\.(?P<number>\d+)\.")
_NO_WORDS = re.compile(r"(^|\.)(wpe|[^.]*(position|token_type|relative_attention)[^.]*)\.")
"""Tables that are not looked up by words."""
_NUMBERS = re.compile(r"\.\d+(?=\.)")
_STACK = re.compile(r"\.(experts|switch_mlp)\.\w+\.weight$")
"""Stacks of matrices that have the shape of one."""
_RESTORE = "Restore the config.json of this checkpoint, or the tensors."


def _layers(model: Model) -> Iterator[Finding]:
    for stack, keys in () if "depths" in model.config or model.is_counted_otherwise else model.counted:
        stated = model.size(*keys)
        if stated is not None:
            key = next(key for key in keys if model.config.get(key) == stated)
            numbers = model.stacks.get(stack, set())
            found = _counted(model, stack, numbers, key, stated)
            yield from (each for each in found if not numbers or model.expected.numbers(stack) != numbers)


def _counted(model: Model, stack: str, numbers: set[int], key: str, stated: int) -> Iterator[Finding]:
    """Yield the layers of a list that the configuration counts and that are missing, or the other way round."""
    extra = model.size("num_nextn_predict_layers") or 0
    missing = _first_missing(numbers, stated)
    beyond = sorted(number for number in numbers if number >= stated + extra)
    if len(missing) + len(beyond) and (beyond or not model.size("num_hidden_groups")):
        listed = [f"{stack}.{number}" for number in missing]
        gone = stated - len([number for number in numbers if number < stated])
        what = [f"{gone:,} missing ({', '.join(listed)}{', …' if gone > len(listed) else ''})"] if missing else []
        what += [f"{len(beyond):,} too many ({some(f'{stack}.{number}' for number in beyond)})"] if beyond else []
        yield Finding(
            CONFIG,
            f"{key} is {stated:,}, and {len(numbers):,} layers are here: {', '.join(what)}",
            "as many layers as the configuration states",
            _RESTORE,
        )


def _first_missing(numbers: set[int], stated: int) -> list[int]:
    """Return the first three numbers below `stated` that are missing, up to the one after the largest."""
    below = range(min(stated, max(numbers, default=0) + 2))
    return list(islice((number for number in below if number not in numbers), 3))


def _experts(model: Model) -> Iterator[Finding]:
    stated = model.size(*EXPERTS)
    if stated is None or model.is_counted_otherwise:
        return
    stacks: dict[str, set[int]] = {}
    for match in filter(None, map(_EXPERT.match, model.tensors)):
        stacks.setdefault(match["stack"], set()).add(int(match["number"]))
    for stack, numbers in stacks.items():
        if (len(numbers) != stated or max(numbers) >= stated) and model.expected.numbers(stack) != numbers:
            missing, below = _first_missing(numbers, stated), min(stated, max(numbers) + 2)
            more = below - len([number for number in numbers if number < below]) - len(missing)
            others = f" and {more:,} more" if more else ""
            listed = f", without {', '.join(map(str, missing))}{others}" if missing else ""
            yield Finding(stack, f"{len(numbers):,} experts{listed}", f"{stated:,}, as {CONFIG} states", _RESTORE)


def _shapes(model: Model) -> Iterator[Finding]:
    quantized = model.subject.weights
    differing: dict[tuple[str, str, str], list[str]] = {}
    of_type = [(row, re.compile(row.name)) for row in ROWS if not row.types or model.model_type in row.types]
    for name, info in model.tensors.items():
        if info.role in ("bias", "buffer", "lora") or not info.shape:
            continue
        kind, shape = _NUMBERS.sub("", name), info.shape
        shape = shape[1:] if len(shape) > 2 and _STACK.search(name) else shape
        for row, pattern in of_type:
            if not pattern.search(kind):
                continue
            # A padded weight is stored with more columns than it has.
            needed = [None if part is None else part(model) for part in (row.rows, row.columns)][: len(shape)]
            if any(need is not None and need != size for need, size in zip(needed, shape, strict=False)):
                stored = quantized.get(name)
                padded = stored is not None and _fits_padded(needed, shape, stored.weight.format.block[1] or 1)
                if not padded and not model.expected.has_shape(name, info.shape):
                    wanted = [size if need is None else need for need, size in zip(needed, shape, strict=False)]
                    key = (kind, f"{list(shape)}", f"{wanted} by {row.stated}")
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
    config, checkpoint, names, expected = model.config, model.subject.checkpoint, model.generates, model.expected
    whole = checkpoint.config or {}
    is_gguf = checkpoint.kind == GGUF
    if not names or not model.stacks or not model.states_layers:
        return
    by_role = [*((info.role, name) for name, info in model.tensors.items()), *_unread_roles(model)]
    roles = {role for role, _ in by_role}
    stack = next(iter(model.stacks))
    beginning = stack[: stack.rfind(".") + 1]
    words = (name for role, name in by_role if role == "embedding" and not _NO_WORDS.search(name))
    if next(words, None) is None and not expected.lacks_all(roles={"embedding"}):
        name = "shared.weight" if model.is_encoder_decoder else f"{beginning}embed_tokens.weight"
        name = "token_embd.weight" if is_gguf else name
        yield Finding(name, "no embedding of words is here", f"one: {names} reads tokens", _RESTORE)
    tie = whole.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if "lm_head" not in roles and tie is False and not expected.lacks_all(roles={"lm_head"}):
        value = f"missing, and {CONFIG} says tie_word_embeddings false"
        yield Finding("output.weight" if is_gguf else "lm_head.weight", value, "an output head, or true", _RESTORE)
    if tie is True and (head := _other_head(model)) is not None:
        yield Finding(
            CONFIG,
            f"tie_word_embeddings is true, and {head} has other values than the embedding",
            "false: loaders that tie the head ignore it",
            _RESTORE,
        )
    outside = [name for name, info in model.tensors.items() if not NUMBERED.match(name)]
    if model.model_type in CONVENTIONAL and not any(model.tensors[name].role == "norm" for name in outside):
        name = "output_norm.weight" if is_gguf else f"{beginning}norm.weight"
        yield Finding(name, "missing", f"the norm after the last layer: {names} has it", _RESTORE)
    for row in REQUIRED:
        there = any(name == row.name or name.endswith(f".{row.name}") for name in outside)
        is_needed = model.model_type in row.types and not row.unless(config)
        if is_needed and not there and not expected.lacks_all(ending=row.name):
            yield Finding(row.name, "missing", f"{row.what}: {names} has it", _RESTORE)


def _unread_roles(model: Model) -> Iterator[tuple[str, str]]:
    """Yield the roles and names that codes which are not read have as plain tensors."""
    view = model.subject.view
    if model.subject.unread is not None and view is not None:
        codes = (info for info in view.tensors.values() if info.role == "codes")
        yield from ((role_of(info.name, info.shape, "BF16"), info.name) for info in codes)


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
    """Yield plain tensors that hold values by their names and have another type: integers, or the other half type;
    unless the record says that they had it in the source."""
    plain = {name: info for name, info in model.tensors.items() if name not in model.subject.weights}
    recorded = model.subject.record.tensors
    halves = Counter(info.dtype for info in plain.values() if info.dtype in ("F16", "BF16"))
    usual = halves.most_common(1)[0][0] if halves else ""
    for name, info in plain.items():
        if recorded.get(name, {}).get("dtype") == info.dtype:
            continue
        is_integer = name.endswith("norm.weight") and not DTYPES[info.dtype].is_float
        if is_integer or (info.dtype in halves and info.dtype != usual and halves[info.dtype] * 4 < halves[usual]):
            yield Finding(
                name,
                f"is {info.dtype}",
                f"{usual or 'a float type'}, as the other tensors: these bytes are read as other values",
                "Copy it from the source: mxcli verify … --against SOURCE --repair.",
            )


def _names(model: Model) -> Iterator[Finding]:
    """Yield the model type if the tensors have the names of another family."""
    names = [*model.subject.checkpoint.tensors, *model.tensors]
    own = next((family for family in FAMILIES if model.model_type in family.types), None)
    if model.subject.checkpoint.kind == GGUF or own is None or any(re.search(own.name, name) for name in names):
        return
    for family in FAMILIES:
        others = [name for name in names if re.search(family.name, name)]
        if others and not model.expected.is_known:
            yield Finding(
                CONFIG,
                f"model_type is {model.model_type}, and the tensors have the names of other models: {others[0]}, …",
                f"a model type with {family.shown}, or tensors with {own.shown}: its loaders find none of these",
                _RESTORE,
            )
            return


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
        "model_type",
        PROBLEM,
        "tensors with the names of models of another type: loaders find none of them",
        "the names in the layers against those of the model type of the configuration, for usual model types",
        _names,
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
        "the embedding of words; the head if tie_word_embeddings is false; for usual model types the norms and tables "
        "outside of the layers",
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
