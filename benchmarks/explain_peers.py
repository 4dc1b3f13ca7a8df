"""What TraceML, Lightning's simple profiler and torch.profiler say of planted bottlenecks, and what they cost.

python benchmarks/explain_peers.py [--only NAME,…] [--tools NAME,…] [--runs FOLDER] [--at-once N] [--rounds N] [--list]

The plants are those of explain_campaign.py, in a plain loop with DDP (explain_variants/plain.py) and in a
LightningModule (explain_variants/with_lightning.py), for a piece of some seconds. `instep run` launches the plain loop,
as it is without any tool, and `instep explain` reads its log. How a summary is judged: explain_variants/judge.py.
"""

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from explain_campaign import PLANTS, folder_of
from explain_variants import judge
from explain_variants.report import TOOLS, report, report_costs
from machine import BIN, HERE, write_result

VARIANTS = HERE / "explain_variants"
LIMIT_S = 240
STEPS = 40
NUM_STEPS = {
    "a batch of 2 for a deep small net": 300,
    "an evaluation every 5 steps": 25,
    "Python in the loss": 25,
    "tiny batch": 100,
}
"""A short piece: fewer steps than in explain_campaign.py."""
STARTUP_S = 12
CHOSEN = (
    "dataset sleeps",
    "dataset sleeps on rank 1",
    "rank 1 computes longer",
    "a checkpoint every step",
    "an evaluation every 5 steps",
    "on_step sleeps, 2 ranks",
    "the loss sleeps",
    "much to send, gloo",
    "slow train_data()",
    "one thread of two cores",
    "healthy: conv, 2 ranks",
    "rank 0 sleeps in backward",
    "backward sleeps",
    "tiny batch",
    "collate sleeps on rank 0",
    "two other programs compute",
    "Python in the loss",
    "metrics sleep",
    "uneven batch",
    "rank 1 sleeps in forward",
    "dataset computes",
    "one reader for a slow disk",
    "healthy: conv",
    "stop() sleeps, 2 ranks",
    "compiled for a few steps",
    "on_step sleeps",
    "rank 0 computes longer",
    "a batch of 2 for a deep small net",
    "the loss sleeps, 2 ranks",
    "slow model(), 2 ranks",
    "collate sleeps",
    "dataset sleeps, 2 ranks",
    "a checkpoint every step, 2 ranks",
)
"""The most telling ones first: a campaign that is ended early is still of use."""
COST_STEPS = 120
COST_WARM_UP = 25
"""The steps in which torch.profiler waits, warms up and records; see explain_variants/plain.py."""
COST_WORDS = "--threads 1"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of plants, separated by commas")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--runs", help="keep the runs here; those that are there already are only read again")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time, for what is said; not for costs")
    parser.add_argument("--rounds", type=int, default=3, help="turns for the costs; 0: don't measure them")
    parser.add_argument("--finished", action="store_true", help="report only what --runs has")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    plants = {plant.name: plant for plant in PLANTS}
    chosen = [plants[name] for name in CHOSEN if not args.only or name in args.only.split(",")]
    if args.list:
        print("\n".join(plant.name for plant in chosen))
        return
    with tempfile.TemporaryDirectory() as scratch:
        runs = Path(args.runs or scratch).absolute()
        jobs = [(plant, tool, folder_of(plant, runs) / tool) for plant in chosen for tool in args.tools.split(",")]
        if not args.finished:
            with ThreadPoolExecutor(args.at_once) as pool:
                list(pool.map(lambda job: run(*job), jobs))
        readings = {
            (plant, tool): judge.READERS[tool](folder, plant)
            for plant, tool, folder in jobs
            if (folder / "done").exists()
        }
        costs = measure_costs(runs / "costs", args.rounds) if args.rounds else []
    if not args.only:
        title = "What other tools say of planted bottlenecks, and what they cost"
        piece = f"{STEPS} steps, or {min(NUM_STEPS.values())} to {max(NUM_STEPS.values())} where they are long or short"
        lines = [*report(chosen, readings, piece), *report_costs(costs, COST_STEPS)]
        write_result("explain_peers", title, lines, shown(sys.argv[1:]))


def shown(argv):
    """Leave out of the command what names a folder of this machine."""
    hidden = {argv.index("--runs"), argv.index("--runs") + 1} if "--runs" in argv else set()
    return [word for i, word in enumerate(argv) if i not in hidden]


