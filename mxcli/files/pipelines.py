"""Folders of diffusers pipelines: several models, each in a folder of its own."""

from __future__ import annotations

from pathlib import Path

from mxcli.errors import InputError, printable
from mxcli.files.directory import KINDS, listing
from mxcli.files.plain import read_json_object

PIPELINE = "model_index.json"


def refuse_pipeline(root: Path, names: list[str]) -> None:
    """Raise InputError for the folder of a pipeline, naming its components: each is a model of its own."""
    if PIPELINE not in names:
        return
    stated = read_json_object(root / PIPELINE)
    classes = {name: each[1] for name, each in stated.items() if isinstance(each, list) and len(each) == 2}
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    holding = [name for name in folders if any(Path(file).suffix in KINDS for file in listing(root / name))]
    ordered = [*(name for name in classes if name in holding), *(name for name in holding if name not in classes)]
    listed = [
        printable(root / name) + (f" ({printable(classes[name])})" if isinstance(classes.get(name), str) else "")
        for name in ordered
    ]
    called = stated.get("_class_name")
    kind = f" ({printable(called)})" if isinstance(called, str) else ""
    way_out = (
        f"give one of them: {', '.join(listed)}. Its output replaces that folder in a copy of the pipeline."
        if listed
        else "none of its folders holds weights; finish the download."
    )
    raise InputError(
        f"{printable(root)}: a diffusers pipeline{kind}, whose components are models of their own; {way_out}"
    )
