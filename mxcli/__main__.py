"""`python -m mxcli`."""

from mxcli.cli.app import main

main()
