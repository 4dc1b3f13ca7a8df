"""docs/benchmarks.md: the results of all benchmarks on one page, with bars as pictures.

python benchmarks/page.py
"""

import html
import json

from machine import HERE, ROOT

RESULTS = HERE / "results"
PICTURES = ROOT / "docs" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
ORDER = [
    *(
        "mnist_speed",
        "accelerate_examples",
        "one_process",
        "overhead",
        "scaling",
        "input",
        "network",
        "checkpoint_stall",
        "recovery",
        "startup",
    ),
    *(
        "order",
        "exact_cost",
        "allreduce",
        "gpt2_speed",
        "peak_memory",
        "compile_strategies",
        "gpu_start",
        "resnet_speed",
        "input_gpu",
        "checkpoint_stall_gpu",
        "exact_cost_gpu",
    ),
]
WIDTH, ROW, RIGHT = 760, 26, 90
LETTER = 7.7
"""The width of a letter, about: names of any length fit."""
OURS, OTHERS, INK = "#d9480f", "#8aa0b4", "#1f2933"
INTRODUCTION = """# Benchmarks

`make bench` makes this page: it installs the peers into an environment of their own, runs every contender on the same
work, in turns, and writes `benchmarks/results` and the pictures. What needs a GPU is what was measured last on one.
Compare within one table: each states its machine, versions and command. Trust ratios, not milliseconds: machines of two
cores are noisy.
"""


def main():
    PICTURES.mkdir(exist_ok=True)
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    names = [path.stem for path in RESULTS.glob("*.md")]
    lines = INTRODUCTION.splitlines()
    for name in [name for name in ORDER if name in names]:
        lines += ["", *section(name)]
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"written to {PAGE.relative_to(ROOT)}")


def section(name):
    """Return the part of one benchmark: its result, with headings one level down, and its pictures."""
    text = (RESULTS / f"{name}.md").read_text().strip()
    lines = [f"#{line}" if line.startswith("#") else line for line in text.splitlines()]
    pictures = []
    data = RESULTS / f"{name}.json"
    for number, bars in enumerate(json.loads(data.read_text())["bars"] if data.exists() else ()):
        path = PICTURES / f"{name}-{number + 1}.svg"
        path.write_text(draw(bars))
        pictures += ["", f"![{bars['title']}]({path.relative_to(PAGE.parent)})"]
    return [lines[0], *pictures, "", *lines[1:]]


def draw(bars):
    """Return a picture of bars, the best first; instep's stand out."""
    rows = sorted(bars["values"].items(), key=lambda item: item[1], reverse=bars["better"] == "more")
    longest, height = max(bars["values"].values()), ROW * len(rows) + 46
    left = max(120, round(LETTER * max(map(len, bars["values"])) + 20))
    better = f"{bars['unit']}, {'more' if bars['better'] == 'more' else 'less'} is better"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold" fill="{INK}">{html.escape(bars["title"])}</text>',
        f'<text x="{WIDTH - 12}" y="22" font-size="12" text-anchor="end" fill="{INK}">{html.escape(better)}</text>',
    ]
    for number, (name, value) in enumerate(rows):
        top = 38 + ROW * number
        length = (WIDTH - left - RIGHT) * value / longest
        colour = OURS if name.startswith("instep") else OTHERS
        weight = ' font-weight="bold"' if name.startswith("instep") else ""
        label, middle = f'fill="{INK}" font-size="13"{weight}', top + 15
        parts += [
            f'<text x="{left - 10}" y="{middle}" text-anchor="end" {label}>{html.escape(name)}</text>',
            f'<rect x="{left}" y="{top}" width="{length:.1f}" height="{ROW - 7}" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{middle}" {label}>{number_text(value)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def number_text(value):
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
