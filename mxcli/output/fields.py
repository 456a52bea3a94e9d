"""Reported values as rows: text, CSV, JSON and JSON Schema of a record all derive from its fields.

Standard library and numerics only: the schemas are written when the package is built, without NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

from mxcli.errors import printable
from mxcli.numerics.estimates import SAMPLED, is_estimated, uncertainty_key
from mxcli.numerics.hadamard import hadamard_record
from mxcli.numerics.metric_formulas import Value
from mxcli.numerics.metrics import METRICS, Metric
from mxcli.numerics.samples import CONFIDENCE_PERCENT
from mxcli.numerics.scheme import Scheme
from mxcli.output.numbers import ABSENT, noise_cell, number_cell, significant
from mxcli.output.table import Column

Schema = dict[str, Any]
"""A fragment of JSON Schema."""
Metrics = Mapping[str, Value]
T = TypeVar("T")
S = TypeVar("S")

NUMBER: Final[Schema] = {"type": ["number", "null"]}
AMOUNT: Final[Schema] = {"type": "number", "minimum": 0}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
POSITIVE: Final[Schema] = {"type": "integer", "minimum": 1}
TEXT: Final[Schema] = {"type": "string"}
TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
FLAG: Final[Schema] = {"type": "boolean"}
AXIS: Final[Schema] = {"enum": ["row", "column"], "description": "along which blocks run"}


def array(items: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def mapping(values: Schema) -> Schema:
    """Return the schema of an object with any keys."""
    return {"type": "object", "additionalProperties": values}


def choice(values: Iterable[object]) -> Schema:
    """Return the schema of one of several values."""
    return {"enum": list(values)}


def or_null(schema: Schema) -> Schema:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def object_of(properties: Schema, optional: Iterable[str] = ()) -> Schema:
    """Return the schema of an object with these keys."""
    required = [key for key in properties if key not in set(optional)]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


HADAMARD: Final = object_of({"size": POSITIVE, "seed": or_null(COUNT), "signs": TEXT})
"""Schema of `hadamard_record`."""


class Nothing(Enum):
    """The type of NOTHING."""

    NOTHING = "nothing"


NOTHING: Final = Nothing.NOTHING
"""Result of `Field.of` for a key that a record does not have. None is a value: null in JSON."""


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """A value of a record of type T.

    `key` names it in JSON and CSV, `of` yields it, `schema` is its JSON Schema, `meaning` and `unit` its description
    there. A field without a schema is a column of text only, not in JSON and CSV. `title` is its heading in a table, of
    one or two lines (None: not a column); `cell` makes the text from the record (None: from the value, by its type);
    `right`, `drop` and `group` are those of `Column`. An `optional` key may be absent: `of` yields NOTHING then.
    """

    key: str
    of: Callable[[T], object]
    schema: Schema | None = None
    title: str | None = None
    unit: str = ""
    meaning: str = ""
    cell: Callable[[T], str] | None = None
    right: bool = True
    drop: int = 0
    group: str = ""
    optional: bool = False

    def at(self, **changes: Any) -> Field[T]:
        """Return the field with other attributes, such as `drop` of another table."""
        return replace(self, **changes)

    def when(self, has: Callable[[T], object]) -> Field[T]:
        """Return the field as optional: only records that have it."""
        return replace(self, of=lambda item: self.of(item) if has(item) else NOTHING, optional=True)

    @property
    def column(self) -> Column:
        """The column of a table."""
        return Column(self.title or "", self.right, self.drop, self.group)

    def text(self, item: T) -> str:
        """Return the cell of a record."""
        return cell_text(self.of(item)) if self.cell is None else self.cell(item)

    @property
    def described(self) -> Schema:
        """The schema with a description."""
        unit = f" [{self.unit}]" if self.unit else ""
        description = {"description": f"{self.meaning}{unit}"} if self.meaning else {}
        return {**(self.schema or {}), **description}


class Fields(Generic[T]):
    """The fields of a record of type T in order; fields of parts can be among them."""

    def __init__(self, *parts: Field[T] | Fields[T]) -> None:
        self._fields: tuple[Field[T], ...] = tuple(
            field for part in parts for field in ((part,) if isinstance(part, Field) else part)
        )
        self._recorded = tuple((field.key, field.of) for field in self._fields if field.schema is not None)
        self._cells = tuple(field.cell or field.text for field in self._fields if field.title is not None)

    def __iter__(self) -> Iterator[Field[T]]:
        return iter(self._fields)

    def __getitem__(self, key: str) -> Field[T]:
        return next(field for field in self._fields if field.key == key)

    @property
    def names(self) -> list[str]:
        """The keys of a record, which are the columns of CSV."""
        return [key for key, _ in self._recorded]

    def record(self, item: T) -> dict[str, object]:
        """Return the record for JSON, JSON lines and CSV."""
        return {key: value for key, of in self._recorded if (value := of(item)) is not NOTHING}

    def columns(self) -> list[Column]:
        """Return the columns of a table: of the fields that have a title."""
        return [field.column for field in self._fields if field.title is not None]

    def cells(self, item: T) -> list[str]:
        """Return the cells of a row, one for each of `columns`."""
        return [text(item) for text in self._cells]

    def object_schema(self, **more: Any) -> Schema:
        """Return the schema of a record; `more` are further keywords, such as a description."""
        known = [field for field in self._fields if field.schema is not None]
        return {
            "type": "object",
            "properties": {field.key: field.described for field in known},
            "required": [field.key for field in known if not field.optional],
            "additionalProperties": False,
            **more,
        }

    def only(self, *keys: str) -> Fields[T]:
        """Return the fields with these keys, in the order given."""
        return Fields(*(self[key] for key in keys))

    def without(self, *keys: str) -> Fields[T]:
        """Return the fields without those with these keys."""
        return Fields(*(field for field in self._fields if field.key not in keys))

    def optional(self) -> Fields[T]:
        """Return the fields, all of them optional."""
        return Fields(*(field.at(optional=True) for field in self._fields))

    def through(self, part: Callable[[S], T | None]) -> Fields[S]:
        """Return the fields for records of which T is a part; those without the part (None) lack the keys."""
        return Fields(
            *(
                Field(
                    field.key,
                    partial(_through, part, field.of, NOTHING),
                    field.schema,
                    field.title,
                    field.unit,
                    field.meaning,
                    partial(_through, part, field.text, ABSENT),
                    field.right,
                    field.drop,
                    field.group,
                    field.optional,
                )
                for field in self._fields
            )
        )


def _through(part: Callable[[S], T | None], of: Callable[[T], Any], otherwise: Any, item: S) -> Any:
    found = part(item)
    return otherwise if found is None else of(found)


def column(title: str, cell: Callable[[S], str], **more: Any) -> Field[S]:
    """Return a field that is a column of text only; `more` are attributes of `Field`."""
    return Field(more.pop("key", title), lambda item: NOTHING, title=title, cell=cell, **more)


def nested(key: str, of: Callable[[S], T | None], fields: Fields[T], **more: Any) -> Field[S]:
    """Return a field that holds a record, or null; `more` are attributes of `Field`."""
    return Field(key, partial(_through, of, fields.record, None), or_null(fields.object_schema()), **more)


def record_of(key: str, of: Callable[[S], T], fields: Fields[T], **more: Any) -> Field[S]:
    """Return a field that holds a record; `more` are attributes of `Field`."""
    return Field(key, lambda item: fields.record(of(item)), fields.object_schema(), **more)


def records(key: str, of: Callable[[S], Iterable[T]], fields: Fields[T], **more: Any) -> Field[S]:
    """Return a field that holds a list of records; `more` are attributes of `Field`."""
    return Field(key, lambda item: [fields.record(each) for each in of(item)], array(fields.object_schema()), **more)


def records_by_name(key: str, of: Callable[[S], Mapping[str, T]], fields: Fields[T], **more: Any) -> Field[S]:
    """Return a field that holds an object of records by name; `more` are attributes of `Field`."""
    return Field(
        key,
        lambda item: {name: fields.record(each) for name, each in of(item).items()},
        mapping(fields.object_schema()),
        **more,
    )


def attributes(schema: Schema, *keys: str, **more: Any) -> Fields[Any]:
    """Return fields of one schema whose keys are the names of attributes."""
    return Fields(*(Field(key, attrgetter(key), schema, **more) for key in keys))


def cell_text(value: object) -> str:
    """Return a value as a cell: three significant digits, `yes` and `no`, `-` for what does not exist."""
    if isinstance(value, str):
        return printable(value)
    if value is None or value is NOTHING:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return significant(value)
    return ", ".join(map(printable, value)) if isinstance(value, (list, tuple)) else printable(value)


def metric_fields(metrics: Mapping[str, Metric] = METRICS, *, sampled: bool = True) -> Fields[Metrics]:
    """Return a field per metric; with `sampled` also the keys that only metrics of a sample have, as optional."""
    parts: list[Field[Metrics]] = []
    if sampled:
        parts += [_metric_field(key, COUNT, "of a sample: how many were measured", optional=True) for key in SAMPLED]
    for name, row in metrics.items():
        parts.append(_metric(row))
        if sampled and is_estimated(row):
            meaning = f"half of the {CONFIDENCE_PERCENT} % interval of an estimate; null: unknown"
            parts.append(_metric_field(uncertainty_key(name), NUMBER, meaning, optional=True))
    return Fields(*parts)


def _metric(row: Metric) -> Field[Metrics]:
    unit = f" [{row.unit}]" if row.unit else ""
    schema = NUMBER if row.number else {"type": ["object", "array", "null"]}
    field = _metric_field(row.name, schema, f"{row.meaning}{unit}: {row.formula}")
    cell = noise_cell if row.noise else number_cell
    title = None if row.text is None else row.text.heading
    return field.at(title=title, cell=lambda metrics: cell(metrics, row.name))


def _metric_field(key: str, schema: Schema, meaning: str, *, optional: bool = False) -> Field[Metrics]:
    return Field(key, lambda metrics: metrics.get(key, NOTHING), schema, meaning=meaning, optional=optional)


METRIC: Final = metric_fields(sampled=False)
"""All metrics, to take columns from: `METRIC["sqnr_db"].at(drop=2)`."""


SCHEME: Final[Fields[Scheme]] = Fields(
    Field("format", lambda scheme: scheme.format.name, TEXT),
    Field("scale_rounding", lambda scheme: scheme.scale_rule.name, TEXT),
    Field("rounding", lambda scheme: scheme.rounding.name, TEXT),
    Field("dialect", lambda scheme: scheme.dialect.name, TEXT),
)
"""Names of the rules of a scheme."""
SCHEME_OPTIONS: Final[Fields[Scheme]] = Fields(
    Field("seed", lambda scheme: scheme.seed if scheme.rounding.is_random else NOTHING, COUNT, optional=True),
    Field(
        "hadamard",
        lambda scheme: NOTHING if scheme.hadamard is None else hadamard_record(scheme.hadamard),
        HADAMARD,
        optional=True,
    ),
)
"""What only some schemes have: the seed of stochastic rounding, and a transform."""
TENSORS: Final[Field[Metrics]] = Field("tensors", lambda metrics: metrics["tensors"], COUNT)
TOTALS: Final[Fields[Metrics]] = Fields(TENSORS, metric_fields())
"""Metrics of tensors taken together, with their number."""
TOTAL: Final = attributes(COUNT, "tensors", "elements", "bytes")
SOURCE: Final[Fields[Any]] = Fields(
    Field("source", lambda result: result.source, TEXT, meaning="as the user named it"),
    Field("elements", lambda result: result.total.elements, COUNT),
    Field("bytes", lambda result: result.total.bytes, COUNT),
    records_by_name("by_dtype", lambda result: result.by_dtype, TOTAL),
)
"""A result by its source: `source`, `total` and `by_dtype`."""
