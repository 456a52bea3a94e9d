"""Command lines of every verb with valid options at random, chosen more often the less they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

BLOCKS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8", "nvfp4", "nvfp4_2d", "fp8_e4m3",
    "fp8_e4m3_channel",
    "fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e5m2", "e3m2:e8m0:1x16", "e2m1:e4m3:1x16:fp32", "nvfp4", "mxfp8_e4m3",
    "mxfp4",
)  # fmt: skip
LAYOUTS = ("compressed-tensors", "modelopt", "fp8", "gpt-oss", "quark", "torchao", "torchao-plain", "gguf", "mxcli")
DIALECTS = (
    "mxcli", "ocp", "te", "paper", "torchao", "modelopt", "modelopt-bf16", "compressed-tensors",
    "compressed-tensors-bf16", "vllm",
    "quark", "microxcaling", "gguf",
)  # fmt: skip
SCALES = ("floor", "ceil", "rceil", "even", "nearest", "best", "te", "paper", "ct", "amax", "vllm")
ROUNDINGS = ("nearest-even", "half-away", "toward-zero", "half-toward-zero", "stochastic")
SELECTORS = ("*", "@weight", "@norm", "*.q_proj.weight", "re:.*proj.*", "'*layers.0.*'", "@lm_head", "nothing")
METRICS = ("sqnr_db", "mse", "name", "amax", "harm", "cosine", "saturated_percent")
LIMITS = ("sqnr_db<20", "saturated_percent>0.1", "elements>0", "mse>=0&elements<10", "(cosine<1)or(amax==inf)")

Options = Mapping[str, tuple[str, ...]]
MACHINE: Options = {"--threads": ("1", "2"), "--device": ("cpu", "auto"), "--max-memory": ("8G", "1M", "200M")}
TABLE: Options = {"--top": ("0", "1", "99"), "--wide": ()}
MESSAGES: Options = {"--quiet": (), "--no-color": ()}
OUTPUT: Options = {"--json": (), "--json={to}/x.json": ()}
RULES: Options = {
    "--scale-rounding": SCALES, "--rounding": ROUNDINGS, "--as": DIALECTS, "--nonfinite": ("error", "saturate",
    "nan-block"),
    "--on-indivisible": ("error", "pad", "keep"), "--seed": ("0", "7", "18446744073709551615"),
}  # fmt: skip
ONE: Options = {"--format": BLOCKS}
TRANSFORM: Options = {"--hadamard": ("16", "32", "64", "128"), "--hadamard-seed": ("1", "99")}
SELECTION: Options = {"--include": SELECTORS, "--exclude": SELECTORS, "--requantize": ()}
AXIS: Options = {"--axis": ("row", "column", "both")}
CSV: Options = {"--csv": ("-", "{to}/x.csv"), "--markdown": ("-", "{to}/x.md")}
MEASURE: Options = {"--sample": ("0.01", "0.5"), "--fail-on": LIMITS, "--sort": METRICS}
WRITE: Options = {
    "--max-shard-size": ("6K", "1G", "1"),
    "--shard-range": ("1/2", "2/2"),
    "--no-verify": (),
    "--resume": (),
    "--force": (),
}
STUDY = {**MESSAGES, **TABLE, **OUTPUT, **MACHINE, **RULES, **SELECTION, **CSV, "--verbose": ()}


@dataclass(frozen=True, slots=True)
class Command:
    """A command line with the options it may have, and how often it is chosen among those of its kind; `needs` are the
    kinds of input that it reads (none: all)."""

    words: str
    weight: int
    options: Options
    needs: tuple[str, ...] = ()

    def made(self, random: Random) -> list[str]:
        """The words with up to five options."""
        found = self.words.split()
        for _ in range(random.choice((0, 0, 0, 1, 1, 2, 4))):
            if not self.options:
                break
            name = random.choice(list(self.options))
            values = self.options[name]
            found += [name, random.choice(values)] if values else [name]
        return found


_SHOW = {**TABLE, **OUTPUT, "--no-color": ()}
_REPORT = {**STUDY, **MEASURE, **AXIS, **ONE, **TRANSFORM, "--jsonl": (), "--per-block": ("{to}/b.safetensors",)}
_QUANTIZE = {
    **MESSAGES,
    **OUTPUT,
    **MACHINE,
    **RULES,
    **SELECTION,
    **AXIS,
    **TRANSFORM,
    **WRITE,
    "--layout": LAYOUTS,
    "--fuse": ("q+k", "a+b"),
}
_COMPARE = {
    **STUDY, **MEASURE, **AXIS, "--by": ("layer", "role", "kind"), "--scale-roundings": ("floor,rceil", "te,ct"),
    "--roundings": ("nearest-even,stochastic",), "--hadamards": ("none,16",),
}  # fmt: skip
_RECOMMEND = {**STUDY, "--layout": LAYOUTS, "--save-recipe": ("{to}/r.toml",), "--configs": ("{to}/configs",)}
_VERIFY = {**_SHOW, **CSV, **MACHINE, "--tp": ("1", "2", "3")}
_DIFF = {**_SHOW, **CSV, **MACHINE, "--tensor": SELECTORS, "--full": ()}
_CONVERT = {**OUTPUT, **WRITE, "--layout": LAYOUTS, "--round-tensor-scales": (), "--max-memory": ("1G",)}
_QUANTIZED = ("config", "record", "quantized", "experts")
_CAPTURED = ("capture",)
_RECIPE = ("recipe",)
_PROGRESS = ("progress",)
_FILES = ("safetensors", "gguf", "npy", "npz", "npz-deflated", "pt", "pt-legacy", "capture")
_PLAIN = (*_FILES, "index", "recipe")
_MODELS = tuple(name for name in _PLAIN if name != "capture")
_CAUSAL = ("causal",)
_TRAINING = {**STUDY, "--recipes": ("all", "nvfp4", "mxfp8"), "--draws": ("1", "2")}
_SHARE = "quantize {in}/source --format nvfp4 -o {in}/made --max-shard-size 6K --resume"
_CAPTURE = {"--forward-only": (), "--steps": ("2",), "--sample-rows": ("2",), **OUTPUT}

COMMANDS = (
    Command("inspect {in}", 120, _SHOW, (*_PLAIN, *_QUANTIZED)),
    Command("inspect {file}", 80, _SHOW, _FILES),
    Command("report {in} --dry-run", 40, _REPORT, _PLAIN),
    Command("compare {in} --formats mxfp4,nvfp4 --dry-run", 10, _COMPARE, _PLAIN),
    Command("recommend {in} --formats mxfp4,mxfp8_e4m3 --bits 6 --dry-run", 10, _RECOMMEND, _MODELS),
    Command("quantize {in} --format nvfp4 -o {out} --dry-run", 40, _QUANTIZE, _PLAIN),
    Command("quantize {file} --format mxfp4 -o {out} --dry-run", 20, _QUANTIZE, _FILES),
    Command("verify {in}", 2, _VERIFY, _PLAIN),
    Command("diff {in} {in}", 12, _DIFF, _PLAIN),
    Command("diff {in} {valid}", 8, _DIFF, _PLAIN),
    Command("report {in}", 12, _REPORT, _PLAIN),
    Command("report {file}", 8, _REPORT, _FILES),
    Command("compare {in} --formats mxfp4,nvfp4", 4, _COMPARE, _PLAIN),
    Command("recommend {in} --formats mxfp4,mxfp8_e4m3 --bits 6", 3, _RECOMMEND, _MODELS),
    Command("recommend {in} --formats mxfp4,nvfp4 --min-sqnr 20", 2, _RECOMMEND, _MODELS),
    Command("recommend {in} --formats nvfp4 --keep-percent 10", 2, _RECOMMEND, _MODELS),
    Command("quantize {in} --format mxfp8_e4m3 -o {out}", 5, _QUANTIZE, _PLAIN),
    Command("quantize {in} --format nvfp4 -o {out} --nonfinite saturate --on-indivisible pad", 4, _QUANTIZE, _PLAIN),
    Command("quantize {file} --format nvfp4 -o {out} --layout mxcli", 2, _QUANTIZE, _FILES),
    Command(
        "dequantize {in} -o {out}", 2, {**OUTPUT, **MACHINE, **WRITE, "--dtype": ("bf16", "f16", "f32", "f64")}, _PLAIN
    ),
    Command("merge {in}", 1, {**OUTPUT, "--no-verify": (), "--force": ()}, _PLAIN),
    Command("training {in}", 1, _TRAINING, _PLAIN),
    Command("training {valid-model} --captures {file}", 1, {"--recipes": ("nvfp4",)}, _FILES),
    Command("products {in} {file}", 1, {**STUDY, **ONE}, _FILES),
    Command("explain nvfp4", 1, {}),
    Command("formats", 1, {**OUTPUT, "--wide": ()}),
    Command("verify {in}", 60, _VERIFY, _QUANTIZED),
    Command("verify {in} --against {source}", 10, _VERIFY, _QUANTIZED),
    Command("verify {in} --against {source} --repair", 10, _VERIFY, _QUANTIZED),
    Command("diff {in} {valid}", 30, _DIFF, _QUANTIZED),
    Command("dequantize {in} -o {out}", 15, {**OUTPUT, **MACHINE, **WRITE}, _QUANTIZED),
    Command("convert {in} -o {out} --layout mxcli", 10, _CONVERT, _QUANTIZED),
    Command("convert {in} -o {out} --layout modelopt --dry-run", 10, _CONVERT, _QUANTIZED),
    Command("convert {in} -o {out} --layout mlx", 4, _CONVERT, _PLAIN),
    Command("report {in} --requantize --dry-run", 40, _REPORT, _QUANTIZED),
    Command("report {in} --requantize", 8, _REPORT, _QUANTIZED),
    Command("compare {in} --requantize --formats mxfp4", 4, _COMPARE, _QUANTIZED),
    Command("quantize {in} --requantize --format mxfp8_e4m3 -o {out}", 4, _QUANTIZE, _QUANTIZED),
    Command("quantize {in} --format mxfp8_e4m3 -o {out} --dry-run", 4, _QUANTIZE, _QUANTIZED),
    Command(
        "quantize {valid-model} --format nvfp4 -o {in} --resume",
        20,
        {"--force": (), "--no-verify": ()},
        ("record", "quantized"),
    ),
    Command("merge {in}", 20, {}, _QUANTIZED),
    Command("training {in}", 30, _TRAINING, _CAPTURED),
    Command("training {valid-model} --captures {in}", 10, {"--recipes": ("nvfp4",)}, _CAPTURED),
    Command("products {in} {in}", 30, {**STUDY, **ONE}, _CAPTURED),
    Command("products {valid-model} {in}", 10, {**STUDY, **ONE}, _CAPTURED),
    Command(
        "quantize {valid-model} --format nvfp4 --captures {file} --include *.down_proj.weight -o {out}",
        5,
        _QUANTIZE,
        _CAPTURED,
    ),
    Command("recommend {valid-model} --formats nvfp4,mxfp8 --bits 6 --captures {file}", 5, _RECOMMEND, _CAPTURED),
    Command("report {valid-model} --recipe {file} --dry-run", 200, _REPORT, _RECIPE),
    Command("quantize {in} --recipe {in}/recipe.toml -o {out} --dry-run", 120, _QUANTIZE, _RECIPE),
    Command("compare {in} --formats mxfp4 --recipe {in}/recipe.toml --dry-run", 10, _COMPARE, _RECIPE),
    Command("recommend {in} --formats mxfp4 --bits 6 --recipe {in}/recipe.toml --dry-run", 10, _RECOMMEND, _RECIPE),
    Command("products {in} {captures} --recipe {in}/recipe.toml", 10, {**STUDY}, _RECIPE),
    Command("quantize {in} --recipe {in}/recipe.toml -o {out}", 10, _QUANTIZE, _RECIPE),
    Command("merge {in}/both", 150, {**OUTPUT, "--no-verify": (), "--force": ()}, _PROGRESS),
    Command("inspect {in}/made", 10, _SHOW, _PROGRESS),
    Command("verify {in}/both", 10, _VERIFY, _PROGRESS),
    Command(_SHARE + " --shard-range 1/2", 60, {"--force": ()}, _PROGRESS),
    Command(_SHARE + " --shard-range 2/2", 30, {"--force": ()}, _PROGRESS),
    Command(_SHARE, 10, {"--force": ()}, _PROGRESS),
    Command("quantize {in}/source --format mxfp4 -o {in}/made --force", 10, {}, _PROGRESS),
    Command("capture {in} --text {text} --tokens 8 -o {out}", 2, _CAPTURE, _CAUSAL),
    Command("capture {in} --text {text} --tokens 8 -o {out} --dry-run", 4, _CAPTURE, _CAUSAL),
    Command("verify {in} --deep", 1, _VERIFY, ("causal", *_QUANTIZED)),
)
RARE = (
    Command("report {in} --html {to}/x.html", 6, _REPORT, _PLAIN),
    Command("report {in} --plots {to}/plots", 1, {}, _PLAIN),
    Command("compare {in} --formats mxfp4,nvfp4 --html {to}/x.html", 4, _COMPARE, _PLAIN),
    Command("training {captures} --html {to}/x.html", 1, {}),
    Command("training {in} --html {to}/x.html", 20, {}, _CAPTURED),
    Command("products {valid-model} {in} --html {to}/x.html", 20, {}, _CAPTURED),
    Command("doctor --json", 1, {}),
    Command("bench quantize --size 256 --rounds 1 --format mxfp4", 1, {}),
)
"""Commands that take a second, or need something that is no part of a case: one in a few hundred cases."""
