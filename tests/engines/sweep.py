"""A tiny model of an architecture, quantized by mxcli and loaded by transformers: what came of it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from engines.architectures import Architecture
from engines.tiny_configs import WORDS, tiny
from mxcli.cli.app import run

FIRST_WORD = 3
"""The first token that is not special."""


def build(row: Architecture) -> Any:
    """A model in BF16 whose every layer shows in the output: linear layers keep the size of their inputs, and no norm
    or bias is the 1 or 0 that a lost one would be replaced with."""
    kind = getattr(transformers, row.name)
    torch.manual_seed(0)
    model = kind(tiny(kind.config_class, row.changes))
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                _spread(module, name, parameter)
    return model.to(torch.bfloat16).eval()


def _spread(module: Any, name: str, parameter: Any) -> None:
    """Draw the weights of a linear layer or a stack of experts; move vectors a little."""
    is_linear = isinstance(module, torch.nn.Linear) or parameter.dim() == 3 and "xpert" in type(module).__name__
    if is_linear and parameter.dim() > 1:
        parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]))
    elif parameter.is_floating_point() and (parameter.dim() == 1 or not parameter.any()):
        parameter.add_(0.05 * torch.randn_like(parameter))


def inputs_of(row: Architecture) -> dict[str, Any]:
    torch.manual_seed(1)
    found: dict[str, Any] = {}
    for name, value in row.inputs.items():
        if not isinstance(value, tuple):
            found[name] = torch.tensor(value) if isinstance(value, list) else value
        elif name.endswith("ids"):
            found[name] = torch.randint(FIRST_WORD, WORDS - 8, value)
        else:
            found[name] = torch.randn(value).to(torch.bfloat16)
    if row.images:
        found["input_ids"][:, 1 : 1 + row.images] = row.image_token
    return found


def forward(model: Any, row: Architecture) -> Any:
    """The logits, or the last hidden state, of a forward pass."""
    with torch.inference_mode():
        output = model(**inputs_of(row), **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    if isinstance(output, tuple):
        return output[0].float()
    for name in ("logits", "start_logits", "logits_per_image", "last_hidden_state", "image_embeds"):
        if output.get(name) is not None:
            return output[name].float()
    raise AssertionError(f"{row.name}: none of {list(output)} is an output")


@dataclass(frozen=True, slots=True)
class Said:
    """What a command of mxcli ended with and printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model of transformers, what its loader did not find or not expect, and the output of its forward pass."""

    output: Any
    state: Mapping[str, Any]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a format made of an architecture. `faults` say what the engine does not load right, `verified` are the exit
    codes of verify, alone and with the source."""

    quantized: Said
    faults: tuple[str, ...] = ()
    verified: tuple[Said, ...] = ()
    error: float = 0.0
    bound: float = 0.0
    weights: tuple[str, ...] = field(default_factory=tuple)

    @property
    def is_refused(self) -> bool:
        return self.quantized.code == 4


def mxcli(*words: object) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Said(code, out.getvalue(), err.getvalue())


def load(row: Architecture, folder: Path) -> Loaded:
    kind = getattr(transformers, row.name)
    try:
        model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
        output = forward(model.eval(), row)
    except Exception as error:  # whatever a loader raises is its answer
        return Loaded(None, {}, (f"{type(error).__name__}: {error} ({_place(error)})",))
    found = [f"{key}: {_names(info[key])}" for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
    if not torch.isfinite(output).all():
        found.append("its output is not finite")
    return Loaded(output, model.state_dict(), tuple(found))


def _place(error: BaseException) -> str:
    """The last place in transformers that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers" in frame.filename]
    return " ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in frames[-1:])


def _names(keys: Any) -> str:
    return ", ".join(sorted(map(str, keys))[:6])


def judge(row: Architecture, source: Path, original: Loaded, format: str, folder: Path, *options: str) -> Outcome:
    """Quantize, load, and compare with the values that mxcli scales back, in the same architecture."""
    words = ("quantize", source, "--format", format, "-o", folder / "q", "--device", "cpu", "--threads", 1, "--json")
    said = mxcli(*words, *options)
    if said.code:
        return Outcome(said, faults=() if said.code == 4 else (f"quantize: exit {said.code}: {said.err[:300]}",))
    report = json.loads(said.out)
    quantized = tuple(layer["name"] for layer in report["layers"])
    verified = (mxcli("verify", folder / "q"), mxcli("verify", folder / "q", "--against", source))
    plain = mxcli("dequantize", folder / "q", "-o", folder / "plain")
    if plain.code:
        return Outcome(said, (f"dequantize: exit {plain.code}: {plain.err[:300]}",), verified)
    engine, reference = load(row, folder / "q"), load(row, folder / "plain")
    faults = [*engine.faults, *(f"dequantized: {fault}" for fault in reference.faults)]
    error, bound = math.nan, allowed_error(report["totals"]["relative_error"], quantized)
    if engine.output is not None and reference.output is not None:
        faults += _differences(engine, reference)
        error = relative_error(engine.output, original.output)
        if not error <= bound:
            faults.append(f"output is off by {error:.3g}, more than {bound:.3g}")
    return Outcome(said, tuple(faults), verified, error, bound, quantized)


def _differences(engine: Loaded, reference: Loaded) -> Iterator[str]:
    """Yield how a loaded model differs from the one of the values scaled back: not at all, if it loads right."""
    wrong = [
        name
        for name, value in reference.state.items()
        if name not in engine.state or not torch.equal(engine.state[name].to(value.dtype), value)
    ]
    if wrong:
        yield f"{len(wrong)} of {len(reference.state)} parameters differ: {', '.join(wrong[:6])}"
    elif not torch.equal(engine.output, reference.output):
        yield f"the output differs by {relative_error(engine.output, reference.output):.3g}, with equal parameters"


def relative_error(value: Any, original: Any) -> float:
    return float((value - original).norm() / original.norm())


def allowed_error(weight_error: float, quantized: tuple[str, ...]) -> float:
    """The largest relative error of an output that the error of the weights explains.

    A product of a layer has about the relative error of its weights, as rounding errors of single weights are
    independent. Errors of layers are too: n of them add up to the square root of n times that of one. Norms keep the
    size of what passes, so no layer multiplies the error of those before it by much: 2 covers gates, which multiply
    two products, and the rounding of activations to BF16.
    """
    layers = {re.sub(r"(experts\.)\d+", r"\1", name) for name in quantized}
    return 2 * weight_error * math.sqrt(len(layers))
