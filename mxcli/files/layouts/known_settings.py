"""Settings of quantization configurations that loaders read, with the values that they know.

A row is a setting: the document and the path in it, and the allowed values. Keys without a row are the producers' own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mxcli.files.model_files import CONFIG, PRODUCER_CONFIG

Json = object


@dataclass(frozen=True, slots=True)
class KnownSetting:
    """A setting: a pattern of its path in a document, keys joined by newlines, and the values that loaders know.

    `of_formats` has the values for weights of some formats; weights of others have any of `values`. Instead of values,
    `is_valid` may decide, and `needs` says what it wants. A `required` one may not be missing; its path is plain.
    """

    path: str
    values: tuple[Json, ...] = ()
    of_formats: Mapping[str, tuple[Json, ...]] = field(default_factory=dict)
    is_valid: Callable[[Json], bool] | None = None
    needs: str = ""
    required: bool = False
    document: str = CONFIG

    def allowed(self, formats: Collection[str]) -> str:
        """Return the allowed values for weights of these formats, in words."""
        return self.needs or ", ".join(map(json.dumps, self._values(formats)))

    def allows(self, value: Json, formats: Collection[str]) -> bool:
        """Return whether loaders know a value for weights of these formats; of several formats, for one of them."""
        if self.is_valid is not None:
            return self.is_valid(value)
        return any(_same(value, each) for each in self._values(formats))

    def _values(self, formats: Collection[str]) -> tuple[Json, ...]:
        if not formats or not all(format in self.of_formats for format in formats):
            return self.values
        return tuple(dict.fromkeys(value for format in sorted(formats) for value in self.of_formats[format]))


@dataclass(frozen=True, slots=True)
class UnknownSetting:
    """A setting whose value no loader knows: its document, path and value in words, and what it must be."""

    document: str
    path: str
    value: str
    needs: str


def unknown_settings(
    documents: Mapping[str, Mapping[str, Json]], rows: Sequence[KnownSetting], formats: Collection[str]
) -> Iterator[UnknownSetting]:
    """Yield the settings of documents, by name, that have no value that loaders know; `formats` are those of the
    weights, empty if not all of them are known."""
    for document, content in documents.items():
        own = [row for row in rows if row.document == document]
        found = list(_settings(content))
        for row in own:
            at = [(path, value) for path, value in found if re.fullmatch(row.path, path)]
            if row.required and not at:
                yield UnknownSetting(document, row.path.replace("\n", "."), "is missing", row.allowed(formats))
            for path, value in at:
                if not row.allows(value, formats):
                    shown = f"is {json.dumps(value)[:_SHOWN]}"
                    yield UnknownSetting(document, path.replace("\n", "."), shown, row.allowed(formats))


_SHOWN = 60


def _settings(content: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every path in an object with its value; elements of lists have the path of the list."""
    entries = content.items() if isinstance(content, Mapping) else ()
    for key, value in entries:
        own = f"{path}\n{key}" if path else str(key)
        yield own, value
        for part in value if isinstance(value, list) else (value,):
            yield from _settings(part, own)


def _same(one: Json, other: Json) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return one.casefold() == other.casefold()
    return type(one) is type(other) and one == other


def at(*keys: str) -> str:
    """Return the pattern of a path of keys."""
    return r"\n".join(keys)


def _is_scheme(value: Json) -> bool:
    return value is None or isinstance(value, dict)


def _is_list(value: Json) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))


def _is_class(value: Json) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[A-Z]\w*(Config|FqnToConfig)", value) is not None


def _is_bool(value: Json) -> bool:
    return isinstance(value, bool)


def _are_sizes(value: Json) -> bool:
    sizes = value if isinstance(value, list) else []
    return value is None or (len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes))


_METHOD = "quant_method"
_BOTH = (False, True)
_GROUPS = (None, -1, 16, 32, 64, 128, 256)

