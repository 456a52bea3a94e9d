"""The models of transformers built without weights from their own defaults.

    python tests/files/built_models.py

writes mxcli/files/models/transformers.txt again, for the installed release of transformers.
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mxcli.files.models.built import Built, described
from mxcli.files.roles import role_of

LAYERS = [
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "num_block",
    "num_blocks",
]
MOST_LAYERS = 6
SETTINGS: Mapping[str, Mapping[str, object]] = {
    "nemotron": {"num_key_value_heads": 8},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "esm": {"vocab_size": 33},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
}
"""Settings of configurations without which the model cannot be built."""


def classes() -> Iterator[tuple[str, str]]:
    """Yield every model type with every class that the auto classes make of it."""
    seen = set()
    for table in sorted(name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_.*MAPPING_NAMES", name)):
        for model_type, names in getattr(modeling_auto, table).items():
            for name in [names] if isinstance(names, str) else names:
                if (model_type, name) not in seen and model_type in CONFIG_MAPPING:
                    seen.add((model_type, name))
                    yield model_type, name


def build_class(model_type: str, name: str) -> Built | None:
    """Return a model of a class, or None if it cannot be built from its own defaults."""
    for shrink in (True, False):
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return described(_model(model_type, name, shrink))
    return None


def _model(model_type: str, name: str, shrink: bool) -> Any:
    cls = getattr(transformers, name)
    if not issubclass(cls, transformers.PreTrainedModel):
        raise TypeError(name)
    config = CONFIG_MAPPING[model_type](**SETTINGS.get(model_type, {}))
    for part in _parts(config) if shrink else ():
        _shorten(part)
    with torch.device("meta"), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return cls(config)


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _parts(value)


def _shorten(config: Any) -> None:
    for key in LAYERS:
        count = getattr(config, key, None)
        if not isinstance(count, int) or isinstance(count, bool) or count <= MOST_LAYERS:
            continue
        with contextlib.suppress(Exception):
            setattr(config, key, MOST_LAYERS)
            for name, value in list(vars(config).items()):
                if isinstance(value, list) and len(value) == count:
                    setattr(config, name, value[:MOST_LAYERS])


def template(name: str) -> str:
    """Return a name with numbers of layers and experts made equal."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "0", name)


def exceptions(models: list[Built]) -> dict[str, str]:
    """Return the roles of one model type that its names alone do not tell, by the shortest ending that is unambiguous;
    `^` marks a whole name."""
    roles: dict[str, set[str]] = defaultdict(set)
    different: dict[str, str] = {}
    for built in models:
        for name, (role, shape) in built.roles.items():
            roles[template(name)].add(role)
            if role != role_of(name, shape, "BF16"):
                different.setdefault(template(name), role)
    found = {}
    for name, role in different.items():
        if role == "weight":  # what one class of a type has as its head stays plain in the others
            role = min(roles[name] - {role}, default=role)
        words = name.split(".")
        for count in range(2, len(words) + 1):
            ending = ".".join(words[-count:])
            alike = {r for other, each in roles.items() if f".{other}".endswith(f".{ending}") for r in each}
            if alike == {role}:
                found[ending if count < len(words) or role != "lm_head" else f"^{name}"] = role
                break
        else:
            found[f"^{name}"] = role
    return found


def rows(built: Mapping[str, list[Built]]) -> tuple[dict[tuple[str, str], set[str]], dict[tuple[str, str], set[str]]]:
    """Return the model types by role and ending, and by sense and tower."""
    roles: dict[tuple[str, str], set[str]] = defaultdict(set)
    towers: dict[tuple[str, str], set[str]] = defaultdict(set)
    for model_type, models in built.items():
        for ending, role in exceptions(models).items():
            roles[role, ending].add(model_type)
        for path, sense in {item for each in models for item in each.towers.items()}:
            towers[sense, path.rpartition(".")[2]].add(model_type)
    return roles, towers


def everything() -> dict[str, list[Built]]:
    """Return all models that can be built, by model type."""
    transformers.logging.set_verbosity_error()
    found: dict[str, list[Built]] = defaultdict(list)
    for model_type, name in classes():
        built = build_class(model_type, name)
        if built is not None:
            found[model_type].append(built)
    return dict(found)


def source(built: Mapping[str, list[Built]]) -> str:
    """Return the text of mxcli/files/models/transformers.txt."""

    def words(types: Iterable[str]) -> str:
        return textwrap.fill(" ".join(sorted(types)), 116, break_on_hyphens=False, initial_indent="    ",
                             subsequent_indent="    ")  # fmt: skip

    def table(what: Mapping[tuple[str, str], set[str]]) -> Iterator[str]:
        for (first, second), types in sorted(what.items()):
            yield from (f"{first} {second}", words(types))

    roles, towers = rows(built)
    parts = ["[version]", transformers.__version__, "[types]", words(built)]
    return "\n".join([HEAD, *parts, "[roles]", *table(roles), "[towers]", *table(towers), ""])


HEAD = """\
# Parameters of the models of transformers whose names alone do not tell what they are, by the classes of their modules.
# Made by tests/files/built_models.py; not edited by hand. Under [roles]: a role and the end of a name (^: the whole
# name); under [towers]: a sense and a module next to the language model; the model types follow, indented."""


if __name__ == "__main__":
    target = Path(__file__).parents[2] / "mxcli/files/models/transformers.txt"
    target.write_text(source(everything()))
