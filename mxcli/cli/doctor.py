"""`mxcli doctor`, and `mxcli --version`."""

from __future__ import annotations

from typing import Annotated

from mxcli.cli.groups import vary, verb
from mxcli.cli.outputs import Results, deliver_forms
from mxcli.cli.terminal import Messages


@verb
def doctor(
    results: Annotated[Results, vary(only=("json", "force"))],
    messages: Annotated[Messages, vary(only=("debug",))],
) -> None:
    """Report what this installation and machine can do, and why not.

    The text is ready to paste into an issue.

    \b
    Examples:
      mxcli doctor
      mxcli doctor --json
    """
    from mxcli.flows.doctor import examine
    from mxcli.output.doctor import doctor_record, doctor_text
    from mxcli.output.export import json_text

    results.check()
    diagnosis = examine()
    deliver_forms(
        results,
        messages.stdout(),
        json=lambda: json_text("doctor", doctor_record(diagnosis)),
        text=lambda screen: doctor_text(diagnosis, screen),
    )


def print_version(json: str | None) -> None:
    """Print the version; with `json` also those of Python and of the packages that matter."""
    from mxcli.flows.doctor import PACKAGES, own_version, package_version
    from mxcli.output.export import json_text

    results = Results(json=json)
    results.check()
    version = own_version()

    def record() -> str:
        import platform

        packages = {name: package_version(name) for name in PACKAGES}
        return json_text("version", {"version": version, "python": platform.python_version(), "packages": packages})

    deliver_forms(results, Messages().stdout(), json=record, text=lambda screen: f"mxcli {version}")
