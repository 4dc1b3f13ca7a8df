"""What stands beside every number: the machine, the versions, the command, the date."""

import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
BIN = Path(sys.executable).parent
PACKAGES = (
    *("instep", "torch", "numpy", "accelerate", "lightning", "traceml-ai", "transformers", "datasets", "ray"),
    *("pyarrow", "webdataset", "mosaicml-streaming"),
)


@dataclasses.dataclass
class Bars:
    """A picture: one bar for each contender. `better`: less or more."""

    title: str
    unit: str
    values: dict[str, float]
    better: str = "less"


def loopback_only(command):
    """Let a command see only a loopback of its own, where root may do that: Ray would use the machine's address."""
    if os.geteuid():
        return command
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def write_result(name, title, lines, argv, file=None, bars=()):
    """Print the result and write it to results/FILE.md, by default named after the benchmark; bars to FILE.json."""
    print("\n".join(lines))
    path = HERE / "results" / f"{file or name}.md"
    path.parent.mkdir(exist_ok=True)
    command = shlex.join(["python", f"benchmarks/{name}.py", *argv])
    described = describe(command)
    path.write_text("\n".join([f"# {title}", "", *described, "", *lines, ""]))
    if bars:
        content = {"described": described, "bars": [dataclasses.asdict(each) for each in bars]}
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")


def describe(command):
    """Say where and how the numbers were made."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = ", ".join(f"{package} {number}" for package in PACKAGES if (number := _version(package)))
    return [
        f"- machine: {len(os.sched_getaffinity(0))} cores of {_cpu()}, {pages / 2**30:.0f} GiB, {platform.system()}",
        *([f"- GPU: {torch.cuda.get_device_name()}"] if torch.cuda.is_available() else []),
        f"- versions: Python {platform.python_version()}, {versions}",
        f"- load average at the end of the measurement: {os.getloadavg()[0]:.2f}",
        f"- command: `{command}`",
        f"- date: {datetime.date.today()}",
    ]


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(header, rows):
    """Lay out a Markdown table."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(map(str, row)) + " |" for row in (header, rule, *rows)]


def _cpu():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
