"""Checks of the configuration against the tensors: ignore lists, fused layers, tensor parallelism, known traps."""

from __future__ import annotations

from collections.abc import Iterator

from mxcli.files.layouts.loaders import unmatched, unread
from mxcli.files.loaders.tensor_parallel import CONFIG, uncut
from mxcli.flows.verify.checks.check import NOTE, PROBLEM, WARNING, Check, Finding
from mxcli.flows.verify.checks.fused import sets_among
from mxcli.flows.verify.subject import Subject

NOT_QUANTIZED = {"embedding": "an embedding table", "norm": "a norm", "router": "a router", "bias": "a bias"}
"""Roles that loaders expect unquantized, in words."""


def _list_name(subject: Subject) -> str:
    assert subject.ignored is not None
    return f"the list {subject.ignored.key}"


def _ignored_but_quantized(subject: Subject) -> Iterator[Finding]:
    if subject.ignored is None:
        return
    for module in subject.quantized_modules:
        entry = subject.ignored.by(module)
        if entry is not None:
            yield Finding(
                module,
                f"quantized, but named by the entry '{entry}' of {_list_name(subject)}",
                f"a list that matches the weights: loaders read {subject.ignored.reading}",
                f"Remove '{entry}', or name the intended modules in full.",
            )


def _missing_entries(subject: Subject, *, strict: bool) -> Iterator[Finding]:
    """Yield plain linear layers that the configuration targets and the list omits: those that no loader skips by
    itself (`strict`), or the others, such as a head that is tied to the embedding."""
    ignored = subject.ignored
    if ignored is None:
        return
    for module in subject.plain_modules:
        tied = f"{module}.weight" in subject.checkpoint.tied
        some = bool(ignored.experts_for) and _chooses_or_stacks(subject, module)
        certain = ignored.strict and not tied and not some
        if certain == strict and ignored.targeted(module) and ignored.by(module) is None:
            who = f"{ignored.experts_for} looks" if some else "loaders look"
            yield Finding(
                module,
                "tied to the embedding and not in the list" if tied else "not quantized and not in the list",
                f"an entry of {_list_name(subject)}: {who} for its codes and leave{'s' * some} it without weights",
                f"Add '{module}' to {ignored.key}.",
            )


def _chooses_or_stacks(subject: Subject, module: str) -> bool:
    """Return whether a module is a router or a stack of experts, which is not a linear layer in transformers."""
    tensors = subject.checkpoint.tensors if subject.view is None else subject.view.tensors
    own = [info for name, info in tensors.items() if name.rpartition(".")[0] == module]
    return any(info.role == "router" or len(info.shape) == 3 for info in own)


def _unread_entries(subject: Subject) -> Iterator[Finding]:
    if subject.layout is None:
        return
    ignored = subject.layout.ignored(subject.disk)
    if ignored is not None:
        for entry, fault in unread(ignored).items():
            yield Finding(entry, fault, f"an entry readable by loaders: {ignored.reading}", "Fix it.")


def _unmatched_entries(subject: Subject) -> Iterator[Finding]:
    if subject.ignored is None or not subject.weights:
        return
    tensors = subject.view.tensors if subject.view is not None else {}
    modules = {name.rpartition(".")[0] for name in (*tensors, *subject.checkpoint.tied)}
    parents = {".".join(module.split(".")[:at]) for module in modules for at in range(1, module.count(".") + 1)}
    for entry in unmatched(subject.ignored, modules | parents):
        yield Finding(entry, "matches no module of this checkpoint", "no entry, unless the model has such a module")


def _mixed_sets(subject: Subject) -> Iterator[Finding]:
    plain = {f"{module}.weight" for module in subject.plain_modules}
    tensors = subject.view.tensors if subject.view is not None else {}
    known = [name for name in tensors if name in subject.weights or name in plain]
    for key, members in sets_among(subject, known).items():
        formats = {name: _format(subject, name) for name in members}
        if len(set(formats.values())) > 1:
            listed = ", ".join(f"{name.split('.')[-2]} {format}" for name, format in formats.items())
            yield Finding(
                key,
                listed,
                "one format for all, or all ignored: loaders that fuse them into one layer refuse mixed ones",
                "Quantize the set to one format.",
            )