_CT = r"config_groups\n[^\n]*\n(weights|input_activations|output_activations)"
COMPRESSED_TENSORS_SETTINGS = (
    KnownSetting(_METHOD, ("compressed-tensors",), required=True),
    KnownSetting("kv_cache_scheme", is_valid=_is_scheme, needs="null or an object"),
    KnownSetting("ignore", is_valid=_is_list, needs="a list of texts"),
    *(
        KnownSetting(at(scheme, key), values)
        for scheme in (_CT, "kv_cache_scheme")
        for key, values in (
            ("num_bits", (2, 3, 4, 5, 6, 7, 8, 16)),
            ("type", ("float", "int")),
            ("strategy", (None, "tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")),
            ("dynamic", (False, True, "local")),
            ("group_size", _GROUPS),
            ("actorder", (None, False, True, "static", "dynamic", "weight", "group")),
        )
    ),
    KnownSetting(at(_CT, "block_structure"), is_valid=_are_sizes, needs="null or two sizes"),
    KnownSetting(
        at(r"config_groups\n[^\n]*\ninput_activations", "num_bits"),
        (2, 3, 4, 5, 6, 7, 8, 16),
        of_formats={
            "nvfp4": (4, 8),
            "mxfp4_e2m1": (4, 6, 8),
            "mxfp6_e2m3": (6, 8),
            **dict.fromkeys(("mxfp8_e4m3", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"), (8,)),
        },
    ),
    KnownSetting(
        at(_CT, "symmetric"),
        _BOTH,
        of_formats=dict.fromkeys(
            ("nvfp4", "mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e4m3", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"),
            (True,),
        ),
    ),
    KnownSetting(
        at(_CT, "scale_dtype"),
        (None, *(f"torch.{name}" for name in ("float8_e4m3fn", "uint8", "float32", "bfloat16", "float16"))),
    ),
)

_ALGORITHMS = {
    "nvfp4": ("W4A16_NVFP4", "NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "NVFP4_SVDQUANT", "W4A8_NVFP4_FP8"),
    "mxfp8_e4m3": ("MXFP8",),
    "mxfp4_e2m1": ("mxfp4", "W4A8_MXFP4_FP8"),
    "fp8_e4m3_channel": ("FP8_PER_CHANNEL_PER_TOKEN",),
    "fp8_e4m3_128x128": ("fp8_pb_wo", "FP8_BLOCK_SCALES", "FP8_PB_REAL"),
    "fp8_e4m3": ("FP8",),
}
_MIXED = ("MIXED_PRECISION",)
_OTHER_ALGORITHMS = ("W4A16_AWQ", "W4A8_AWQ", "W8A8_SQ_PER_CHANNEL", "W8A16", "W4A16", "INT4_AWQ", "INT8_SQ", "INT8_WO")
_EVERY_ALGORITHM = tuple(name for names in _ALGORITHMS.values() for name in names) + _MIXED + _OTHER_ALGORITHMS
_ALGORITHM = {name: (*names, *_MIXED) for name, names in _ALGORITHMS.items()}
_GROUP_SIZE = {"nvfp4": (16,), "mxfp8_e4m3": (32,), "mxfp4_e2m1": (32,)}
_MODELOPT_GROUP = r"config_groups\n[^\n]*\n(weights|input_activations)"
_CACHES = (None, "FP8", "INT8", "NVFP4", "NVFP4_AFFINE", "NVFP4_ROTATE", "FP8_CAST", "NVFP4_CAST")
MODELOPT_SETTINGS = (
    KnownSetting(
        _METHOD, ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mxfp8", "modelopt_mixed"), required=True
    ),
    KnownSetting("quant_algo", _EVERY_ALGORITHM, of_formats=_ALGORITHM, required=True),
    KnownSetting(at("quantized_layers", r"[^\n]*", "quant_algo"), _EVERY_ALGORITHM, of_formats=_ALGORITHM),
    KnownSetting("group_size", _GROUPS, of_formats=_GROUP_SIZE),
    KnownSetting("kv_cache_scheme", is_valid=_is_scheme, needs="null or an object"),
    KnownSetting(
        at(_MODELOPT_GROUP, "num_bits"),
        (4, 6, 8),
        of_formats={
            "nvfp4": (4, 8),
            "mxfp4_e2m1": (4, 8),
            **dict.fromkeys(("mxfp8_e4m3", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"), (8,)),
        },
    ),
    KnownSetting(
        at(r"config_groups\n[^\n]*\nweights", "num_bits"),
        (4, 6, 8),
        of_formats={
            "nvfp4": (4,),
            "mxfp4_e2m1": (4,),
            **dict.fromkeys(("mxfp8_e4m3", "fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"), (8,)),
        },
    ),
    KnownSetting(at(_MODELOPT_GROUP, "type"), ("float", "int")),
    KnownSetting(at(_MODELOPT_GROUP, "dynamic"), (False, True, "local")),
    KnownSetting(at(_MODELOPT_GROUP, "group_size"), _GROUPS),
    KnownSetting(at(r"config_groups\n[^\n]*\nweights", "group_size"), _GROUPS, of_formats=_GROUP_SIZE),
    *(
        KnownSetting(at("quantization", key), values, of_formats=of_formats, document=PRODUCER_CONFIG)
        for key, values, of_formats in (
            ("quant_algo", _EVERY_ALGORITHM, _ALGORITHM),
            (at("quantized_layers", r"[^\n]*", "quant_algo"), _EVERY_ALGORITHM, _ALGORITHM),
            ("group_size", _GROUPS, _GROUP_SIZE),
            ("kv_cache_quant_algo", _CACHES, {}),
        )
    ),
)

_TENSOR = r"(?:[^\n]*\n)*(weight|input_tensors|output_tensors|bias)"
_ELEMENTS = ("fp4", "fp6_e2m3", "fp6_e3m2", "fp8_e4m3", "fp8_e5m2", "int2", "int3", "int4", "uint4", "int8", "uint8")
_OTHER_ELEMENTS = ("int16", "int32", "uint16", "uint32", "bfloat16", "float16", "bfp16", "mx", "mx6", "mx9", "mxfp4")
QUARK_SETTINGS = (
    KnownSetting(_METHOD, ("quark",), required=True),
    KnownSetting("exclude", is_valid=_is_list, needs="a list of texts"),
    KnownSetting(
        at("export", "pack_method"),
        ("reorder", "order"),
        of_formats=dict.fromkeys(("mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2"), ("reorder",)),
    ),
    KnownSetting(at("export", "weight_format"), ("real_quantized",)),
    *(
        KnownSetting(at(_TENSOR, key), values)
        for key, values in (
            ("dtype", (*_ELEMENTS, *_OTHER_ELEMENTS)),
            ("qscheme", (None, "per_tensor", "per_channel", "per_group", "per_block", "per_token")),
            ("group_size", _GROUPS),
            ("is_dynamic", (None, *_BOTH)),
            ("is_scale_quant", (None, *_BOTH)),
            ("round_method", (None, "half_even", "round", "floor", "half_up", "half_down", "stochastic")),
            ("scale_calculation_mode", (None, "even", "floor", "ceil", "rceil", "round", "nearest")),
            ("scale_format", (None, "e8m0", "e4m3", "e5m3", "float32", "float", "bfloat16", "float16")),
            ("mx_element_dtype", (None, *_ELEMENTS)),
            ("symmetric", (None, *_BOTH)),
        )
    ),
    *(
        KnownSetting(
            at(r"(?:global_quant_config|layer_quant_config\n[^\n]*|layer_type_quant_config\n[^\n]*)", "weight", key),
            (None, *others),
            of_formats=dict.fromkeys(
                ("mxfp4_e2m1", "mxfp6_e2m3", "mxfp6_e3m2", "fp8_e4m3", "fp8_e4m3_channel"), (None, *own)
            ),
        )
        for key, own, others in (("symmetric", (True,), _BOTH), ("mx_element_dtype", (), _ELEMENTS))
    ),
)

_DTYPE = r"(?:[^\n]*\n)*weight_dtype\n_data"
_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "fp6_e2m3", "fp6_e3m2")
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 9))
TORCHAO_SETTINGS = (
    KnownSetting(_METHOD, ("torchao",), required=True),
    KnownSetting("modules_to_not_convert", is_valid=_is_list, needs="null or a list of texts", required=True),
    KnownSetting("include_input_output_embeddings", is_valid=_is_bool, needs="true or false"),
    KnownSetting("untie_embedding_weights", is_valid=_is_bool, needs="true or false"),
    KnownSetting(at("quant_type", "default", "_type"), is_valid=_is_class, needs="a configuration of torchao"),
    KnownSetting(
        _DTYPE,
        (*_FLOATS, *_INTEGERS),
        of_formats={
            **{f"fp8_e4m3{block}": ("float8_e4m3fn",) for block in ("", "_channel", "_1x128")},
            **{f"fp8_e5m2{block}": ("float8_e5m2",) for block in ("", "_channel", "_1x128")},
            "mxfp8_e4m3": ("float8_e4m3fn",),
            "mxfp8_e5m2": ("float8_e5m2",),
            "mxfp4_e2m1": ("float4_e2m1fn_x2",),
        },
    ),
    KnownSetting(r"(?:[^\n]*\n)*activation_dtype\n_data", (*_FLOATS, *_INTEGERS, "bfloat16", "float16", "float32")),
    KnownSetting(r"quant_type\n(?:[^\n]*\n)*_data\nblock_size", (16, 32)),
    KnownSetting(r"(?:[^\n]*\n)*scaling_mode\n_data", ("RCEIL", "EVEN", "FLOOR", "CEIL")),
    KnownSetting(
        r"(?:[^\n]*\n)*kernel_preference\n_data", ("AUTO", "EMULATED", "TORCH", "FBGEMM", "MSLK", "TRITON", "CUTLASS")
    ),
    KnownSetting(r"(?:[^\n]*\n)*use_dynamic_per_tensor_scale", is_valid=_is_bool, needs="true or false"),
)

FP8_SETTINGS = (
    KnownSetting(_METHOD, ("fp8", "mxfp8", "fbgemm_fp8", "deepseek_v4_fp8", "finegrained_fp8"), required=True),
    KnownSetting("activation_scheme", ("dynamic", "static")),
    KnownSetting("fmt", ("e4m3", "e5m2")),
    KnownSetting("scale_fmt", (None, "float", "ue8m0")),
    KnownSetting("weight_block_size", is_valid=_are_sizes, needs="null or two sizes"),
    KnownSetting("modules_to_not_convert", is_valid=_is_list, needs="null or a list of texts"),
)
GPT_OSS_SETTINGS = (
    KnownSetting(_METHOD, ("mxfp4",), required=True),
    KnownSetting("modules_to_not_convert", is_valid=_is_list, needs="null or a list of texts"),
)
