"""The part of a checkpoint that reads and writes text, and the configuration of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mxcli.files.tensors import TensorInfo
from mxcli.flows.verify.checks.expected import Expected
from mxcli.flows.verify.subject import Subject

Config = Mapping[str, object]
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
VOCABULARY = ("vocab_size",)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TEXT_PARTS = ("text_config", "language_config", "llm_config")
"""Keys of the configuration of the part that reads and writes text."""
SIDES: Mapping[str, tuple[str, ...]] = {
    "encoder": ("encoder_layers", *LAYERS),
    "decoder": ("decoder_layers", "num_decoder_layers", *LAYERS),
}
"""Parts of an encoder-decoder model, with the keys of their numbers of layers."""
_ALL_LAYERS = (*SIDES["encoder"], *SIDES["decoder"])
_OTHER_PARTS = re.compile(
    r"(?i)(^|\.)(visual|vision|vit|image|audio|speech|mtp|draft|talker|code"
    r"|depth_|protein_|connector|[^.]*projector|[^.]*resampler|qformer)[^.]*\."
)
_SIDE = re.compile(r"(^|\.)(encoder|decoder)[^.]*\.")
"""Names of an encoder or decoder: the model itself if it has no other layers, else the encoder of images or sound."""
NUMBERED = re.compile(r"^(?P<stack>(?:.*?\.)?(?:layers|layer|h|blocks|block|blk))\.(?P<number>\d+)\.")
"""The name of a tensor in a list of layers."""

CONVENTIONAL = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("granite", "gpt_oss", "olmo2", "smollm3", "starcoder2", "cohere", "stablelm", "phi", "helium", "seed_oss"),
    }
)
"""Model types whose attention has one projection each for queries, keys, values and outputs, without a gate."""
COUNTED_OTHERWISE = frozenset({"cohere_asr", "dory", "efficientnet", "ernie4_5_vl_moe"})
"""Model types whose configuration counts layers or experts in another way than as those of one list."""


@dataclass(frozen=True)
class Model:
    """A checkpoint with the configuration of its text part, and the tensors that its model is `expected` to have."""

    subject: Subject
    expected: Expected

    @cached_property
    def config(self) -> Config:
        """The configuration that states the number of layers: that of the text part, or the whole."""
        whole = self.subject.checkpoint.config or {}
        parts = [part for key in TEXT_PARTS if isinstance(part := whole.get(key), Mapping)]
        # Of BridgeTower and CLAP the whole states a number of other layers.
        stating = (each for each in (*parts, whole) if number_of(each, _ALL_LAYERS) is not None)
        return next(stating, parts[0] if parts else whole)

    @property
    def states_layers(self) -> bool:
        """True if the configuration states how many layers there are."""
        return number_of(self.config, _ALL_LAYERS) is not None

    @property
    def is_counted_otherwise(self) -> bool:
        """True if the numbers of layers and experts are not those that the configuration states."""
        whole = self.subject.checkpoint.config or {}
        return not COUNTED_OTHERWISE.isdisjoint({str(whole.get("model_type")), self.model_type})

    @property
    def is_encoder_decoder(self) -> bool:
        """True if the configuration states an encoder and a decoder."""
        return self.config.get("is_encoder_decoder") is True

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The plain tensors of the text part."""
        view = self.subject.view
        tensors = self.subject.checkpoint.tensors if view is None else view.tensors
        without = self.subject.transforms.tensors.union(() if view is None else view.unused)
        return {
            name: info
            for name, info in tensors.items()
            if name not in without and info.role not in ("scale", "codes") and self._is_of_text(name)
        }

    @cached_property
    def stacks(self) -> dict[str, set[int]]:
        """The numbers of the layers by the name of their list."""
        found: dict[str, set[int]] = {}
        view = self.subject.view
        others = (*(view.unused if view is not None else ()), *self.subject.misfits)
        for match in filter(None, map(NUMBERED.match, (*self.tensors, *filter(self._is_of_text, others)))):
            found.setdefault(match["stack"], set()).add(int(match["number"]))
        return found

    @property
    def counted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The lists of layers whose number the configuration states, each with the keys of it; "encoder" or "decoder"
        for one that is missing."""
        if not self.is_encoder_decoder:
            if len(self.stacks) == 1:
                yield next(iter(self.stacks)), LAYERS
            return
        for side, keys in SIDES.items():
            stacks = [stack for stack in self.stacks if side in stack.split(".")]
            if len(stacks) == 1 or (not stacks and self.generates):
                yield (stacks or [side])[0], keys

    @property
    def generates(self) -> str:
        """The architectures if they read and write text; else empty."""
        listed = (self.subject.checkpoint.config or {}).get("architectures")
        names = " ".join(map(str, listed)) if isinstance(listed, list) else ""
        endings = ("ForConditionalGeneration", "MTModel") if self.is_encoder_decoder else ("ForCausalLM", "LMHeadModel")
        return names if any(ending in names for ending in endings) else ""

    @cached_property
    def _is_of_sides(self) -> bool:
        """True if encoder and decoder, or one of them, are the model itself."""
        view = self.subject.view
        tensors = self.subject.checkpoint.tensors if view is None else view.tensors
        layers = [name for name in tensors if NUMBERED.match(name) and not _OTHER_PARTS.search(name)]
        return self.is_encoder_decoder or all(map(_SIDE.search, layers))

    def _is_of_text(self, name: str) -> bool:
        return not _OTHER_PARTS.search(name) and (self._is_of_sides or not _SIDE.search(name))

    def size(self, *keys: str) -> int | None:
        """Return the first of these numbers that the configuration states."""
        return number_of(self.config, keys)

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


def number_of(config: Config, keys: tuple[str, ...]) -> int | None:
    """Return the first of these numbers that a configuration states."""
    values = [value for key in keys if type(value := config.get(key)) is int and value > 0]
    return values[0] if values else None