def _format(subject: Subject, name: str) -> str:
    stored = subject.weights.get(name)
    return "plain" if stored is None else stored.weight.format.name


def _hazards(subject: Subject, *, certain: bool) -> Iterator[Finding]:
    if subject.layout is None:
        return
    weights = [stored.weight for stored in subject.weights.values()]
    for hazard in subject.layout.hazards(subject.disk, weights):
        if hazard.certain == certain:
            yield Finding(hazard.where, hazard.value, hazard.need, hazard.way_out)


def _unexpected_roles(subject: Subject) -> Iterator[Finding]:
    if subject.view is None or subject.layout is None:
        return
    for name in subject.weights:
        role = subject.view.tensors[name].role
        what = NOT_QUANTIZED.get(role)
        if what is not None and role not in subject.layout.taken:
            yield Finding(
                name, f"{what}, quantized", "a plain tensor: most loaders support nothing else", "Exclude it."
            )


def skipped_ignored(subject: Subject) -> str | None:
    """Return the reason why the ignore list is not checked, or None."""
    if subject.layout is None:
        return "nothing is quantized with scales"
    return f"the layout {subject.layout.name} has no ignore list" if subject.ignored is None else None


LIST_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "ignored_but_quantized",
        PROBLEM,
        "modules that the ignore list names and that hold codes",
        "every entry of the list, matched as the layout's loaders do, against the quantized modules",
        _ignored_but_quantized,
    ),
    Check(
        "not_ignored",
        PROBLEM,
        "linear layers that loaders expect quantized and that are plain",
        "every plain linear layer that the configuration targets, against the list",
        lambda subject: _missing_entries(subject, strict=True),
    ),
    Check(
        "not_listed",
        WARNING,
        "linear layers missing in the list that only some loaders need there",
        "like not_ignored, for layouts whose loaders skip the usual modules, and for tied output heads",
        lambda subject: _missing_entries(subject, strict=False),
    ),
    Check("ignore_entry", PROBLEM, "entries that loaders cannot read", "regular expressions", _unread_entries),
    Check(
        "ignore_nothing",
        NOTE,
        "entries of the list that match nothing here",
        "every entry against every module",
        _unmatched_entries,
    ),
)
"""Checks of the ignore list."""
CONFIG_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "fused_in_part",
        WARNING,
        "layers that some loaders fuse, of which only some are quantized, or in different formats",
        "q, k, v and gate, up of every layer and expert, under their usual names",
        _mixed_sets,
    ),
    Check(
        "silent_misreading",
        PROBLEM,
        "checkpoints that loaders are known to misread silently",
        "known traps of the layout",
        lambda subject: _hazards(subject, certain=True),
    ),
    Check(
        "possible_misreading",
        WARNING,
        "checkpoints that some loaders misread silently",
        "known traps of the layout",
        lambda subject: _hazards(subject, certain=False),
    ),
    Check(
        "kind", WARNING, "quantized tensors that loaders expect plain", "embeddings, norms, routers", _unexpected_roles
    ),
)


def _tensor_parallel(subject: Subject) -> Iterator[Finding]:
    weights = [stored.weight for stored in subject.weights.values()]
    for each in uncut(weights, subject.checkpoint.config, subject.tensor_parallel or 1):
        or_blocks = "" if each.where == CONFIG else ", or a format with smaller blocks"
        yield Finding(each.where, each.value, each.need, f"Use fewer devices{or_blocks}.")


DEVICE_CHECKS: tuple[Check[Subject], ...] = (
    Check(
        "tensor_parallel",
        PROBLEM,
        "weights that do not divide over the devices",
        "rows of q, k, v, gate, up and columns of o, down over the number of devices, in whole blocks; heads from the "
        "configuration",
        _tensor_parallel,
    ),
)
