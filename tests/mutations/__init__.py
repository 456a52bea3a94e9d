"""Damage planted in quantized outputs, and the part of it that `mxcli verify` finds."""
