"""A drawing as a PNG file, by resvg: for what shows no SVG."""

from __future__ import annotations

import re

from instep.core.errors import SpecError
from instep.monitor.charts.svg import CHART_CSS, LIGHT

_ZOOM = 2.0
"""Pixels for each unit of a drawing: sharp on a screen of today, and in print."""


def require_png() -> None:
    """Raise SpecError if no PNG can be made here."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise SpecError("A PNG needs the package resvg-py: pip install 'instep[png]', or give a file .svg.") from None


def to_png(svg: str, width: float) -> bytes:
    """Return a drawing of `width` units, as `svg.drawing` makes it, in the light colours."""
    import resvg_py

    # resvg knows neither CSS variables nor the shorthand `font`.
    style = CHART_CSS.replace("font:11px ", "font-size:11px;font-family:")
    head, _, rest = svg.partition(">")
    text = f"{head}><style>{style}</style>{rest}"
    text = re.sub(r"var\(--([\w-]+)\)", lambda name: LIGHT[name[1]], text)
    return bytes(resvg_py.svg_to_bytes(svg_string=text, width=round(_ZOOM * width), font_family="DejaVu Sans"))
