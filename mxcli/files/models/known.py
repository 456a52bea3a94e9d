"""A checkpoint's model as far as it is known: the role of every tensor, why, and where that is from.

The classes of transformers' modules decide where the model type is known (`transformers.txt`, or the installed
transformers for a type that it lacks), then what published recipes of diffusion models keep, then names alone.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from mxcli.errors import printable
from mxcli.files.models.built import build
from mxcli.files.models.diffusion import kept_modules
from mxcli.files.models.names import Config, names_of_model, parts_of, title_of_model
from mxcli.files.models.served import DIFFUSERS
from mxcli.files.models.stacks import stack_row
from mxcli.files.roles import AUDIO, MTP, SENSITIVE, VISION, WEIGHT
from mxcli.files.tensors import TensorInfo

TABLE = "transformers.txt"
_WRITES = re.compile(
    r"(^|\.)(lm_head|language_model|llm|thinker)\.|^(model\.)?(layers|(embed_tokens|tok_embeddings))\."
    r"|^(model\.)?transformer\.(wte|h|blocks|embedding|encoder\.layers|output_layer)\."
)
"""Names of the part that writes text: next to it, towers are apart."""
_TOWERS = {
    VISION: re.compile(
        r"(?i)(^|\.)(visual|vit|(gen_)?vision|(gen_)?vision_[^.]*|(image|video)_(encoder|tower|newline)"
        r"|(multi_modal|mm)_projector|(image|img)_(embed|processor|projection)[^.]*|(patch_)?merger|q_?former|mlp1)\."
        r"|^([^.]+\.){0,2}(vpm|sam(_model)?|siglip|(dino|eva|clip)(_?v?\d+)?(_model)?|(gen_)?aligner|projector|connector"
        r"|(perceiver_)?resampler)\."
    ),
    AUDIO: re.compile(
        r"(?i)(^|\.)((audio|speech)_?(tower|encoder|model|embed|projection|projector|adapter|bridge)?(_layer)?)\."
        r"|^([^.]+\.){0,2}(apm|token2wav|code2wav|vocoder|whisper(_[^.]*)?)\."
    ),
}
"""Towers by name, for models that are not known."""


@dataclass(frozen=True, slots=True)
class Model:
    """The knowledge of a model: its `title` (None: the source names none), and the `source` of its roles ("": names
    alone, and `unknown` says why). `roles` are by ends of names, `towers` by modules; `class_name` is its class in
    diffusers ("": it is another model), `names` are all that it goes by."""

    title: str | None = None
    source: str = ""
    unknown: str = "no config.json names its model"
    roles: Mapping[str, str] = field(default_factory=dict, repr=False)
    towers: Mapping[str, str] = field(default_factory=dict, repr=False)
    class_name: str = ""
    names: frozenset[str] = field(default=frozenset(), repr=False)

    @property
    def words(self) -> str:
        """Return `model llama: roles from transformers 5.24.0`, or that it is not known, and why."""
        title = "model" if self.title is None else f"model {printable(self.title)}"
        if self.source:
            return f"{title}: roles from {self.source}"
        return f"{title}: not known ({self.unknown}); roles by names alone"

    def with_roles(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the tensors with the roles that the model gives them, and why."""
        # Tensors of equal layers and experts share one look-up.
        keys = {name: (_NUMBERS.sub("0", name), len(info.shape), info.role) for name, info in tensors.items()}
        first = {key: tensors[name] for name, key in keys.items()}
        writes = any(_WRITES.search(template) for template, *_ in first)
        has_modules = self.title is not None or any(map(_is_of_module, first.values()))
        decided = {key: self._decided(key[0], info, writes, has_modules) for key, info in first.items()}
        found = {}
        for name, info in tensors.items():
            role, reason = decided[keys[name]]
            found[name] = replace(info, role=role, reason=reason) if reason else info
        return found | self._kept(found) | ({} if self.source else _heads_by_shape(found))

    def _decided(self, template: str, info: TensorInfo, writes: bool, has_modules: bool) -> tuple[str, str]:
        """Return the role of a tensor and why; the reason is empty if its name decided it."""
        role, reason = self._role(template, info, has_modules)
        tower = self._tower(template, writes) if role in (WEIGHT, MTP) else None
        return (role, reason) if tower is None else tower

    def _role(self, template: str, info: TensorInfo, has_modules: bool) -> tuple[str, str]:
        if len(info.shape) < 2 or info.role in ("codes", "scale", "lora"):
            return info.role, ""
        stack = stack_row(info.name, info.shape, self.names) if info.role == "conv" else None
        if stack is not None:
            return stack.role, stack.reason
        words = template.split(".")
        ends = (".".join(words[-count:]) for count in range(min(len(words), 4), 0, -1))
        role = next((self.roles[end] for end in (f"^{template}", *ends) if end in self.roles), None)
        if role is not None:
            return role, f"{REASONS.get(role, role)} in {self.source}"
        if info.role == WEIGHT and len(words) == 1 and has_modules:
            return "other", "a parameter of the model itself"
        for shared in SHARED if info.role == WEIGHT else ():
            if self.title in shared.types and re.search(shared.name, info.name):
                return SENSITIVE, shared.reason
        return info.role, ""

    def _tower(self, template: str, writes: bool) -> tuple[str, str] | None:
        """Return the tower of a linear layer next to a language model, and why it is one."""
        part = next((part for part in template.split(".")[:-1] if part in self.towers), None)
        if part is not None:
            return self.towers[part], f"in {printable(part)}, next to the language model ({self.source})"
        for sense, pattern in _TOWERS.items():
            match = pattern.search(template) if writes else None
            if match is not None:
                return sense, f"in {printable(match[0].strip('.'))}, next to the language model by its name"
        return None

    def _kept(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return the linear layers that recipes of the model's class in diffusers keep."""
        if not self.class_name:
            return {}
        layers = {name.removesuffix(".weight"): info for name, info in tensors.items() if info.role == WEIGHT}
        kept = ((layers[module], row) for module, row in kept_modules(self.class_name, layers).items())
        return {
            info.name: replace(info, role=SENSITIVE, reason=f"{row.why}, kept plain by {row.source}")
            for info, row in kept
        }


def _heads_by_shape(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the linear layers outside numbered layers that have the shape of an embedding table: output heads, of a
    model without one by name."""
    if any(info.role == "lm_head" for info in tensors.values()):
        return {}
    tables = {info.shape for info in tensors.values() if info.role == "embedding" and len(info.shape) == 2}
    return {
        name: replace(info, role="lm_head", reason="an output head: as large as an embedding table, outside layers")
        for name, info in tensors.items()
        if info.role == WEIGHT and info.shape in tables and info.shape[0] != info.shape[1]
        if "." in name and not _NUMBERS.search(name)
    }


def _is_of_module(info: TensorInfo) -> bool:
    """Return whether a tensor is a module's weight; arrays of NumPy have any names."""
    return info.name.endswith(".weight") and info.file.suffix not in (".npy", ".npz")


UNKNOWN = Model()
"""The model of a source that names none."""
NATIVE = dict.fromkeys(("t2v", "i2v", "ti2v", "flf2v", "vace", "s2v"), "WanModel")
"""Model types of diffusion models in their makers' own files, by the class that makers call them."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """Linear layers that several layers of some model types share: their names (a regex, searched), and the reason to
    keep them plain."""

    types: frozenset[str]
    name: str
    reason: str


SHARED = (
    SharedRow(
        frozenset({"zamba", "zamba2"}),
        r"\.shared_transf(ormer)?\.",
        "shared by several layers, whose scales transformers does not tie",
    ),
)
REASONS = {
    "weight": "linear layer",
    "embedding": "embedding table",
    "conv": "convolution",
    "lm_head": "output head",
    "router": "chooses experts",
    "norm": "normalization",
    "other": "not a linear layer",
}
"""Roles in words."""


def known_model(config: Config | None) -> Model:
    """Return what is known of the model that a configuration names."""
    title = title_of_model(config)
    if config is None or title is None:
        return UNKNOWN
    names = names_of_model(config)
    class_name = config.get("_class_name")
    if isinstance(class_name, str) and "model_type" not in config:
        return Model(title, DIFFUSERS, "", class_name=class_name)
    if config.get("model_type") in NATIVE:
        return Model(title, DIFFUSERS, "", class_name=NATIVE[str(config["model_type"])])
    types = [kind for part in parts_of(config) if isinstance(kind := part.get("model_type"), str)]
    table = _table()
    if types and types[0] == config.get("model_type") and types[0] in table.types:
        source = f"transformers {table.version}"
        return Model(title, source, "", _merged(types, table.roles), _merged(types, table.towers), names=names)
    built = build(config) if _may_be_installed(config) else "its model type is not in the table of models"
    if isinstance(built, str):
        rows = _merged(types, table.roles, nested=True)
        return Model(title, "", built, rows, _merged(types, table.towers), names=names)
    import transformers

    return Model(
        title,
        f"transformers {transformers.__version__}",
        "",
        {f"^{_template(name)}": role for name, (role, shape) in built.roles.items() if len(shape) > 1},
        {path.rpartition(".")[2]: sense for path, sense in built.towers.items()},
        names=names,
    )


def _template(name: str) -> str:
    """Return a name with the numbers of layers and experts made equal."""
    return _NUMBERS.sub("0", name)


_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _may_be_installed(config: Config) -> bool:
    """Return whether the installed transformers has a folder for the model type; importing it takes seconds."""
    found = importlib.util.find_spec("transformers")
    kind = config.get("model_type")
    if found is None or found.origin is None or not isinstance(kind, str) or not re.fullmatch(r"[\w.-]{1,60}", kind):
        return False
    folders = Path(found.origin).parent / "models"
    return any((folders / name).is_dir() for name in {kind, kind.replace("-", "_"), kind.removesuffix("_text")})


def _merged(types: Iterable[str], table: Mapping[str, Mapping[str, str]], *, nested: bool = False) -> dict[str, str]:
    """Return the rows of model types; the whole names of parts of a model are none of the model itself."""
    found: dict[str, str] = {}
    for index, kind in enumerate(dict.fromkeys(types)):
        part = index > 0 or nested
        rows = table.get(kind, {})
        found = {**{key: value for key, value in rows.items() if not (part and key.startswith("^"))}, **found}
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """The models of a release of transformers: its version, the model types, and by model type roles by ends of names
    and senses by modules."""

    version: str
    types: frozenset[str]
    roles: Mapping[str, Mapping[str, str]]
    towers: Mapping[str, Mapping[str, str]]


@lru_cache(maxsize=1)
def _table() -> _Table:
    """Return the table next to this module."""
    lines = files(__package__).joinpath(TABLE).read_text(encoding="utf-8").splitlines()
    parts: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("["):
            parts[line.strip("[]")] = part = list[str]()
        elif not line.startswith("#"):
            part.append(line)
    types = frozenset(" ".join(parts["types"]).split())
    return _Table(parts["version"][0], types, _by_type(parts["roles"]), _by_type(parts["towers"]))


def _by_type(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the rows of each model type: lines of a value and a key, each followed by indented model types."""
    found: dict[str, dict[str, str]] = {}
    value, key = "", ""
    for line in lines:
        if line.startswith(" "):
            for kind in line.split():
                found.setdefault(kind, {})[key] = value
        else:
            value, _, key = line.partition(" ")
    return found
