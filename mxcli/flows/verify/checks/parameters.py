"""Checks of names and shapes against the model that transformers builds from config.json, without weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mxcli.errors import printable
from mxcli.files.directory import GGUF
from mxcli.files.model_counts import excessive_count
from mxcli.files.model_files import CONFIG
from mxcli.files.models.built import described
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding, some
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.restore import without_quantization

_MATCHING = 0.6
"""Of fewer names matching, the checkpoint has another convention of names."""
_BEGINNINGS = 16
"""The most beginnings of names, the most frequent ones, that may be added or left out."""
_REARRANGED = re.compile(r"\.experts\.|(^|\.)(inv_freq|position_ids|token_type_ids|rotary_emb|masked_bias|attn\.bias)")
"""Names that loaders rearrange or make themselves."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model, without tied and optional ones, by the names that the checkpoint gives them or would
    give: role and shape of those `expected`, and the shapes of those `found` in it. `model` is the model's class."""

    model: str
    expected: Mapping[str, tuple[str, tuple[int, ...]]]
    found: Mapping[str, tuple[int, ...]]


def parameters_of(subject: Subject) -> Parameters | str:
    """Return the parameters of the model that config.json states, or the reason why they are not known.

    Nothing is loaded from a network, and no code of the checkpoint is run.
    """
    config = subject.checkpoint.config
    is_plain = subject.checkpoint.dialect is None
    if config is None or subject.checkpoint.kind == GGUF or (subject.view is None and not is_plain):
        return f"no {CONFIG} of transformers"
    if not isinstance(config.get("model_type"), str):
        return f"{CONFIG} states no model_type"
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return "transformers and torch are not installed"
    excess = excessive_count(config, len(subject.checkpoint.tensors))
    if excess is not None:
        return f"{CONFIG} states {printable(excess)}, which is not built"
    built = _built(config)
    if isinstance(built, str):
        return built
    model, expected = built
    tensors = subject.checkpoint.tensors if subject.view is None else subject.view.tensors
    shapes = {name: info.shape for name, info in tensors.items() if info.role not in ("scale", "codes")}
    shapes |= dict.fromkeys(subject.misfits, ())
    spelled = _spelled_alike(shapes, expected)
    if spelled is None:
        return f"its names are not those of {model}"
    return Parameters(model, {spelled[name]: each for name, each in expected.items()}, shapes)


def _built(config: Mapping[str, object]) -> tuple[str, dict[str, tuple[str, tuple[int, ...]]]] | str:
    """Return the class of the model and the roles and shapes of its parameters by their names in files, or the reason
    why it cannot be built."""
    try:
        # Packages that these import write notes of their own.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            import torch
            import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        transformers.logging.set_verbosity_error()
        model_type = str(config["model_type"])
        if model_type not in CONFIG_MAPPING:
            return f"transformers does not know the model type {printable(model_type)}"
        own = CONFIG_MAPPING[model_type].from_dict(dict(without_quantization(config)))
        architectures = config.get("architectures")
        names = architectures if isinstance(architectures, list) else []
        cls: Any = next((getattr(transformers, name, None) for name in names if isinstance(name, str)), None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            return f"transformers has no model named {printable(names[0]) if names else 'in architectures'}"
        with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
            model: Any = cls(own)
            roles = described(model).roles
        optional = _optional(model)
    except Exception as error:
        return f"transformers cannot build the model: {printable(type(error).__name__)}: {printable(error)}"
    return cls.__name__, {
        name: each for name, each in roles.items() if not any(pattern.search(name) for pattern in optional)
    }


def _optional(model: Any) -> list[re.Pattern[str]]:
    """Return patterns of the names that a model does not need: what is tied to others, and what it makes itself."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:  # releases before 5 state patterns for the class, tied or not
        found = _patterns(getattr(model, "_tied_weights_keys", None))
    else:
        # A name in files may have more before it than the one in memory.
        found = [re.compile(rf"(^|\.){re.escape(str(name))}$") for name in tied]
    return [*found, *_patterns(getattr(model, "_keys_to_ignore_on_load_missing", None))]


def _patterns(keys: object) -> list[re.Pattern[str]]:
    return [re.compile(str(key)) for key in keys] if isinstance(keys, Iterable) else []


def _spelled_alike(here: Collection[str], expected: Collection[str]) -> dict[str, str] | None:
    """Return the model's names as the checkpoint spells them, with a beginning added or left out; None if they differ
    otherwise."""
    counts = Counter(name.split(".")[0] for names in (expected, here) for name in names if "." in name)
    beginnings = [f"{word}." for word, _ in counts.most_common(_BEGINNINGS)]
    forms: list[Callable[[str], str]] = [lambda name: name]
    forms += [partial(_with_beginning, each) for each in beginnings]
    forms += [partial(_without_beginning, each) for each in beginnings]
    spelled = ({name: name if name in here else form(name) for name in expected} for form in forms)
    best = max(spelled, key=lambda each: sum(name in here for name in each.values()))
    matching = sum(name in here for name in best.values())
    return best if expected and matching >= _MATCHING * len(expected) else None


def _with_beginning(beginning: str, name: str) -> str:
    return beginning + name


def _without_beginning(beginning: str, name: str) -> str:
    return name.removeprefix(beginning)


def _missing(parameters: Parameters) -> Iterator[Finding]:
    for name, (_, shape) in parameters.expected.items():
        if name in parameters.found or _REARRANGED.search(name):
            continue
        yield Finding(
            name,
            "missing",
            f"a tensor {list(shape)}: {parameters.model} has it, and loaders would make it up",
            "Copy it from the source: mxcli verify … --against SOURCE --repair.",
        )


def _shapes(parameters: Parameters) -> Iterator[Finding]:
    differing: dict[tuple[str, str], list[str]] = {}
    for name, shape in parameters.found.items():
        _, expected = parameters.expected.get(name, ("", None))
        if expected is not None and shape not in ((), expected) and not _REARRANGED.search(name):
            differing.setdefault((f"{list(shape)}", f"{list(expected)}"), []).append(name)
    for (value, need), names in differing.items():
        more = f" ({some(names[1:])} too)" if len(names) > 1 else ""
        yield Finding(
            names[0],
            f"has shape {value}{more}",
            f"{need}, which {parameters.model} has by {CONFIG}",
            f"Restore the {CONFIG} of this checkpoint, or the tensors.",
        )


PARAMETER_CHECKS: tuple[Check[Parameters], ...] = (
    Check(
        "missing_parameter",
        PROBLEM,
        "parameters of the model that are missing",
        "names against the model that transformers builds from config.json, without tied and optional ones",
        _missing,
    ),
    Check(
        "parameter_shape",
        PROBLEM,
        "parameters of another shape than the model's",
        "shapes against the model that transformers builds from config.json",
        _shapes,
    ),
)
