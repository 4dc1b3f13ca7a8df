"""What it costs a script to be watched by `instep check`: the time of its steps with and without, in turns.

python benchmarks/check_cost.py
python benchmarks/check_cost.py --kinds mlp --rounds 2 --steps 40          a quick try

It measures all observers that are registered. A turn is one run of the script; the runs with and without alternate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from check_script import BATCH
from machine import HERE, table, write_result

from instep.check.watched import OBSERVERS

GOAL = 1.5
WARM_UP = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kinds", default=",".join(BATCH))
    args = parser.parse_args()
    rows = []
    for kind in args.kinds.split(","):
        ways = {"run": [], "run, again": [], "check": []}
        for _ in range(args.rounds):
            for way, turns in ways.items():
                turns.append(medians_ms(way.partition(",")[0], kind, args.steps))
        rows.append(row(kind, ways))
        print(*rows[-1], flush=True)
    header = [
        "script",
        "batch per rank",
        "ms a step without",
        "watched / without",
        "without / without",
        "CPU time watched / without",
        "goal",
    ]
    title = f"Being watched by instep check: the cost of a step, -n 2, {args.rounds} turns of {args.steps} steps each"
    lines = [
        *table(header, rows),
        "",
        f"{len(OBSERVERS) + 2} observers. After the watch the script is ended: nothing is left to cost.",
    ]
    write_result("check_cost", title, lines, sys.argv[1:])


def medians_ms(command, kind, steps):
    """Run the script once; return the median time and CPU time of its steps after the first few."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        options = ["--steps", str(steps), "--time", "10m"] if command == "check" else []
        words = [
            sys.executable,
            "-m",
            "instep",
            command,
            "-n",
            "2",
            *options,
            HERE / "check_script.py",
            kind,
            steps,
            file,
        ]
        subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)
        times = zip(*json.loads(file.read_text())[WARM_UP:], strict=True)
        return [1000 * statistics.median(column) for column in times]


def row(kind, ways):
    plain, again, watched = ways.values()
    (cost, cpu), (noise, _) = ratios(watched, plain), ratios(again, plain)
    verdict = f"<= {GOAL}: {'reached' if cost <= GOAL else 'missed'}"
    ms = statistics.median(turn[0] for turn in plain)
    return [kind, BATCH[kind], f"{ms:.2f}", f"{cost:.3f}", f"{noise:.3f}", f"{cpu:.3f}", verdict]


def ratios(above, below):
    """Compare two ways turn by turn: the median ratio of their times, and of their CPU times."""
    return [statistics.median(a[i] / b[i] for a, b in zip(above, below, strict=True)) for i in (0, 1)]


if __name__ == "__main__":
    main()
