"""Checks of names and shapes against the model that transformers builds from config.json, without weights."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mxcli.errors import printable
from mxcli.files.directory import GGUF
from mxcli.files.model_counts import excessive_count
from mxcli.files.model_files import CONFIG
from mxcli.flows.verify.checks.check import PROBLEM, Check, Finding, some
from mxcli.flows.verify.subject import Subject
from mxcli.flows.write.restore import without_quantization

_MATCHING = 0.6
"""Of fewer names matching, the checkpoint has another convention of names."""
_REARRANGED = re.compile(r"\.experts\.|(^|\.)(inv_freq|position_ids|token_type_ids|rotary_emb|masked_bias|attn\.bias)")
"""Names that loaders rearrange or make themselves."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a model by name with their shapes: those `expected`, without tied and optional ones, and those
    of the checkpoint by the same names. `model` is the model's class."""

    model: str
    expected: Mapping[str, tuple[int, ...]]
    found: Mapping[str, tuple[int, ...]]


def parameters_of(subject: Subject) -> Parameters | str:
    """Return the parameters of the model that config.json states, or the reason why they are not known.

    Nothing is loaded from a network, and no code of the checkpoint is run.
    """
    config = subject.checkpoint.config
    if config is None or subject.checkpoint.kind == GGUF or subject.view is None:
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
    view = subject.view
    shapes = {name: info.shape for name, info in view.tensors.items() if info.role not in ("scale", "codes")}
    shapes |= dict.fromkeys(subject.misfits, ())
    found = _named_alike(shapes, expected)
    if found is None:
        return f"its names are not those of {model}"
    return Parameters(model, expected, found)


def _built(config: Mapping[str, object]) -> tuple[str, dict[str, tuple[int, ...]]] | str:
    """Return the class of the model and the shapes of its parameters, or the reason why it cannot be built."""
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
            model = cls(own)
        tied = getattr(model, "_tied_weights_keys", None) or ()
        optional = [*_patterns(tied), *_patterns(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())]
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if not any(pattern.search(name) for pattern in optional) and not _REARRANGED.search(name)
        }
    except Exception as error:
        return f"transformers cannot build the model: {printable(type(error).__name__)}: {printable(error)}"
    return cls.__name__, shapes


def _patterns(keys: object) -> list[re.Pattern[str]]:
    return [re.compile(str(key)) for key in keys] if isinstance(keys, Iterable) else []


def _named_alike(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]] | None:
    """Return the checkpoint's shapes by the model's names, with a beginning added or left out; None if they differ
    otherwise."""
    beginnings = {name.split(".")[0] + "." for name in (*expected, *shapes) if "." in name}
    forms = [shapes, *({f"{each}{name}": shape for name, shape in shapes.items()} for each in sorted(beginnings))]
    forms += [{name.removeprefix(each): shape for name, shape in shapes.items()} for each in sorted(beginnings)]
    best = max(forms, key=lambda form: len(form.keys() & expected.keys()))
    matching = len(best.keys() & expected.keys())
    return dict(best) if expected and matching >= _MATCHING * len(expected) else None


def _missing(parameters: Parameters) -> Iterator[Finding]:
    missing = [name for name in parameters.expected if name not in parameters.found]
    for name in missing:
        yield Finding(
            name,
            "missing",
            f"a tensor {list(parameters.expected[name])}: {parameters.model} has it, and loaders would make it up",
            "Copy it from the source: mxcli verify … --against SOURCE --repair.",
        )


def _shapes(parameters: Parameters) -> Iterator[Finding]:
    differing: dict[tuple[str, str], list[str]] = {}
    for name, shape in parameters.found.items():
        expected = parameters.expected.get(name)
        if expected is not None and shape not in ((), expected):
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
