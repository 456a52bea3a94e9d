"""A model of transformers built from its configuration without weights: what its parameters are, by their names in
files.

Nothing is loaded from a network, and no code of a checkpoint is run. Needs transformers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxcli.errors import printable
from mxcli.files.model_counts import excessive_count
from mxcli.files.roles import AUDIO, VISION, role_of

PIXELS, SOUND = ("pixel_values", "pixel_values_videos"), ("input_features", "input_values")
_SOUND = re.compile(r"audio|speech|acoustic|sound|codec")
_PARTS = re.compile(r"Experts|LSTM|GRU|MultiheadAttention|ParallelLinear|Conv1D|GroupedLinear")
"""Classes whose parameters are matrices of layers without being nn.Linear."""
_ROLE_OF = {"Linear": "weight", "Conv1D": "weight", "Embedding": "embedding", "Conv": "conv", "Norm": "norm"}
_MORE = {
    "weight": frozenset({"weight", "router", "mtp", "lm_head"}),
    "embedding": frozenset({"embedding", "buffer"}),
    "norm": frozenset({"norm", "bias"}),
}
"""Roles by name that say more than the class does."""
MOST_OF_HEAD = 4
"""Matrices of a head; a module with more of them is a part of the model."""
_HALVES = frozenset({"model", "decoder", "text_decoder"})
"""Last names of decoders that are half of a model, or all of it: a tower is never next to them."""


@dataclass(frozen=True, slots=True)
class Built:
    """A model: its class, the role and shape of its parameters by their names in files, and its `towers`: the modules
    next to the language model, each AUDIO or VISION."""

    model: str
    roles: Mapping[str, tuple[str, tuple[int, ...]]]
    towers: Mapping[str, str]


def build(config: Mapping[str, object]) -> Built | str:
    """Return the model that a configuration describes, or the reason why it is not built."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return "transformers and torch are not installed"
    excess = excessive_count(config, 0)
    if excess is not None:
        return f"config.json states {printable(excess)}, which is not built"
    try:
        # Packages that these import write notes of their own.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            import torch
            import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        transformers.logging.set_verbosity_error()
        model_type = str(config.get("model_type"))
        if model_type not in CONFIG_MAPPING:
            return f"transformers {transformers.__version__} does not know it"
        stated = config.get("architectures")
        names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
        cls: Any = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            return (
                f"transformers {transformers.__version__} has no model named {printable(', '.join(names) or 'there')}"
            )
        plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
        own = CONFIG_MAPPING[model_type].from_dict(plain)
        with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()):
            return described(cls(own))
    except Exception as error:
        return f"transformers cannot build it: {printable(type(error).__name__)}: {printable(error)}"


def described(model: Any) -> Built:
    """Return what the parameters of a model of transformers are; they may be on the device `meta`."""
    state = model.state_dict()
    modules = dict(model.named_modules())
    head = _path(modules, model, "get_output_embeddings")
    base = model.base_model_prefix
    has_base = bool(base) and any(name.startswith(f"{base}.") for name in state)
    tops = _small_tops(modules, state) - {base} if has_base else frozenset[str]()
    roles = {}
    for name, (source, shape) in _in_files(model, state).items():
        path, _, parameter = source.rpartition(".")
        is_head = path == head or path.split(".")[0] in tops
        roles[name] = (_role(name, shape, modules[path], parameter, is_head=is_head), shape)
    return Built(type(model).__name__, roles, _towers(model, modules, state, head))


def _small_tops(modules: Mapping[str, Any], state: Mapping[str, Any]) -> frozenset[str]:
    """Return the modules of the model itself that have few matrices and no model in them: heads, next to its base."""
    from transformers import PreTrainedModel

    matrices = Counter(name.split(".")[0] for name, tensor in state.items() if "." in name and tensor.dim() > 1)
    small = (name for name, count in matrices.items() if count <= MOST_OF_HEAD)
    return frozenset(name for name in small if not isinstance(modules[name], PreTrainedModel))


def _in_files(model: Any, state: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the names of parameters in files with those in memory, and the shapes in files."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
        revert_weight_conversion,
    )

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    found = {}
    for name, tensor in revert_weight_conversion(model, dict(state)).items():
        source, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if source in state and tensor is not None:
            found[name] = (source, tuple(tensor.shape))
    return found


def _role(name: str, shape: tuple[int, ...], module: Any, parameter: str, *, is_head: bool) -> str:
    """Return the role of a parameter by the class of its module; what only names say stays as it is."""
    by_name = role_of(name, shape, "BF16")
    kind = _kind(module)
    if len(shape) < 2:
        return by_name
    if kind in _ROLE_OF and parameter == "weight":
        role = "lm_head" if kind == "Linear" and is_head else _ROLE_OF[kind]
        return by_name if by_name in _MORE.get(role, (role,)) else role
    if by_name != "weight" or _PARTS.search(type(module).__name__):
        return by_name
    return "router" if re.search(r"Router|Gate", type(module).__name__) else "other"


def _kind(module: Any) -> str:
    import torch

    if isinstance(module, torch.nn.Linear):
        return "Linear"
    if isinstance(module, torch.nn.Embedding):
        return "Embedding"
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return "Conv"
    name = type(module).__name__
    return "Conv1D" if name == "Conv1D" else "Norm" if "Norm" in name else ""


def _path(modules: Mapping[str, Any], model: Any, getter: str) -> str | None:
    """Return the path of the module that a method of the model returns; None without one."""
    with contextlib.suppress(Exception):
        wanted = getattr(model, getter)()
        return next((name for name, module in modules.items() if module is wanted), None)
    return None


def _towers(model: Any, modules: Mapping[str, Any], state: Mapping[str, Any], head: str | None) -> dict[str, str]:
    """Return the modules next to the language model of a model that writes text, each "vision" or "audio"."""
    from transformers import PreTrainedModel

    decoder = _path(modules, model, "get_decoder")
    models = {name: module for name, module in modules.items() if name and isinstance(module, PreTrainedModel)}
    inputs = {name: module.main_input_name for name, module in models.items()}
    inputs |= {name: SOUND[0] for name, each in models.items() if _SOUND.search(str(each.config.model_type))}
    if head is None or decoder is None or not inputs:
        return {}
    parent, _, last = decoder.rpartition(".")
    sensing = [name for name, kind in inputs.items() if kind in (*PIXELS, *SOUND)]
    found = {name: "" for name in sensing if decoder and name.startswith(f"{decoder}.") and last != "decoder"}
    apart = [name for name in inputs if not f"{name}.".startswith(f"{decoder}.") and not decoder.startswith(name)]
    prefix = f"{parent}." if parent else ""
    for name in state if apart and decoder and last not in _HALVES else ():
        if name.startswith(prefix) and not name.startswith((f"{decoder}.", f"{head}.")):
            part = prefix + name.removeprefix(prefix).split(".")[0]
            found |= {part: ""} if part in modules else {}
    return {part: _sense(part, inputs) for part in found}


def _sense(part: str, inputs: Mapping[str, str]) -> str:
    """Return AUDIO for a tower that hears and for what joins it to the language model, else VISION."""
    within = [kind for name, kind in inputs.items() if f"{name}.".startswith(f"{part}.")]
    if any(kind in SOUND for kind in within) or _SOUND.search(part):
        return AUDIO
    sees = any(kind in PIXELS or re.search(r"vis|image|video", name) for name, kind in inputs.items())
    hears = any(kind in SOUND or _SOUND.search(name) for name, kind in inputs.items())
    return AUDIO if hears and not sees else VISION
