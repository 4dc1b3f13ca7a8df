"""What stands beside every number: the machine, the versions, the command, the date."""

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent


def write_result(name, title, lines, argv, file=None):
    """Print the result and write it to results/FILE.md, by default named after the benchmark."""
    print("\n".join(lines))
    path = HERE / "results" / f"{file or name}.md"
    path.parent.mkdir(exist_ok=True)
    command = shlex.join(["python", f"benchmarks/{name}.py", *argv])
    path.write_text("\n".join([f"# {title}", "", *describe(command), "", *lines, ""]))
    print(f"written to {path.relative_to(ROOT)}")


def describe(command):
    """Say where and how the numbers were made."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = ", ".join(f"{package} {version(package)}" for package in ("instep", "torch", "numpy"))
    return [
        f"- machine: {len(os.sched_getaffinity(0))} cores of {_cpu()}, {pages / 2**30:.0f} GiB, {platform.system()}",
        *([f"- GPU: {torch.cuda.get_device_name()}"] if torch.cuda.is_available() else []),
        f"- versions: Python {platform.python_version()}, {versions}",
        f"- load average at the end of the measurement: {os.getloadavg()[0]:.2f}",
        f"- command: `{command}`",
        f"- date: {datetime.date.today()}",
    ]


def table(header, rows):
    """Lay out a Markdown table."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows)]


def _cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
