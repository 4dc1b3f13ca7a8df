"""Two machines joined by a slow link: instep against torch's DDP at its best bucket size, in turns.

sudo python benchmarks/network.py --links 1gbit 200mbit

Two network namespaces, one rank of one thread in each; `tc` limits what each may send. All ways to train are started,
and take turns of some seconds. "alone" computes the same and communicates nothing, so no step can be faster than that,
nor than the gradients' way over the link.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from machine import HERE, Bars, table, write_result
from scaling_task import Scaling
from turns import take_turns, within

RATES = {"200mbit": 25e6, "1gbit": 125e6, "10gbit": 1250e6}
ROWS = {"conv": (8, 128), "transformer": (2, 16)}
BUCKETS_MB = (25, 5, 1)
MOST_OF_DDP, MOST_OF_BOUND, MOST_OF_EXACT = 0.9, 1.1, 1.25


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", choices=RATES, default=["1gbit", "200mbit"])
    parser.add_argument("--kinds", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--rows", nargs="+", type=int, help="a rank's rows, instead of a small and a large number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of the slowest way, in a turn")
    args = parser.parse_args()
    rows, bars = [], []
    for link in args.links:
        for kind in args.kinds:
            for count in args.rows or ROWS[kind]:
                times = measure(link, kind, count, args.rounds, args.steps)
                rows.append(row_of(link, kind, count, times))
                bars.append(bars_of(link, kind, count, times))
                print(*rows[-1], sep="  ", flush=True)
    header = [
        *("link", "model", "rows a rank", "alone, ms", "link, ms", "best DDP, ms", "its bucket, MB", "instep, ms"),
        *("/ DDP", "/ max(alone, link)", "exact, ms", "exact / instep"),
    ]
    lines = [
        *table(header, rows),
        "",
        "Medians over the turns of a turn's mean step. \"link\": the gradients' bytes at the link's rate. Goals: "
        f"{MOST_OF_DDP} of DDP, {MOST_OF_BOUND} of the larger of alone and link, exact {MOST_OF_EXACT} of instep.",
    ]
    write_result("network", "Two machines joined by a slow link", lines, sys.argv[1:], bars=bars)


def bars_of(link, kind, rows, times):
    middle = {way: statistics.median(of_way) for way, of_way in times.items()}
    best = min((f"ddp:{size}" for size in BUCKETS_MB), key=middle.get)
    named = {
        "torch DDP, best bucket size": best,
        "instep": "instep",
        "instep, exact": "instep exact",
        "no exchange": "alone",
    }
    values = {name: middle[way] for name, way in named.items()}
    return Bars(f"Two nodes over {link}: {kind}, {rows} rows a rank, time per step", "ms", values)


def row_of(link, kind, rows, times):
    """Compare the ways; ratios are taken turn by turn."""
    num_bytes = 4 * sum(p.numel() for p in Scaling(kind=kind).model().parameters())
    wire = 1000 * num_bytes / RATES[link]
    middle = {way: statistics.median(of_way) for way, of_way in times.items()}
    bucket = min(BUCKETS_MB, key=lambda size: middle[f"ddp:{size}"])
    best = f"ddp:{bucket}"
    by_turn = statistics.median(a / b for a, b in zip(times["instep"], times[best], strict=True))
    bounds = [max(alone, wire) for alone in times["alone"]]
    of_bound = statistics.median(a / b for a, b in zip(times["instep"], bounds, strict=True))
    of_exact = statistics.median(a / b for a, b in zip(times["instep exact"], times["instep"], strict=True))
    shown = [middle["alone"], wire, middle[best], bucket, middle["instep"]]
    ratios = [f"{by_turn:.2f}", f"{of_bound:.2f}", f"{middle['instep exact']:.0f}", f"{of_exact:.2f}"]
    return [link, kind, rows, *(f"{value:.0f}" for value in shown), *ratios]


def measure(link, kind, rows, rounds, steps):
    """Return each way's mean ms a step, by turn."""
    ways = ["alone", *(f"ddp:{size}" for size in BUCKETS_MB), "instep", "instep exact"]
    with tempfile.TemporaryDirectory() as folder, two_hosts(link) as hosts:
        pids, files, jobs = {}, {}, []
        try:
            for number, way in enumerate(ways):
                files[way] = [Path(folder) / f"{number}-{rank}" for rank in range(2)]
                started = [start(hosts, rank, way, kind, rows, files[way][rank], 29500 + number) for rank in range(2)]
                jobs += started
                wait_for_steps(files[way], started, 3)
                pids[way] = [job.pid for job in started]
                stop(pids[way])
            slowest = max(mean_step(ends_of(files[way][0])[1:]) for way in ways)
            turns = take_turns(pids, rounds, max(2.0, steps * slowest))
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        return {way: [mean_ms(files[way], turn) for turn in turns[way]] for way in ways}


def start(hosts, rank, way, kind, rows, path, port):
    ours = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    link = {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "veth0"}
    environment = {**os.environ, **ours, **link, "PYTHONPATH": str(HERE)}
    core = sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]
    command = ["ip", "netns", "exec", hosts[rank], "taskset", "-c", str(core), sys.executable]
    command += [str(HERE / "network_rank.py"), way, kind, str(rows), str(path)]
    log = path.with_suffix(".log").open("w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def wait_for_steps(files, jobs, count):
    deadline = time.monotonic() + 180
    while any(len(ends_of(file)) < count for file in files):
        for job, file in zip(jobs, files, strict=True):
            if job.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{job.args} has not come to step {count}:\n{file.with_suffix('.log').read_text()}")
        time.sleep(0.05)


def stop(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def ends_of(file):
    return [float(line) for line in file.read_text().splitlines()[1:] if line] if file.exists() else []


def mean_step(ends):
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def mean_ms(files, turn):
    """Return the mean of a turn's steps; of its first one, in which the ranks were woken up, nothing is known."""
    return statistics.fmean(statistics.fmean(within(ends_of(file), turn)[1:]) for file in files)


@contextmanager
def two_hosts(link):
    """Make two network namespaces on one cable; each sends at most at the link's rate."""
    hosts = [f"bench{os.getpid()}h{number}" for number in (1, 2)]
    try:
        for host in hosts:
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
        ip("link", "add", "veth0", "netns", hosts[0], "type", "veth", "peer", "name", "veth0", "netns", hosts[1])
        for number, host in enumerate(hosts, 1):
            ip("-n", host, "addr", "add", f"10.78.0.{number}/24", "dev", "veth0")
            ip("-n", host, "link", "set", "veth0", "up")
            shape = ["tc", "qdisc", "add", "dev", "veth0", "root", "tbf", "rate", link, "burst", "256kb"]
            subprocess.run(["ip", "netns", "exec", host, *shape, "latency", "100ms"], check=True)
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], check=False, stderr=subprocess.DEVNULL)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
