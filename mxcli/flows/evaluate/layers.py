"""The loss when only one layer, block or kind of layer is quantized, or is the only one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mxcli.errors import EnvironmentFailure, UsageError, printable
from mxcli.flows.emulate.emulate import Emulation, emulate
from mxcli.flows.evaluate.candidates import CHECKPOINT, Candidate
from mxcli.flows.evaluate.evaluate import Evaluated, Evaluation, EvaluationPlan, OnWindow, original_of
from mxcli.flows.evaluate.model import loaded
from mxcli.flows.evaluate.predictions import Predictions, check_space, temporary, temporary_folder
from mxcli.flows.evaluate.scores import Scores, WindowScores
from mxcli.flows.evaluate.scoring import Question, logits_of, scores_of
from mxcli.flows.products.trained_layers import blocks_of

LAYER, BLOCK, KIND = UNITS = ("layer", "block", "kind")
PART = "part"


def part_of(unit: str) -> Callable[[str], str]:
    """Return the function from the name of a layer to that of its part: itself, its block, or its last name."""
    if unit not in UNITS:
        raise UsageError(f"--per {printable(unit)}: it takes {', '.join(UNITS)}.")

    def block(layer: str) -> str:
        found = blocks_of([layer]).of.get(layer)
        return layer if found is None else f"{found[0]}{found[1]}"

    return {LAYER: lambda layer: layer, BLOCK: block, KIND: lambda layer: layer.rpartition(".")[2]}[unit]


def evaluate_parts(
    plan: EvaluationPlan,
    unit: str,
    *,
    left: bool = False,
    device: str = "cpu",
    stop: Callable[[], bool] = lambda: False,
    on_window: OnWindow = lambda *_: None,
) -> Evaluation:
    """Evaluate the single candidate of a plan part by part: with only that part quantized, or with `left` all others.

    A part's forward begins at its block: what earlier blocks gave is kept in memory, and they are not computed again.
    Raises UsageError for another number of candidates or a checkpoint, and KeyboardInterrupt if the original was
    stopped.
    """
    candidate = _single(plan)
    part = part_of(unit)
    check_space(temporary_folder(), plan.predictions_bytes)
    model, loading = loaded(plan.outline, plan.original, device)
    with temporary(plan.outline.vocabulary) as predictions:
        original = original_of(plan, model, predictions, stop, on_window)
        with emulate(model, **candidate.emulation) as emulation:
            parts: dict[str, list[str]] = {}
            for layer in emulation.layers:
                parts.setdefault(part(layer), []).append(layer)
            run = _Parts(plan, candidate, model, emulation, predictions, left=left)
            found, total = [], (1 + len(parts)) * plan.tokens
            for at, (name, layers) in enumerate(parts.items(), 1):
                if stop():
                    break
                found.append(run.evaluated(name, layers))
                on_window((at + 1) * plan.tokens, total, name)
    notes = tuple(dict.fromkeys((*loading, *emulation.notes)))
    ranked = sorted(found, key=lambda each: -each.scores.kl_mean if not left else each.scores.kl_mean)
    return Evaluation(plan, original, tuple(ranked), len(parts) - len(found), notes)


def _single(plan: EvaluationPlan) -> Candidate:
    if len(plan.candidates) != 1 or plan.candidates[0].kind == CHECKPOINT:
        raise UsageError("--per: name one format or recipe, whose parts are evaluated one by one.")
    return plan.candidates[0]


class _Parts:
    """An evaluation by parts in progress: the emulated model, and what its blocks gave for each window."""

    def __init__(
        self,
        plan: EvaluationPlan,
        candidate: Candidate,
        model: Any,
        emulation: Emulation,
        predictions: Predictions,
        *,
        left: bool,
    ) -> None:
        self._plan, self._candidate, self._model, self._emulation = plan, candidate, model, emulation
        self._predictions, self._left = predictions, left
        self._starts = np.cumsum([0, *(len(question.targets) for question in plan.questions)]).tolist()
        self._blocks = _ordered_blocks(emulation.layers)
        self._given = self._recorded()

    def evaluated(self, name: str, layers: Sequence[str]) -> Evaluated:
        """Return the scores with only these layers quantized, or all others."""
        others = [layer for layer in self._emulation.layers if layer not in set(layers)]
        first = min((self._blocks.get(layer, 0) for layer in layers), default=0)
        with self._emulation.only(others if self._left else layers):
            scores = tuple(self._scored(at, first) for at in range(len(self._plan.questions)))
        candidate = replace(self._candidate, name=name, kind=PART)
        return Evaluated(candidate, name, Scores(scores), None, 0.0)

    def _scored(self, window: int, first: int) -> WindowScores:
        """Return the scores of a window, computed from the `first` block on."""
        question, begin = self._plan.questions[window], self._starts[window]
        with self._replaying(window, first):
            logits = logits_of(self._model, question)
        return scores_of(logits, question, lambda row, count: self._predictions.read(begin + row, count))

    def _recorded(self) -> list[list[Any]]:
        """Return the outputs of the blocks for each window, as the parts before a changed one give them: plain, or with
        `left` quantized."""
        keep = list(self._emulation.layers) if self._left else []
        with self._emulation.only(keep):
            return [self._outputs(question) for question in self._plan.questions]

    def _outputs(self, question: Question) -> list[Any]:
        found: list[Any] = []
        hooks = [each.register_forward_hook(lambda *called: found.append(called[2])) for each in self._modules()]
        try:
            logits_of(self._model, question)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _modules(self) -> list[Any]:
        names = dict.fromkeys(part_of(BLOCK)(layer) for layer in self._blocks)
        return [self._model.get_submodule(name) for name in names]

    @contextmanager
    def _replaying(self, window: int, first: int) -> Iterator[None]:
        """Let the blocks before the `first` give what they gave."""
        modules = self._modules()[:first]
        if len(self._given[window]) < len(modules):
            raise EnvironmentFailure(f"{type(self._model).__name__}: its blocks are not called once each, in order.")
        for module, output in zip(modules, self._given[window], strict=False):
            module.forward = partial(_given, output)
        try:
            yield
        finally:
            for module in modules:
                del module.forward


def _given(output: Any, *_: Any, **__: Any) -> Any:
    return output


def _ordered_blocks(layers: Mapping[str, str]) -> dict[str, int]:
    """Return the place of each layer's block in the model; nothing for a model with several stacks of blocks, whose
    order is not known."""
    found = blocks_of(layers)
    if len(found.stacks) != 1:
        return {}
    places = {number: at for at, number in enumerate(next(iter(found.stacks.values())))}
    return {layer: places[number] for layer, (_, number) in found.of.items()}
