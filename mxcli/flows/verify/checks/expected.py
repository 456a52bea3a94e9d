"""The model that config.json states, as the judge of what tables and siblings make suspect."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from mxcli.flows.verify.checks.parameters import Parameters, parameters_of
from mxcli.flows.verify.subject import Subject

_NUMBERED = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Expected:
    """The tensors that a checkpoint's model has. transformers builds the model when a check first needs it, which takes
    seconds: only where something is suspect, and not for the `usual` model types, whose layers are alike and whose
    tensors are in tables."""

    subject: Subject
    usual: frozenset[str] = frozenset()

    @cached_property
    def parameters(self) -> Parameters | None:
        """The parameters of the model; None if it is not known."""
        # Importing transformers takes seconds, which a type that it does not know is not worth.
        if self.is_usual or not self.subject.checkpoint.model.source:
            return None
        found = parameters_of(self.subject)
        return None if isinstance(found, str) else found

    @property
    def is_usual(self) -> bool:
        """True if the model is of a usual type."""
        return (self.subject.checkpoint.config or {}).get("model_type") in self.usual

    @property
    def is_known(self) -> bool:
        """True if the model is known and the tensors have its names."""
        return self.parameters is not None

    def lacks(self, name: str) -> bool:
        """Return whether the model is known and needs no tensor of a name."""
        return self.parameters is not None and name not in self.parameters.expected

    def lacks_all(self, *, roles: Collection[str] = (), ending: str = "") -> bool:
        """Return whether the model is known and needs no tensor of some roles (none given: of all) outside of layers,
        whose name is or ends in a name ("": of any)."""
        if self.parameters is None:
            return False
        return not any(
            (not roles or role in roles) and f".{name}".endswith(f".{ending}" if ending else "")
            for name, (role, _) in self.parameters.expected.items()
            if not _NUMBERED.search(name)
        )

    def has_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the model is known and has a tensor of a name in this shape."""
        return self.parameters is not None and self.parameters.expected.get(name, ("", None))[1] == shape

    def numbers(self, stack: str) -> set[int] | None:
        """Return the numbers of the parts of a list, such as layers or experts, that the model has; None if it is not
        known."""
        if self.parameters is None:
            return None
        beginning = f"{stack}."
        following = (
            name[len(beginning) :].partition(".")[0] for name in self.parameters.expected if name.startswith(beginning)
        )
        return {int(each) for each in following if each.isdecimal()}
