"""Options that several verbs have, by group, each spelled and explained once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer

FORMAT_NAMES = "mxcli.numerics.formats:FORMATS"
SCALE_RULE_NAMES = (
    "mxcli.numerics.scale_rules:POWER_OF_TWO_SCALE_RULES",
    "mxcli.numerics.mantissa_rules:MANTISSA_SCALE_RULES",
)
ROUNDING_NAMES = "mxcli.numerics.scale_rules:ELEMENT_ROUNDINGS"
DIALECT_NAMES = "mxcli.numerics.dialects:DIALECTS"
METRIC_NAMES = "mxcli.numerics.metrics:METRICS"
_LAYOUT_NAMES = "mxcli.files.layouts:LAYOUTS"
_ENGINE_NAMES = "mxcli.files.loaders.engine:ENGINES"


def completes(*tables: str, listed: bool = False, more: Iterable[str] = ()) -> Callable[[str], list[str]]:
    """Return a completion for the shell of the names in tables, each `module:NAME` and imported when completing, and
    of `more`; of the last name in a comma-separated list where `listed`."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if listed else ("", "", incomplete)
        names = [name for table in tables for name in _names(table)]
        return [f"{before}{comma}{name}" for name in (*names, *more) if name.startswith(last)]

    return complete


def _names(table: str) -> list[str]:
    """Return the names in a table, or in each table of a table."""
    module, _, attribute = table.partition(":")
    rows = getattr(import_module(module), attribute)
    return [name for key, row in rows.items() for name in (row if isinstance(row, Mapping) else (key,))]


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A .safetensors file, a directory with one, a sharded directory or its .index.json, a PyTorch "
        ".pt/.pth/.bin/.ckpt, a .gguf file, a NumPy .npy/.npz, or captures (a file or a directory).",
    ),
]
FORMAT_HELP = "A name that `mxcli formats` lists, or ELEMENT:SCALE:BLOCK[:TENSOR_SCALE] as in e3m2:e8m0:1x16."
_FORMATS = typer.Option(
    "--formats",
    metavar="FORMAT[,FORMAT...]",
    autocompletion=completes(FORMAT_NAMES, listed=True),
    help=f"Formats, separated by commas: each {FORMAT_HELP[0].lower()}{FORMAT_HELP[1:]}",
)
Formats = Annotated[str, _FORMATS]
OptionalFormats = Annotated[str | None, _FORMATS]
Captures = Annotated[str | None, typer.Option("--captures", metavar="CAPTURES", help="Captured inputs of the layers.")]
SaveRecipe = Annotated[
    str | None,
    typer.Option(
        "--save-recipe", metavar="FILE", help="Write the decisions as a recipe for --recipe, every rule named."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="bf16|f16|f32|f64", help="Type of the weights.  [default: as in the source]"),
]
Engines = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="ENGINE[,ENGINE...]",
        autocompletion=completes(_ENGINE_NAMES, listed=True),
        help="Engines that must load the output as its weights are, such as vllm,transformers; `mxcli explain loaders` "
        "lists what they load. quantize without --layout writes the first layout that all of them load.",
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tp",
        min=1,
        metavar="N",
        help="Weights and scales must divide into whole blocks over N devices (tensor parallelism).",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and the memory it needs, from headers alone; write nothing."),
]


LayoutName = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        autocompletion=completes(_LAYOUT_NAMES),
        help="Tensor names and byte order of the output, one that `mxcli explain` lists; mxcli holds any format.",
    ),
]


