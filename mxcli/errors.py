"""The error a user sees: one sentence, its exit code, and how odd names are shown in it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

SHOWN_CHARACTERS = 200
MOST_CHARACTERS = 2000
"""The most characters of one sentence; a longer one quotes a file."""
EXTRAS = {"torch": "torch", "matplotlib": "plots", "transformers": "capture", "gguf": "gguf"}
"""The extra of mxcli that installs a package, by the package's name."""


class MxcliError(Exception):
    """An error of one sentence naming the file or tensor, the value, the need and the way out.

    `details` holds one line per refusal when several are reported at once; `str()` shows the sentence, the
    first of the details and how many more there are.
    """

    exit_code = 1
    shown_details = 10

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(details))
        self.message = _shortened(message, MOST_CHARACTERS)
        self.details = tuple(_shortened(detail, MOST_CHARACTERS) for detail in details)

    @property
    def reasons(self) -> tuple[str, ...]:
        """The single refusals: the details, or the sentence itself when it has none."""
        return self.details or (self.message,)

    def __str__(self) -> str:
        lines = [self.message, *(f"  {detail}" for detail in self.details[: self.shown_details])]
        hidden = len(self.details) - self.shown_details
        if hidden > 0:
            lines.append(f"  and {hidden:,} more")
        return "\n".join(lines)


class UsageError(MxcliError):
    """A flag, name or selector that means nothing here."""

    exit_code = 2


class InputError(MxcliError):
    """Input that is unreadable, corrupt or incomplete."""

    exit_code = 3


class RefusedError(MxcliError):
    """Work that is possible but refused by policy until the user allows it."""

    exit_code = 4


class LimitError(MxcliError):
    """A limit the user stated, or a verification, that failed."""

    exit_code = 5
    shown_details = 20


class EnvironmentFailure(MxcliError):  # noqa: N818
    """Something this machine lacks: a device, memory, disk space, a package."""

    exit_code = 6


def together(kind: type[MxcliError], headline: str, problems: Sequence[str]) -> MxcliError:
    """Return one error for all problems: a single one as it is, several under the headline with their count."""
    if len(problems) == 1:
        return kind(problems[0])
    return kind(f"{headline}: {len(problems):,} problems.", problems)


@contextmanager
def written_to(path: object) -> Iterator[None]:
    """Turn an error of writing to `path` into EnvironmentFailure."""
    try:
        yield
    except OSError as error:
        why = error.strerror or printable(error)
        raise EnvironmentFailure(f"{printable(path)}: cannot be written: {why}.") from error


def import_extra(package: str, what: str, extra: str | None = None) -> ModuleType:
    """Import a package that an extra of mxcli installs; `what` needs it.

    Raises EnvironmentFailure with the command that installs the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        state = "is not installed" if missing else f"cannot be imported ({printable(error)})"
        raise EnvironmentFailure(
            f"{what} needs {package}, which {state}: pip install 'mxcli[{extra or EXTRAS[package]}]'."
        ) from error


def printable(text: object) -> str:
    """Return the text with unprintable characters escaped, shortened in the middle when very long."""
    shown = str(text)
    if len(shown) > SHOWN_CHARACTERS:
        shown = _shortened(shown, SHOWN_CHARACTERS)
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def _shortened(text: str, most: int) -> str:
    """Return the text, with its middle left out if it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2) :]}"


def closest(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three known words that resemble the word, best first; ignores case."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=3, cutoff=0.7)
    return [by_folded[folded] for folded in close]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question naming the closest known words, with a leading space, or an empty string."""
    close = closest(word, known)
    return f" Did you mean {' or '.join(map(printable, close))}?" if close else ""
