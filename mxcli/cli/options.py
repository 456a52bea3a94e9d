"""The options of all verbs, each spelled and explained once."""

from __future__ import annotations

from typing import Annotated

import typer

from mxcli.cli import completion

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A .safetensors file, a directory with one, a sharded directory or its .index.json, a PyTorch "
        ".pt/.pth/.bin, a .gguf file, a NumPy .npy/.npz, or captures: a file of them or a directory of several.",
    ),
]
Output = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="DIR", help="Directory to write; it must be new or empty (or --force)."),
]
_FORMAT = typer.Option(
    "--format",
    metavar="FORMAT",
    autocompletion=completion.formats,
    help="A name that `mxcli formats` lists, or ELEMENT:SCALE:BLOCK[:TENSOR_SCALE] as in e3m2:e8m0:1x16.",
)
Format = Annotated[str, _FORMAT]
FormatOrRecipe = Annotated[str | None, _FORMAT]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="A TOML file that says what the options say, and more of single tensors. Options given beside it win; "
        "--include and --exclude come after its own. --formats stand in place of its format; beside them its overrides "
        "may only keep tensors.",
    ),
]
SaveRecipe = Annotated[
    str | None,
    typer.Option(
        "--save-recipe",
        metavar="FILE",
        help="Write what was decided as a recipe for --recipe, every rule named.",
    ),
]
Formats = Annotated[
    str,
    typer.Option(
        "--formats",
        metavar="FORMAT[,FORMAT...]",
        autocompletion=completion.listed_formats,
        help="Formats, separated by commas, each as --format takes it.",
    ),
]
ScaleRoundings = Annotated[
    str | None,
    typer.Option(
        "--scale-roundings",
        metavar="RULE[,RULE...]",
        autocompletion=completion.listed_scale_roundings,
        help="Scale rules to compare, separated by commas: each with every format it serves.  [default: of several "
        "formats the dialect's rule for each; of one format floor, ceil, rceil and even, or every recipe for its "
        "kind of scale]",
    ),
]
Roundings = Annotated[
    str | None,
    typer.Option(
        "--roundings",
        metavar="RULE[,RULE...]",
        autocompletion=completion.listed_roundings,
        help="Element roundings to compare, separated by commas.  [default: the dialect's, usually nearest-even]",
    ),
]
Hadamards = Annotated[
    str | None,
    typer.Option(
        "--hadamards",
        metavar="none|16|32|64|128[,...]",
        help="Random Hadamard transforms to compare, by the size of their groups.  [default: none]",
    ),
]
ScaleRounding = Annotated[
    str | None,
    typer.Option(
        "--scale-rounding",
        metavar="RULE",
        autocompletion=completion.scale_roundings,
        help="How a block's scale is chosen; `mxcli formats FORMAT` lists the rules that serve it.  "
        "[default: the dialect's, rceil for power-of-two scales]",
    ),
]
Rounding = Annotated[
    str | None,
    typer.Option(
        "--rounding",
        metavar="RULE",
        autocompletion=completion.roundings,
        help="How an element is rounded: nearest-even, half-away, half-toward-zero, toward-zero or stochastic.  "
        "[default: the dialect's, usually nearest-even]",
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="DIALECT",
        autocompletion=completion.dialects,
        help="Whose choices to follow where producers differ, so that bytes equal theirs; `mxcli explain` "
        "lists the dialects.  [default: mxcli]",
    ),
]
Selectors = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        "--exclude",
        metavar="SELECTOR",
        help="Tensors to take or to leave: a glob over whole dotted segments ('*layers.1.*' is not layer "
        "11), re:REGEX, or @role such as @lm_head. May be repeated; the last rule that matches a tensor "
        "wins. Without a rule, weights, activations and gradients are taken.",
    ),
]
Nonfinite = Annotated[
    str,
    typer.Option(
        "--nonfinite",
        metavar="error|saturate|nan-block",
        help="NaN and infinities in the input: refuse, saturate infinities (a NaN still makes its block "
        "NaN), or make their whole block NaN.",
    ),
]
OnIndivisible = Annotated[
    str,
    typer.Option(
        "--on-indivisible",
        metavar="error|pad|keep",
        help="Tensors whose blocks do not come out whole: refuse them all at once, complete the last block "
        "with zeros, or leave the tensor as it is.",
    ),
]
Axis = Annotated[
    str | None,
    typer.Option(
        "--axis",
        metavar="row|column|both",
        help="Blocks run along the last dimension, along the one before it (as in the transpose), or one measurement "
        "for each.  [default: along the dimension that a layer sums over]",
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize",
        help="Take a source that is quantized already: the values its codes stand for. Errors are measured against "
        "those.",
    ),
]
Captures = Annotated[
    str | None,
    typer.Option(
        "--captures",
        metavar="SOURCE",
        help="Captured inputs of the layers (bench: gradients too): what becomes of them is said above.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="bf16|f16|f32|f64", help="Type of the weights.  [default: what each was]"),
]
Fuse = Annotated[
    str | None,
    typer.Option(
        "--fuse",
        metavar="PART+PART[,...]",
        help="Further sets of layers that share a tensor scale, since a loader fuses them: last parts of their module "
        "paths, such as query_key+value. Known are q, k, v and gate, up under their usual names.",
    ),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="LAYOUT",
        autocompletion=completion.layouts,
        help="Whose names and order of bytes the output has: one that `mxcli explain` lists; mxcli holds any format.  "
        "[default: compressed-tensors where it can hold the result]",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda[:N]",
        help="Where to compute: auto is the first usable NVIDIA GPU, else the CPU. The result is the same.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="Threads to use.  [default: one per processor]"),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        help="Most memory to use, such as 8G, 512M or 1.5GiB: on the CPU what would need more is refused before "
        "any work, on a GPU it bounds the memory of the GPU.",
    ),
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="[FILE]",
        help="JSON instead of text on stdout, or beside it in FILE: the next word is FILE if it ends in "
        ".json (not .index.json); --json=FILE takes any name.",
    ),
]
Jsonl = Annotated[
    str | None,
    typer.Option(
        "--jsonl",
        metavar="[FILE]",
        help="One JSON record per tensor, on stdout as each is done, or in FILE: the next word is FILE if it "
        "ends in .jsonl.",
    ),
]
Csv = Annotated[
    str | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="CSV rows by tensor, in FILE (- is stdout), under the names of the JSON; what is null there is empty.",
    ),
]
Markdown = Annotated[
    str | None,
    typer.Option(
        "--markdown", metavar="FILE", help="The table as Markdown, for model cards and issues, in FILE (- is stdout)."
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Also a page with findings, plots, the worst blocks and a table to search and sort: one file that needs "
        "nothing else.",
    ),
]
Plots = Annotated[
    str | None,
    typer.Option(
        "--plots",
        metavar="DIR",
        help="Also the plots of that page as PNG and SVG files, in a directory that is new or empty (or --force).",
    ),
]
Sort = Annotated[
    str,
    typer.Option(
        "--sort",
        metavar="METRIC",
        autocompletion=completion.metrics,
        help="Order of the table, worst first: a metric that `mxcli explain` lists, or name; of what `recommend` "
        "chooses for, harm, sqnr_db, bits_per_element, elements or name.",
    ),
]
Top = Annotated[
    int | None,
    typer.Option("--top", min=0, metavar="N", help="Rows of the table to show; totals still cover all."),
]
By = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="layer|role|kind",
        help="What tensors are summed up by: the layer they are in, their role, or what they are in every layer, such "
        "as mlp.down_proj.",
    ),
]
Sample = Annotated[
    str | None,
    typer.Option(
        "--sample",
        metavar="FRACTION",
        help="Read about this share of each tensor, such as 0.01, and estimate the rest: every mean and ratio then has "
        "its uncertainty, half of a 95 % interval, and the others are of the sample. Tensors below 2 MiB are read "
        "whole, and of each of the others 1 MiB at least.",
    ),
]
SEED = typer.Option(
    "--seed",
    min=0,
    metavar="N",
    help="Decides what is drawn at random, by stochastic rounding, for a --sample or for a benchmark: 0 if not given.",
)
Seed = Annotated[int | None, SEED]
Hadamard = Annotated[
    int | None,
    typer.Option(
        "--hadamard",
        metavar="16|32|64|128",
        help="Apply a random Hadamard transform to groups of so many elements along the blocks first.",
    ),
]
HadamardSeed = Annotated[
    int | None,
    typer.Option(
        "--hadamard-seed",
        metavar="N",
        help="Decides the transform's signs.  [default: Transformer Engine's for 16, else those of 0]",
    ),
]
FailOn = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-on",
        metavar="EXPRESSION",
        help="End with exit code 5, after the report, if a tensor's metrics are as in 'saturated_percent>0.1' or "
        "'sqnr_db<20 and elements>1000': < <= > >= == != of metrics and numbers, and, or, parentheses; or if that "
        "hangs on a metric the tensor lacks. Where there is no error the SQNR is infinite. May be repeated.",
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="Full names and all columns, whatever the width of the terminal.")]
ProductsOf = Annotated[
    str | None,
    typer.Option(
        "--products",
        metavar="CAPTURES",
        help="Instead of tensors measure the products of layers, Y = X W^T, dX = dY W and dW = dY^T X, with what was "
        "captured in this file or directory: the first 1,024 tokens of each layer, step and rank.",
    ),
]
ActivationFormat = Annotated[
    str | None,
    typer.Option(
        "--activation-format", metavar="FORMAT", help="With --products: the format of X.  [default: the weights']"
    ),
]
GradientFormat = Annotated[
    str | None,
    typer.Option(
        "--gradient-format", metavar="FORMAT", help="With --products: the format of dY.  [default: the weights']"
    ),
]
PerBlock = Annotated[
    str | None,
    typer.Option(
        "--per-block",
        metavar="FILE.safetensors",
        help="Also store arrays with a value per block: NAME.amax, .decode (the scale), .saturated, "
        ".underflowed and .noise; of --axis both NAME.row.amax, NAME.column.amax and so on.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and what it needs, from headers alone; write nothing.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace output that exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, notes or hints on stderr; errors only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also say on stderr why each tensor is treated as it is.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with an error (also MXCLI_DEBUG=1).")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colour (also NO_COLOR and TERM=dumb).")]
