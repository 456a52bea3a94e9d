"""JSON Schemas of what `--json` prints, made from the fields of each record.

`python -m mxcli.output.schema FOLDER` writes FOLDER/VERB.json; the build does, and needs the standard library only.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from mxcli.atomic import whole_file
from mxcli.output.documents import DOCUMENTS
from mxcli.output.fields import Fields, Schema

RECORDS = {
    "report": "report.REPORT",
    "compare": "comparison.COMPARISON",
    "recommend": "recommendation.RECOMMENDATION",
    "verify": "verification.VERIFICATION",
    "diff": "difference.DIFFERENCE",
    "capture": "capture.CAPTURE",
    "training": "training.TRAINING",
    "products": "products.PRODUCTS",
    "inspect": "inspection.INSPECTION",
    "evaluate": "evaluation.EVALUATION",
}
"""The fields of each JSON that are not among `DOCUMENTS`: module and name."""


def schema(verb: str) -> Schema:
    """Return the JSON Schema of the JSON whose `schema` is `mxcli.VERB/1`, such as `report` and `report.plan`."""
    content = _fields(verb).object_schema()
    words = verb.replace(".plan", " --dry-run").replace(".", " ").replace("version", "--version")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mxcli {words} --json",
        "description": "Numbers that do not exist (no elements, an exact result) are null; none is NaN or infinite.",
        **content,
        "properties": {"schema": {"const": f"mxcli.{verb}/1"}, **content["properties"]},
        "required": ["schema", *content["required"]],
    }


def _fields(verb: str) -> Fields[Any]:
    if verb not in RECORDS:
        return DOCUMENTS[verb]
    module, name = RECORDS[verb].split(".")
    fields: Fields[Any] = getattr(import_module(f"mxcli.output.{module}"), name)
    return fields


def write_schemas(folder: Path) -> None:
    """Write the schema of every verb into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for verb in (*RECORDS, *DOCUMENTS):
        with whole_file(folder / f"{verb}.json", replace=True) as file:
            file.write(f"{json.dumps(schema(verb), indent=2)}\n".encode())


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