@dataclass(frozen=True, slots=True)
class SchemeOptions:
    """The format and the rules as typed, by the names of Options and RuleOptions, and the recipe file they override."""

    heading: ClassVar[str] = "Rules"
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            rich_help_panel="Format",
            autocompletion=completes(FORMAT_NAMES),
            help=FORMAT_HELP,
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            rich_help_panel="Format",
            help="A TOML file with these options, and others for single tensors. The command line overrides it; "
            "--include and --exclude are applied after its own.",
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            rich_help_panel="Format",
            autocompletion=completes(_LAYOUT_NAMES),
            help="Tensor names and byte order of the output, one that `mxcli explain` lists; mxcli holds any format.  "
            "[default: compressed-tensors if it can hold the result]",
        ),
    ] = None
    scale_rounding: Annotated[
        str | None,
        typer.Option(
            "--scale-rounding",
            metavar="RULE",
            autocompletion=completes(*SCALE_RULE_NAMES),
            help="Rule for the scale of a block; `mxcli formats FORMAT` lists those that serve it.  "
            "[default: the dialect's, rceil for power-of-two scales]",
        ),
    ] = None
    rounding: Annotated[
        str | None,
        typer.Option(
            "--rounding",
            metavar="RULE",
            autocompletion=completes(ROUNDING_NAMES),
            help="Rounding of elements, one that `mxcli explain` lists.  "
            "[default: the dialect's, usually nearest-even]",
        ),
    ] = None
    dialect: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="DIALECT",
            autocompletion=completes(DIALECT_NAMES),
            help="Producer to follow where producers differ, so that bytes equal theirs; `mxcli explain` lists the "
            "dialects.  [default: mxcli]",
        ),
    ] = None
    axis: Annotated[
        str | None,
        typer.Option(
            "--axis",
            metavar="row|column|both",
            help="Blocks run along the last dimension (row), along the one before it (column), or measure both.  "
            "[default: along the dimension that a layer sums over]",
        ),
    ] = None
    nonfinite: Annotated[
        str,
        typer.Option(
            "--nonfinite",
            metavar="error|saturate|nan-block",
            help="NaN and infinities in the input: refuse them, saturate infinities (a NaN still makes its block NaN), "
            "or make the whole block NaN.",
        ),
    ] = "saturate"
    on_indivisible: Annotated[
        str,
        typer.Option(
            "--on-indivisible",
            metavar="error|pad|keep",
            help="Tensors that do not divide into whole blocks: refuse them (all named at once), pad the last block "
            "with zeros, or keep the tensor unquantized.",
        ),
    ] = "pad"
    hadamard: Annotated[
        int | None,
        typer.Option(
            "--hadamard",
            metavar="16|32|64|128",
            help="Random Hadamard transform of groups of that size along the blocks, before quantizing.",
        ),
    ] = None
    hadamard_seed: Annotated[
        int | None,
        typer.Option(
            "--hadamard-seed",
            metavar="N",
            help="Seed of the transform's signs.  [default: Transformer Engine's signs for 16, else seed 0]",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, metavar="N", help="Seed of stochastic rounding.  [default: 0]"),
    ] = None
    fuse: Annotated[
        str | None,
        typer.Option(
            "--fuse",
            metavar="PART+PART[,...]",
            help="Further layers that share a tensor scale because a loader fuses them: last parts of their module "
            "paths, such as query_key+value. q, k, v and gate, up are known under their usual names.",
        ),
    ] = None

    @property
    def named(self) -> dict[str, Any]:
        """The values by name, without the recipe."""
        return {field.name: getattr(self, field.name) for field in fields(SchemeOptions) if field.name != "recipe"}


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors to take; `selectors` are marked as `arguments.normalized` does."""

    heading: ClassVar[str] = "Selection"
    selectors: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            "--exclude",
            metavar="SELECTOR",
            help="Tensors to take or to leave: a glob over whole dotted segments ('*layers.1.*' does not match layer "
            "11), re:REGEX, or @role such as @lm_head. May be repeated; the last match wins.  "
            "[default: weights, activations and gradients]",
        ),
    ] = None
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize",
            help="Dequantize an already quantized source first; errors are measured against the dequantized values.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class Serving:
    """The engines that must load a checkpoint, and the number of devices that it must divide over."""

    heading: ClassVar[str] = "Options"
    engines: Engines = None
    tensor_parallel: TensorParallel = None


@dataclass(frozen=True, slots=True)
class Measuring:
    """The extent of a measurement and the limits that its results must keep."""

    heading: ClassVar[str] = "Measurement"
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="FRACTION",
            help="Read about this fraction of each tensor, such as 0.01: means and ratios are estimates with ± 95 % "
            "confidence; other metrics are of the sample. At least 1 MiB of a tensor is read; tensors under 2 MiB are "
            "read whole.",
        ),
    ] = None
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="EXPRESSION",
            help="Exit with code 5, after the report, if a tensor matches, such as 'saturated_percent>0.1' or "
            "'sqnr_db<20 and elements>1000' (< <= > >= == != and or, parentheses), or lacks the metric. Without error "
            "the SQNR is infinite. May be repeated.",
        ),
    ] = None
    dry_run: DryRun = False
