"""The elements of an SVG drawing as text, everything escaped; colours are variables of the page. Pure."""

from __future__ import annotations

import html

NUM_COLORS = 8
"""Colours that tell curves apart; further curves repeat them."""
LIGHT = {
    "page": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#59636e",
    "rule": "#d8dee4",
    "soft": "#f5f7f9",
    "c0": "#2a6fbb",
    "c1": "#d9730d",
    "c2": "#2b8a5a",
    "c3": "#7a55b5",
    "c4": "#c43e3e",
    "c5": "#128a93",
    "c6": "#a5812a",
    "c7": "#6e7781",
    "startup": "#b9bec6",
    "data": "#2f9e6b",
    "copy": "#a9cdf0",
    "forward": "#2a6fbb",
    "backward": "#5f9fdc",
    "communication": "#e07b1a",
    "compile": "#b08c34",
    "optimizer": "#1c4a80",
    "checkpoint": "#7a55b5",
    "evaluation": "#b7a2dc",
    "hooks": "#c2638f",
    "other": "#8f97a1",
    "good": "#1a7f4b",
    "bad": "#b42318",
    "warn": "#8a5a00",
}
"""The colours by name: of a light page and of paper."""
DARK = LIGHT | {
    "page": "#14171b",
    "ink": "#e6e9ec",
    "muted": "#9aa4af",
    "rule": "#343b43",
    "soft": "#1d2126",
    "c0": "#6aa9ee",
    "c1": "#f0a052",
    "c2": "#5cc492",
    "c3": "#b08fe6",
    "c4": "#ee7b74",
    "c5": "#4fc3cc",
    "c6": "#d4b15c",
    "c7": "#a8b1bb",
    "startup": "#5d656f",
    "data": "#4cb587",
    "copy": "#35597e",
    "forward": "#4d93dc",
    "backward": "#7fb5ec",
    "optimizer": "#9fb9d6",
    "checkpoint": "#a283db",
    "evaluation": "#6a5596",
    "other": "#79828d",
    "good": "#5cc492",
    "bad": "#ff8f84",
    "warn": "#e0b15a",
}


def escape(text: object) -> str:
    """Return text that is safe in an element and in an attribute, in HTML and in XML.

    Control characters, which XML forbids even when escaped, are replaced, and so are halves of surrogate pairs.
    """
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text))
    return html.escape(shown, quote=True)


def element(name: str, content: str = "", **attributes: object) -> str:
    """Return an element; `content` is markup, attributes are escaped; `class_` is class, and `_` within a name `-`."""
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    words = "".join(f' {key}="{_attribute(value)}"' for key, value in named)
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def _attribute(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else escape(value)


def text(x: float, y: float, words: object, **attributes: object) -> str:
    """Return a text element."""
    return element("text", escape(words), x=x, y=y, **attributes)


def path(points: list[tuple[float, float]]) -> str:
    """Return the `d` of a line through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def drawing(width: float, height: float, content: str, title: str) -> str:
    """Return an SVG element that takes the width that the page gives it."""
    return element(
        "svg",
        element("title", escape(title)) + content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        class_="chart",
        role="img",
    )


def variables(colors: dict[str, str]) -> str:
    """Return the declarations of colours."""
    return "".join(f"--{name}:{value};" for name, value in colors.items())


CHART_CSS = """
.chart{display:block;width:100%;height:auto;font:11px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.chart text{fill:var(--muted)}.chart .strong{fill:var(--ink);font-weight:600}
.chart .grid{stroke:var(--rule);stroke-width:1;shape-rendering:crispEdges}
.chart .curve{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
.chart .band{stroke:none;opacity:.18}.chart .mark{stroke:var(--bad);stroke-width:1;stroke-dasharray:3 3}
.chart .on{fill:#fff;font-size:10px;paint-order:stroke;stroke:rgba(0,0,0,.45);stroke-width:2px}
.chart .ideal{stroke:var(--muted);stroke-width:1.2;stroke-dasharray:5 4;fill:none}
.chart rect,.chart .band{print-color-adjust:exact;-webkit-print-color-adjust:exact}
"""


def standalone(svg: str) -> str:
    """Return an SVG file: the drawing with its own colours, which follow a dark screen."""
    style = (
        f"svg{{{variables(LIGHT)}background:var(--page)}}"
        f"@media screen and (prefers-color-scheme:dark){{svg{{{variables(DARK)}}}}}{CHART_CSS}"
    )
    head, _, rest = svg.partition(">")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}>{element("style", style)}{rest}\n'
