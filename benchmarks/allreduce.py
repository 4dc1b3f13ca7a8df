"""all_reduce of float32 on CPU: the fast lane against gloo, and against the memory's own speed; side by side.

python benchmarks/allreduce.py

Every rank times the operations in turns, in the same processes; the slowest rank's time of each round counts, and
the median over rounds is shown. "copy" is one copy of the tensor by every rank at once: to read its own numbers
once and to write the sums once is what no all_reduce can do without.
"""

import argparse
import json
import statistics
import subprocess
import sys

from machine import BIN, HERE, ROOT, table, write_result

SIZES = {"4 KB": (4 * 2**10, 400), "64 KB": (2**16, 200), "1 MB": (2**20, 100), "25 MB": (25 * 2**20, 15)}
SIZES["100 MB"] = (100 * 2**20, 5)
GOALS = {2: {"4 KB": 4, "1 MB": 3, "25 MB": 2.5, "100 MB": 2.5}, 4: {"4 KB": 2, "1 MB": 2, "25 MB": 2, "100 MB": 2}}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="fresh sets of processes")
    args = parser.parse_args()
    times = {n: [] for n in args.processes}
    for repeat in range(args.repeats):
        for n in args.processes:
            times[n].append(measure(n))
            print(f"{repeat + 1}/{args.repeats}  {n} processes  {json.dumps(times[n][-1])}", flush=True)
    lines = [line for n in args.processes for line in summary(n, times[n])]
    write_result("allreduce", "all_reduce: shared memory against gloo", lines, sys.argv[1:])


def measure(n):
    """Return {size: {way: ms}} of one set of processes."""
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", n, HERE / "allreduce_ranks.py", json.dumps(SIZES)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"the ranks ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(n, runs):
    rows = []
    for size in SIZES:
        gloo, lane, copy = (statistics.median(run[size][way] for run in runs) for way in ("gloo", "lane", "copy"))
        faster = statistics.median(run[size]["gloo"] / run[size]["lane"] for run in runs)
        spread = sorted(run[size]["gloo"] / run[size]["lane"] for run in runs)
        goal = GOALS.get(n, {}).get(size)
        verdict = "" if goal is None else f">= {goal}: {'reached' if faster >= goal else 'missed'}"
        shown = f"{faster:.1f} ({spread[0]:.1f}–{spread[-1]:.1f})"
        rows.append([size, f"{gloo:.3f}", f"{lane:.3f}", shown, verdict, f"{copy:.3f}", f"{lane / copy:.1f}"])
    return [
        f"## {n} processes, medians of {len(runs)} sets of processes",
        "",
        *table(["tensor", "gloo, ms", "lane, ms", "gloo / lane", "goal", "copy, ms", "lane / copy"], rows),
        "",
    ]


if __name__ == "__main__":
    main()
