"""Fields of JSON that is a mapping before it is printed: plans of --dry-run, and results of verbs without a report.

Standard library and numerics only, as `mxcli.output.fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from mxcli.output.bench import GPU_ROW, ROW
from mxcli.output.bench_gemm import GEMM_ROW
from mxcli.output.capture import CAPTURED, REQUEST
from mxcli.output.comparison import COMPARISON
from mxcli.output.fields import (
    COUNT,
    FLAG,
    NOTHING,
    NUMBER,
    POSITIVE,
    SCHEME,
    SCHEME_OPTIONS,
    SOURCE,
    TEXT,
    TEXT_OR_NULL,
    Field,
    Fields,
    Schema,
    array,
    mapping,
    object_of,
    or_null,
)
from mxcli.output.formats import FORMAT
from mxcli.output.loaders import LOADER
from mxcli.output.report import REPORT

Document = Mapping[str, Any]


def keyed(**schemas: Schema) -> Fields[Document]:
    """Return a field for each key of a mapping."""
    return Fields(*(Field(key, partial(_value, key), schema) for key, schema in schemas.items()))


def _value(key: str, document: Document) -> Any:
    return document.get(key, NOTHING)


def _of(fields: Fields[Any], *keys: str) -> Fields[Document]:
    """Return the schemas of fields of other records for the same keys of a mapping."""
    chosen = fields.only(*keys) if keys else fields
    return Fields(*(field.at(of=partial(_value, field.key), title=None) for field in chosen if field.schema))


_MEMORY = keyed(peak_memory_bytes=COUNT, max_memory_bytes=or_null(COUNT), device=TEXT)
_EFFORT = Fields(keyed(measurements=COUNT, bytes_read=COUNT), _MEMORY)
_TENSOR = keyed(name=TEXT, dtype=TEXT, shape=array(COUNT), role=TEXT, decision=TEXT, reason=TEXT)
MEASURED: Final = Fields(_TENSOR, keyed(bytes=COUNT))
WRITTEN: Final = Fields(_TENSOR, keyed(format=TEXT_OR_NULL, bytes=COUNT, output_bytes=COUNT))
"""A tensor in a plan, and in one of an output."""
_NOTES = keyed(notes=array(TEXT))
_MEASURED_TENSORS = Fields(_NOTES, keyed(tensors=array(MEASURED.object_schema())))
_SUMS: Final[Schema] = {"files": COUNT, "bytes": COUNT}
_ACCOUNTING = object_of(
    {**_SUMS, "read": object_of(_SUMS), "carried": object_of({**_SUMS, "weights": array(TEXT)}),
     "left_out": object_of({**_SUMS, "listed": array(object_of({"name": TEXT, **_SUMS, "reason": TEXT}))})}
)  # fmt: skip
_OUTPUT = keyed(output=TEXT, layout=TEXT, files=array(TEXT), output_bytes=COUNT, ignored=array(TEXT),
                loaders=array(LOADER.object_schema()), accounting=_ACCOUNTING)  # fmt: skip
_CONVERTED = keyed(source=TEXT, converted_from=TEXT, layout=TEXT, weights=COUNT, formats=mapping(COUNT),
                   rules_known=FLAG, files=array(TEXT), output_bytes=COUNT, ignored=array(TEXT), notes=array(TEXT),
                   loaders=array(LOADER.object_schema()))  # fmt: skip
_SHARE = keyed(share=object_of({"number": POSITIVE, "of": POSITIVE}))
_PAIR: Final[Schema] = {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2}
_VERSION: Final[Schema] = or_null(array(COUNT))
_GPU = object_of({"index": COUNT, "name": TEXT, "capability": array(COUNT), "memory_bytes": COUNT})
_GPUS = object_of(
    {"driver": _VERSION, "gpus": array(_GPU), "cupy": TEXT_OR_NULL, "nvrtc": _VERSION, "problems": array(TEXT),
     "init_error": {"type": "integer"}, "usable": array(TEXT)}
)  # fmt: skip
_OPTIONS_OF_GROUP = mapping(object_of({"bits_per_element": NUMBER}))
_COMBINATION = Fields(keyed(name=TEXT), _of(SCHEME), _of(SCHEME_OPTIONS).optional(), keyed(quantized_bytes=COUNT))
_PACKAGES = keyed(packages=mapping(TEXT_OR_NULL))
_BENCHED = keyed(shape=array(COUNT), dtype=TEXT, data=TEXT, rounds=COUNT, rows=array({"type": "object"}))

DOCUMENTS: Final[Mapping[str, Fields[Document]]] = {
    "quantize": Fields(_of(REPORT), _OUTPUT.optional(), _SHARE.optional()),
    "quantize.plan": Fields(
        keyed(source=TEXT, model=TEXT_OR_NULL, model_source=TEXT_OR_NULL, layout=TEXT, counts=mapping(COUNT)),
        keyed(source_bytes=COUNT, output_bytes=COUNT),
        _MEMORY,
        keyed(free_disk_bytes=or_null(COUNT), output=TEXT_OR_NULL, files=array(TEXT), notes=array(TEXT)),
        keyed(ignored=array(TEXT), loaders=array(LOADER.object_schema()), tensors=array(WRITTEN.object_schema())),
    ),
    "report.plan": Fields(
        _of(REPORT, "source", "elements", "bytes", "by_dtype", "options", "recipes", "counts"),
        keyed(quantized_bytes=COUNT),
        _EFFORT,
        _MEASURED_TENSORS,
    ),
    "compare.plan": Fields(
        _of(COMPARISON, "source", "elements", "bytes", "by_dtype", "options"),
        keyed(combinations=array(_COMBINATION.object_schema()), counts=mapping(COUNT)),
        _EFFORT,
        _MEASURED_TENSORS,
    ),
    "evaluate.plan": keyed(
        source=TEXT,
        model=TEXT,
        task=TEXT,
        tokens=COUNT,
        windows=COUNT,
        context=COUNT,
        candidates=array(TEXT),
        bits_per_weight=array(NUMBER),
        model_bytes=COUNT,
        predictions_bytes=COUNT,
        notes=array(TEXT),
    ),
    "recommend.plan": Fields(
        _of(SOURCE),
        keyed(
            target=mapping(NUMBER),
            objective=object_of({"name": TEXT, "formula": TEXT}),
            formats=array(TEXT),
            chosen_for_elements=COUNT,
            least_bits_per_element=NUMBER,
            kept_bits_per_element=NUMBER,
        ),
        _EFFORT,
        _NOTES,
        keyed(
            groups=array(
                object_of({"name": TEXT, "tensors": array(TEXT), "elements": COUNT, "options": _OPTIONS_OF_GROUP})
            )
        ),
    ),
    "capture.plan": Fields(
        _of(REQUEST),
        keyed(disk_bytes_per_step=COUNT, disk_bytes=COUNT, memory_bytes=COUNT, weight_bytes=COUNT),
        keyed(steps_there=array(COUNT), notes=array(TEXT), tensors=array(CAPTURED.object_schema())),
    ),
    "convert.plan": Fields(
        _CONVERTED,
        _MEMORY,
        keyed(free_disk_bytes=or_null(COUNT), output=TEXT_OR_NULL),
        keyed(tensors=array(WRITTEN.object_schema())),
    ),
    "convert": Fields(
        _CONVERTED, keyed(output=TEXT, accounting=_ACCOUNTING), _SHARE.optional(),
    ),
    "dequantize": keyed(
        source=TEXT,
        output=TEXT,
        layout=TEXT_OR_NULL,
        dtypes={"type": ["array", "object"]},
        notes=array(TEXT),
        accounting=_ACCOUNTING,
    ),
    "merge": keyed(output=TEXT, shares=POSITIVE, files=array(TEXT)),
    "formats": keyed(formats=array(FORMAT.object_schema())),
    "doctor": Fields(
        keyed(version=TEXT, python=TEXT, system=TEXT),
        _PACKAGES,
        keyed(
            extras=mapping(FLAG),
            processor=TEXT,
            instruction_sets=array(TEXT),
            threads=POSITIVE,
            memory_bytes=or_null(COUNT),
            compiler_found=TEXT_OR_NULL,
            kernel=object_of(dict.fromkeys(("path", "compiler", "instruction_set", "problem"), TEXT_OR_NULL)),
            driver_release=TEXT_OR_NULL,
            gpu=_GPUS,
        ),
    ),
    "version": Fields(keyed(version=TEXT, python=TEXT), _PACKAGES),
    "bench.quantize": Fields(
        keyed(rows={"anyOf": [array(ROW.object_schema()), array(GPU_ROW.object_schema())]}),
        _BENCHED.without("rows"),
        keyed(checks={"type": ["array", "integer"]}),
        keyed(instruction_set=TEXT, processor=TEXT, device=TEXT, description=TEXT, clocks=_PAIR).optional(),
    ),
    "bench.gemm": keyed(
        device=TEXT, description=TEXT, data=TEXT, rounds=COUNT, reference=TEXT, rows=array(GEMM_ROW.object_schema()),
        own_data=TEXT, peaks=TEXT_OR_NULL, clocks=or_null(_PAIR),
    ),
}  # fmt: skip
"""The fields of each JSON by the name in its schema."""
