"""Colours by what they mean, for light and dark surroundings."""

from __future__ import annotations

# Each stands out from its background by 3:1 at least, and from the others also to those who see two colours only
# (a CIE76 difference above 20 as protanopes, deuteranopes and tritanopes see them).
SERIES_LIGHT = ("#1f577c", "#ce700d", "#26a57b", "#891fb0", "#794101", "#3573fa", "#da3c51", "#4a363f")
SERIES_DARK = ("#7995fc", "#e39e42", "#2bd698", "#c371bd", "#f0d524", "#bbfae4", "#ff6c6b", "#bab1c0")

LIGHT: dict[str, str] = {
    "paper": "#ffffff",
    "card": "#ffffff",
    "sunken": "#f5f6f8",
    "ink": "#1a1e24",
    "soft": "#555d68",
    "rule": "#dde1e6",
    "grid": "#e8ebef",
    "accent": "#0b62a4",
    "hover": "#eef4fa",
    "saturated": "#bf4a06",
    "underflowed": "#1f5f93",
    "context": "#b3b9c2",
    **{f"series-{at}": colour for at, colour in enumerate(SERIES_LIGHT)},
}
DARK: dict[str, str] = {
    "paper": "#14171b",
    "card": "#1a1e23",
    "sunken": "#20252b",
    "ink": "#e9ecef",
    "soft": "#a3abb6",
    "rule": "#333a43",
    "grid": "#2a3038",
    "accent": "#6db3f2",
    "hover": "#232c36",
    "saturated": "#f79a56",
    "underflowed": "#74b8f5",
    "context": "#5d6671",
    **{f"series-{at}": colour for at, colour in enumerate(SERIES_DARK)},
}


def variables(colours: dict[str, str]) -> str:
    """The colours as CSS custom properties."""
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
