"""The HTML page that reports are shown on: one file with its style, no script, light, dark and on paper. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from instep.monitor.charts.svg import CHART_CSS, DARK, LIGHT, element, escape, variables
from instep.monitor.report.tables import Table

_CSS = """
*{box-sizing:border-box}
html{background:var(--page);color:var(--ink);color-scheme:light dark}
body{margin:0 auto;max-width:980px;padding:36px 28px 48px;
 font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;overflow-wrap:break-word}
header{border-bottom:2px solid var(--ink);padding-bottom:14px;margin-bottom:22px}
.over{color:var(--muted);font-size:12px;letter-spacing:.08em;text-transform:uppercase;margin:0}
h1{font-size:30px;line-height:1.2;margin:4px 0 6px;font-weight:650}
h2{font-size:19px;margin:34px 0 12px;padding-bottom:5px;border-bottom:1px solid var(--rule);font-weight:620}
h3{font-size:15px;margin:24px 0 8px;font-weight:620}
p{margin:8px 0}.note{color:var(--muted);font-size:13px}
.badge{display:inline-block;padding:1px 9px;border-radius:10px;border:1px solid currentColor;font-size:13px;
 font-weight:600;margin-right:10px}
.complete,.preempted{color:var(--good)}.failed{color:var(--bad)}.unfinished{color:var(--warn)}
.numbers{display:flex;flex-wrap:wrap;gap:1px;background:var(--rule);border:1px solid var(--rule);margin:18px 0}
.numbers div{background:var(--page);flex:1 1 105px;padding:9px 13px 10px}
.numbers dt{color:var(--muted);font-size:12px}
.numbers dd{margin:0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:22px 26px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;margin:8px 0}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--muted);font-weight:600;border-bottom-color:var(--muted);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;padding:5px 12px}
td.n:last-child,th.n:last-child{padding-right:0}
table.facts td:first-child{color:var(--muted);white-space:nowrap;width:1%;padding-right:20px}
table.facts td{overflow-wrap:anywhere}
table.times td:nth-child(-n+4){white-space:nowrap}
pre{background:var(--soft);border:1px solid var(--rule);padding:10px 13px;white-space:pre-wrap;overflow-wrap:anywhere;
 font:13px/1.5 ui-monospace,"SF Mono","DejaVu Sans Mono",monospace;margin:8px 0}
.box{border-left:3px solid var(--warn);background:var(--soft);padding:8px 14px;margin:12px 0;font-size:14px;
 overflow-wrap:anywhere}
.verdict{border-left-color:var(--c0)}
footer{margin-top:38px;padding-top:10px;border-top:1px solid var(--rule);color:var(--muted);font-size:12.5px}
@media print{@page{margin:15mm}body{max-width:none;padding:0;font-size:11pt}h1{font-size:20pt}
 .numbers div{flex:1 1 80px;padding:6px 9px}.numbers dd{font-size:12pt}
 .charts{grid-template-columns:1fr 1fr}.chart,.numbers,tr{break-inside:avoid}h2,h3{break-after:avoid}
 .scroll{overflow:visible}table{font-size:9pt}pre{font-size:8.5pt}}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """Return the page with these parts, which are markup; the title is text."""
    style = (
        f":root{{{variables(LIGHT)}}}@media screen and (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
        f"{_CSS}{CHART_CSS}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def heading(level: int, text: str) -> str:
    """Return a heading."""
    return element(f"h{level}", escape(text))


def paragraph(text: str, class_: str | None = None) -> str:
    """Return a paragraph."""
    return element("p", escape(text), class_=class_)


def box(text: str, class_: str = "box") -> str:
    """Return a paragraph that stands out."""
    return element("div", escape(text), class_=class_)


def table(content: Table, class_: str | None = None) -> str:
    """Return a table."""
    head = "".join(_cell("th", text, number in content.numbers) for number, text in enumerate(content.head))
    rows = "".join(
        "<tr>" + "".join(_cell("td", text, number in content.numbers) for number, text in enumerate(row)) + "</tr>"
        for row in content.rows
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return element("div", element("table", body, class_=class_), class_="scroll")


def facts(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and texts, without a head."""
    body = "".join(f"<tr>{_cell('td', name, False)}{_cell('td', text, False)}</tr>" for name, text in rows)
    return element("table", f"<tbody>{body}</tbody>", class_="facts")


def numbers(rows: Sequence[tuple[str, str]]) -> str:
    """Return a row of large numbers with their names."""
    cells = "".join(f"<div>{element('dt', escape(name))}{element('dd', escape(text))}</div>" for name, text in rows)
    return element("dl", cells, class_="numbers")


def _cell(kind: str, text: str, is_number: bool) -> str:
    name = ' class="n"' if is_number else ""
    return f"<{kind}{name}>{escape(text)}</{kind}>"
