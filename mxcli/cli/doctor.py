"""`mxcli doctor`, and `mxcli --version`."""

from __future__ import annotations

from mxcli.cli import options
from mxcli.cli.arguments import STDOUT
from mxcli.cli.streams import deliver, refuse_existing, stdout_screen


def doctor(
    json: options.Json = None,
    force: options.Force = False,
    debug: options.Debug = False,
) -> None:
    """Say what this installation and machine can do, and why not.

    The text is made for pasting into an issue.

    \b
    Examples:
      mxcli doctor
      mxcli doctor --json
    """
    from mxcli.flows.doctor import examine
    from mxcli.output.doctor import doctor_record, doctor_text
    from mxcli.output.export import json_text

    refuse_existing([json], force=force, sources=[])
    diagnosis = examine()
    if json is not None:
        deliver(json_text("doctor", doctor_record(diagnosis)), json)
    if json != STDOUT:
        deliver(doctor_text(diagnosis, stdout_screen()))


def print_version(json: str | None) -> None:
    """The version as a line; with `json` also those of Python and the packages that matter."""
    from mxcli.flows.doctor import PACKAGES, own_version, package_version
    from mxcli.output.export import json_text

    refuse_existing([json], force=False, sources=[])
    version = own_version()
    if json is not None:
        import platform

        packages = {name: package_version(name) for name in PACKAGES}
        content = {"version": version, "python": platform.python_version(), "packages": packages}
        deliver(json_text("version", content), json)
    if json != STDOUT:
        deliver(f"mxcli {version}")
