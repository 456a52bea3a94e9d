"""Notes on a conversion: what is rounded, read in another way, or left out because loaders do not need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mxcli.errors import printable
from mxcli.files.layouts import Layout
from mxcli.files.layouts.parts import DECODE, ENCODE
from mxcli.flows.write.carried import Carried, rounded_scales
from mxcli.flows.write.omitted import ACTIVATION_SCALES
from mxcli.flows.write.restore import PlainView, on_disk

STATED_INPUTS = ("input_activations", "input_tensors", "activation_dtype")
"""Keys of quantization settings that state the format of a layer's inputs, unless they are null."""


def conversion_notes(view: PlainView, layout: Layout, carried: Mapping[str, Carried]) -> tuple[str, ...]:
    """Return the notes on a conversion to a layout."""
    return (
        *_rounded(layout, carried),
        *_read_otherwise(view, layout, carried),
        *_left_out(view, layout, carried),
        *_stated_inputs(view, layout),
    )


def _rounded(layout: Layout, carried: Mapping[str, Carried]) -> Iterator[str]:
    rounded = dict(rounded_scales(carried))
    if rounded:
        name, number = next(iter(rounded.items()))
        yield (
            f"Scales without an exact reciprocal in binary32: {len(rounded):,} ('{printable(name)}': {number:.9g}, …); "
            f"{layout.name} stores the nearest number, one unit in the last place off."
        )


def _read_otherwise(view: PlainView, layout: Layout, carried: Mapping[str, Carried]) -> Iterator[str]:
    """Yield a note if readers divide by a tensor scale that they multiplied by before, or the reverse."""
    for each in carried.values():
        parts = {content.holds.name for content in layout.contents(each.weight)} & {ENCODE.name, DECODE.name}
        if parts and each.scale.stored and not each.scale.stored & parts:
            verbs = ("divide by", "multiply by") if ENCODE.name in each.scale.stored else ("multiply by", "divide by")
            yield (
                f"Readers of {view.layout.name} {verbs[0]} the tensor scale, those of {layout.name} {verbs[1]} its "
                "reciprocal: values may differ in the last bit of binary32."
            )
            return


def _left_out(view: PlainView, layout: Layout, carried: Mapping[str, Carried]) -> Iterator[str]:
    names = [name for name in view.unused if name.endswith(ACTIVATION_SCALES)]
    if names:
        formats = ", ".join(sorted({each.weight.format.name for each in carried.values()}))
        yield (
            f"{layout.name} stores no scales of the inputs of {formats} layers, and its loaders need none: "
            f"{len(names):,} are left out ('{printable(names[0])}', …)."
        )


def _stated_inputs(view: PlainView, layout: Layout) -> Iterator[str]:
    stated = next(_paths(on_disk(view.source).settings), None)
    if stated is not None:
        yield (
            f"The source states how inputs of its layers are quantized ({printable(stated)}); the output states what "
            f"{layout.name} has for weights of these formats."
        )


def _paths(settings: object, where: str = "") -> Iterator[str]:
    """Yield the paths of settings of inputs that are not null."""
    for key, value in settings.items() if isinstance(settings, Mapping) else ():
        path = f"{where}.{key}" if where else str(key)
        if key in STATED_INPUTS and value is not None:
            yield path
        else:
            yield from _paths(value, path)
