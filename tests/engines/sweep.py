"""A tiny model of an architecture, quantized by mxcli and loaded by transformers: what came of it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from engines.architectures import Architecture
from engines.tiny_configs import WORDS, tiny
from mxcli.cli.app import run

FIRST_WORD, LAST_WORD, IMAGE = 3, WORDS - 8, WORDS - 1
"""Tokens between the special ones, and the one that stands for a part of an image."""


def build(row: Architecture) -> Any:
    """A model in BF16 whose every layer shows in the output: linear layers keep the size of their inputs, and no norm
    or bias is the 1 or 0 that a lost one would be replaced with."""
    kind = getattr(transformers, row.name)
    torch.manual_seed(0)
    model = kind(tiny(kind.config_class, row.changes))
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                _spread(module, parameter, draws=row.draws)
    return model.to(torch.bfloat16).eval()


def _spread(module: Any, parameter: Any, *, draws: bool) -> None:
    """Draw the weights of a linear layer or a stack of experts; move vectors, and what is all 0, a little."""
    is_stack = parameter.dim() == 3 and "xpert" in type(module).__name__
    if draws and (is_stack or isinstance(module, torch.nn.Linear)) and parameter.dim() > 1:
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
            found[name] = torch.randint(FIRST_WORD, LAST_WORD, value)
        else:
            found[name] = torch.randn(value).to(torch.bfloat16)
    if row.images:
        found["input_ids"][:, 1 : 1 + row.images] = IMAGE
    return found


OUTPUTS = ("logits", "text_embeds", "image_embeds", "last_hidden_state")


def forward(model: Any, row: Architecture) -> Any:
    """The outputs of a forward pass in a row."""
    with torch.inference_mode():
        output = model(**inputs_of(row), **({"use_cache": False} if hasattr(model.config, "use_cache") else {}))
    found = [output[name] for name in OUTPUTS if output.get(name) is not None]
    assert found, f"{row}: none of {list(output)} is an output"
    return torch.cat([value.float().flatten() for value in found])


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
class Source:
    """A checkpoint of an architecture, and what transformers makes of it."""

    row: Architecture
    folder: Path
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a format made of an architecture. `faults` say what the engine does not load right, `verified` is what
    verify says: of the model that transformers builds, for the engine, and with the source."""

    quantized: Said
    faults: tuple[str, ...] = ()
    verified: tuple[Said, ...] = ()
    error: float = 0.0
    bound: float = 0.0
    weights: tuple[str, ...] = ()

    @property
    def verdicts(self) -> list[str]:
        """What verify says of transformers each time: whether it loads, if nothing else is wrong."""
        return [verdict(said, "transformers") for said in self.verified]

    @property
    def exit_for_engine(self) -> int:
        """The exit code of verify for the engine."""
        return self.verified[1].code

    @property
    def sentences(self) -> list[str]:
        """What verify says that engines do not load."""
        problems = json.loads(self.verified[1].out)["findings"]
        return [f"{each['value']}: {each['need']}" for each in problems if each["check"] in LOADER_CHECKS]


LOADER_CHECKS = ("named_loader", "no_loader")


def verdict(said: Said, engine: str) -> str:
    """What verify says of an engine, or all that it says if something else is wrong."""
    if said.code not in (0, 5):
        return f"exit {said.code}: {said.err}"
    found = json.loads(said.out)
    others = [
        each for each in found["findings"] if each["severity"] == "problem" and each["check"] not in LOADER_CHECKS
    ]
    if others:
        return f"exit {said.code}: {others}"
    return next((str(row["outcome"]) for row in found["loaders"] if row["engine"] == engine), "not known")


def mxcli(*words: object) -> Said:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(word) for word in words])
    return Said(code, out.getvalue(), err.getvalue())


def source(row: Architecture, folder: Path) -> Source:
    """Save a model of the architecture, and load it again."""
    build(row).save_pretrained(folder)
    loaded = load(row, folder)
    assert not loaded.faults, f"{row}: {loaded.faults}"
    return Source(row, folder, loaded)


def load(row: Architecture, folder: Path, *, dense: bool = False, like: Loaded | None = None) -> Loaded:
    """Load a checkpoint and run it; what a loader raises is its answer. `dense` dequantizes while loading. Parameters
    get the types that they have in `like`."""
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dense else {}
    kind = getattr(transformers, row.name)
    try:
        model, info = kind.from_pretrained(folder, dtype="auto", output_loading_info=True, **options)
        _set_types(model, {} if like is None else like.state)
        output = forward(model.eval(), row)
    except Exception as error:
        return Loaded(None, {}, (f"{type(error).__name__}: {error} ({_place(error)})",))
    found = [
        f"{key}: {_names(info[key])}" for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]
    ]
    if not torch.isfinite(output).all():
        found.append("its output is not finite")
    return Loaded(output, model.state_dict(), tuple(found))


