"""JSON Schemas of what `--json` prints, made from the fields of each record.

`python -m mxcli.output.schema FOLDER` writes FOLDER/VERB.json; the build does, and needs the standard library only.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

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
}
"""The fields of each JSON: module and name."""


def schema(verb: str) -> Schema:
    """Return the JSON Schema of a verb's JSON."""
    module, name = RECORDS[verb].split(".")
    fields: Fields[object] = getattr(import_module(f"mxcli.output.{module}"), name)
    content = fields.object_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"mxcli {verb} --json",
        "description": "Numbers that do not exist (no elements, an exact result) are null; none is NaN or infinite.",
        **content,
        "properties": {"schema": {"const": f"mxcli.{verb}/1"}, **content["properties"]},
        "required": ["schema", *content["required"]],
    }


def write_schemas(folder: Path) -> None:
    """Write the schema of every verb into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for verb in RECORDS:
        (folder / f"{verb}.json").write_text(json.dumps(schema(verb), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