def options_of(plant):
    """Return the number of processes and the options for a variant, from those for `instep train`."""
    words, processes = plant.words.split(), 1
    if "-n" in words:
        at = words.index("-n")
        processes = int(words[at + 1])
        del words[at : at + 2]
    if plant.cause == "startup":
        words = [f"seconds={STARTUP_S}" if word.startswith("seconds=") else word for word in words]
    steps = NUM_STEPS.get(plant.name, STEPS)
    return processes, ["--steps", str(steps), *words]


def command_of(tool, folder, processes, words):
    """Return the command line of a variant under a tool. `plain` and `plain_lightning`: without any."""
    n, torchrun = str(processes), [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    plain, module = str(VARIANTS / "plain.py"), str(VARIANTS / "with_lightning.py")
    if tool == "traceml":
        ports = ["--master-port", str(free_port()), "--aggregator-port", str(free_port())]
        logs = ["--logs-dir", str(folder / "logs"), "--run-name", "run"]
        command = [str(BIN / "traceml"), "run", plain, "--nproc-per-node", n, *ports, *logs, "--args"]
        return [*command, str(folder), "traceml", *words]
    if tool == "instep":
        launched = [str(BIN / "instep"), "run", "-n", n, "--log-dir", str(folder / "log"), plain]
        return [*launched, str(folder), "none", *words]
    script, name = {
        "lightning": (module, "simple"),
        "torch": (plain, "torch"),
        "plain": (plain, "none"),
        "plain_lightning": (module, "none"),
    }[tool]
    return [*torchrun, "--nproc-per-node", n, script, str(folder), name, *words]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(plant, tool, folder):
    """Run one variant under one tool, unless it has been run."""
    if (folder / "done").exists():
        return
    processes, words = options_of(plant)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(plant.hogs)]
    try:
        launch(tool, folder, processes, words)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    print(f"{plant.name}: {tool}", flush=True)


def launch(tool, folder, processes, words):
    folder.mkdir(parents=True, exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = command_of(tool, folder, processes, words)
    output_file = folder / "output.txt"
    with output_file.open("w") as output:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        print(f"FAILED: {' '.join(command)}\n{output_file.read_text()[-1500:]}", flush=True)
        return
    if tool == "instep":
        explain = [str(BIN / "instep"), "explain", str(folder / "log"), "--json"]
        explained = subprocess.run(explain, capture_output=True, text=True, timeout=LIMIT_S)
        (folder / "explain.json").write_text(explained.stdout.splitlines()[-1])
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    (folder / "done").touch()


def measure_costs(folder, rounds):
    """Return a row for each tool: its step's time by that of its baseline, and the CPU time that it adds."""
    baselines = {"traceml": "plain", "torch": "plain", "instep": "plain", "lightning": "plain_lightning"}
    ways = ["plain", "traceml", "torch", "instep", "plain again", "plain_lightning", "lightning"]
    turns = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways:
            turn = folder / f"{number}-{way.replace(' ', '-')}"
            if not (turn / "steps.json").exists():
                launch(way.split()[0], turn, 1, ["--steps", str(COST_STEPS), *COST_WORDS.split()])
            turns[way].append(step_ms(turn, way))
            print(f"turn {number}, {way}: {turns[way][-1]}", flush=True)
    rows = []
    for way, base in {**baselines, "plain again": "plain"}.items():
        pairs = list(zip(turns[way], turns[base], strict=True))
        ratios = [above[0] / below[0] for above, below in pairs]
        added = [above[1] - below[1] for above, below in pairs]
        ms, cpu_ms = (statistics.median(turn[i] for turn in turns[base]) for i in (0, 1))
        cells = [f"{ms:.1f}", f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        cells += [f"{cpu_ms:.2f}", f"{statistics.median(added):+.2f}", f"{min(added):+.2f} to {max(added):+.2f}"]
        rows.append([TOOLS.get(way, "the plain loop again"), *cells])
    return rows


def step_ms(folder, way):
    """Return the median time of the steps, and their mean CPU time; of torch.profiler, those that it records."""
    ends = json.loads((folder / "steps.json").read_text())
    steps = ends[7:22] if way == "torch" else ends[COST_WARM_UP:]
    wall = statistics.median(1000 * (b[0] - a[0]) for a, b in itertools.pairwise(steps))
    return wall, 1000 * (steps[-1][1] - steps[0][1]) / (len(steps) - 1)


if __name__ == "__main__":
    main()