def _set_types(model: Any, state: Mapping[str, Any]) -> None:
    """Give parameters the floating types that they have in a state. Of plain models transformers keeps some modules in
    binary32, such as the convolutions of BailingHybrid, and not of quantized ones."""
    for name, parameter in model.named_parameters():
        kept = state.get(name)
        if kept is not None and kept.dtype in (torch.bfloat16, torch.float32) and parameter.dtype != kept.dtype:
            parameter.data = parameter.data.to(kept.dtype)


def _place(error: BaseException) -> str:
    """The last place in transformers that an error passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "transformers" in frame.filename]
    return " ".join(f"{Path(frame.filename).name}:{frame.name}" for frame in frames[-1:])


def _names(keys: Any) -> str:
    return ", ".join(sorted(map(str, keys))[:6])


def judge(model: Source, format: str, folder: Path, *options: str, dense: bool = False) -> Outcome:
    """Quantize, load (`dense` as in `load`), and compare with the values that mxcli scales back."""
    q, plain = folder / "q", folder / "plain"
    words = ("--format", format, "-o", q, "--threads", 1, "--json", *model.row.options, *options)
    said = mxcli("quantize", model.folder, *words)
    if said.code:
        return Outcome(said)
    manners = (("--deep",), ("--for", "transformers"), ("--against", model.folder))
    verified = tuple(mxcli("verify", q, "--json", *manner) for manner in manners)
    scaled_back = mxcli("dequantize", q, "-o", plain)
    if scaled_back.code:
        return Outcome(said, (f"dequantize: {scaled_back.err}",), verified)
    engine = load(model.row, q, dense=dense)
    reference = load(model.row, plain, like=engine)
    weight_error, weights = measured(said)
    bound = allowed_error(weight_error, weights)
    faults = [*engine.faults, *(f"dequantized: {fault}" for fault in reference.faults)]
    error = math.nan
    if engine.output is not None and reference.output is not None:
        error = relative_error(engine.output, model.loaded.output)
        # MX layers of torchao quantize their inputs too, which the output shows and the weights do not.
        exact = not any(type(value).__name__ == "MXTensor" for value in engine.state.values())
        faults += _differences(engine, reference, BF16_ROUNDING if exact else bound)
        faults += [f"the output is off by {error:.3g}, more than {bound:.3g}"] if not error <= bound else []
    return Outcome(said, tuple(faults), verified, error, bound, weights)


def measured(said: Said) -> tuple[float, tuple[str, ...]]:
    """The relative error of all quantized weights, and their names, in the report of quantize."""
    report = json.loads(said.out)
    return float(report["totals"]["relative_error"]), tuple(layer["name"] for layer in report["layers"])


BF16_ROUNDING = 2**-6
"""Equal weights at other addresses may be multiplied by other kernels, whose sums round differently in BF16: four
units of its last place."""


def _differences(engine: Loaded, reference: Loaded, rounding: float) -> Iterator[str]:
    """Yield how a loaded model differs from the one of the values scaled back: in the `rounding` of its output only, if
    it loads right."""
    found = {name: held(engine.state, name) for name in reference.state}
    wrong = [
        name
        for name, value in reference.state.items()
        if found[name] is None or not torch.equal(found[name].to(value.dtype), value)
    ]
    if wrong:
        yield f"{len(wrong)} of {len(reference.state)} parameters differ: {', '.join(wrong[:6])}"
    elif not relative_error(engine.output, reference.output) <= rounding:
        yield f"the output differs by {relative_error(engine.output, reference.output):.3g}, with equal parameters"


_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def held(state: Mapping[str, Any], name: str) -> Any:
    """The values of a parameter, or of the single experts that a loader holds instead of a stack; None without both."""
    if name in state:
        return values_of(state[name])
    match, experts = _STACK.fullmatch(name), []
    while match:
        names = [f"{match[1]}.{len(experts)}.{part}.weight" for part in _PARTS[match[2]]]
        if any(each not in state for each in names):
            break
        experts.append(torch.cat([values_of(state[each]) for each in names]).T)
    return torch.stack(experts) if experts else None


def values_of(value: Any) -> Any:
    """The values of a tensor, also of one that torchao keeps quantized."""
    return value if type(value) is torch.Tensor else value.dequantize()


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


def without_tensor(path: Path, pattern: str) -> str:
    """Remove the first tensor whose name matches from a file; return its name."""
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if re.search(pattern, name))
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    return str(name)
