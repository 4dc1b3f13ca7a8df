"""Rows a second where data has to be read: instep by itself, and a plain loop with its best number of loader processes.

python benchmarks/input.py [--kinds tensors images tokens text slow] [--device cuda]

One process of one thread. Each kind of data is read by a plain loop with torch's DataLoader (0, 1, 2, 4 and 8 worker
processes; the best is shown), and by instep, which chooses by itself who reads. Every measurement is a fresh process;
the ways take turns. The first half of each does not count: instep measures in it.
"""

import argparse
import json
import statistics
import subprocess
import sys

from machine import HERE, Bars, table, write_result

KINDS = {
    "tensors": "tensors in memory",
    "images": "images decoded in Python",
    "tokens": "memory-mapped tokens",
    "text": "text of different lengths",
    "slow": "2 ms of waiting a sample",
}
WORKERS = (0, 1, 2, 4, 8)
GOAL = 1.0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of which the second half counts")
    args = parser.parse_args()
    rows, bars = [], []
    for kind in args.kinds:
        speeds = {way: [] for way in (*(f"plain:{count}" for count in WORKERS), "instep")}
        chosen = ""
        for _ in range(args.rounds):
            for way, values in speeds.items():
                result = measure(way, kind, args)
                values.append(result["rows_per_s"])
                chosen = result.get("reading", chosen)
        middle = {way: statistics.median(values) for way, values in speeds.items()}
        best = max((way for way in middle if way != "instep"), key=middle.get)
        ratio = statistics.median(a / b for a, b in zip(speeds["instep"], speeds[best], strict=True))
        verdict = "reached" if ratio >= GOAL else "missed"
        shown = [f"{middle[way]:.0f}" for way in ("plain:0", best, "instep")]
        rows.append([KINDS[kind], *shown, best.partition(":")[2], chosen, f"{ratio:.2f}", verdict])
        print(*rows[-1], sep="  ", flush=True)
        values = {
            "DataLoader": middle["plain:0"],
            f"DataLoader, its best ({best[6:]} worker{'s' * (best[6:] != '1')})": middle[best],
        }
        bars.append(Bars(f"Input, {KINDS[kind]}", "rows/s", {**values, "instep": middle["instep"]}, better="more"))
    header = [
        "rows a second",
        "DataLoader",
        "its best",
        "instep",
        "best workers",
        "instep chose",
        "instep / best",
        "≥ 1",
    ]
    lines = [*table(header, rows), "", f"Medians of {args.rounds} runs each, on {args.device}."]
    name = "input" if args.device == "cpu" else "input_gpu"
    write_result("input", "Input: rows a second", lines, sys.argv[1:], name, bars)


def measure(way, kind, args):
    words = [sys.executable, HERE / "input_process.py", way, kind, args.seconds, args.device]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{way}, {kind}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
