"""What a file is to say besides, in values that JSON holds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from mxcli.errors import UsageError, printable


def told(value: object) -> object:
    """The value as files have it: tensors and numpy's numbers of one element as Python's; NaN and infinities, which
    JSON lacks, as None. What is none of that stays as it is."""
    if isinstance(value, Mapping):
        return {key: told(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [told(each) for each in value]
    item = getattr(value, "item", None)
    if callable(item) and math.prod(getattr(value, "shape", (2,))) == 1:
        value = item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def known_about(about: object) -> dict[str, object]:
    """What each file is to say; raises UsageError for what is no mapping, or holds what JSON does not."""
    if about is None:
        return {}
    if not isinstance(about, Mapping):
        raise UsageError(f"about is a {type(about).__name__}: give a mapping of what each file is to say.")
    said = {key: told(value) for key, value in about.items()}
    try:
        json.dumps(said, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"about must be of values that JSON holds: {printable(error)}.") from error
    return said
