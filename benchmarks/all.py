"""Every benchmark, one after the other, and the page of them all: what `make bench` runs.

python benchmarks/all.py [--quick] [NAME ...]

What needs a GPU runs where there is one, what needs root (network namespaces) as root; the rest is said to be left out.
"""

import argparse
import os
import subprocess
import sys
import time

import torch
from machine import HERE, ROOT

ON_CPU = {
    "mnist_speed": ("--repeats", "1", "--epochs", "2"),
    "accelerate_examples": ("--repeats", "2"),
    "overhead": (),
    "scaling": ("--rounds", "4"),
    "input": ("--rounds", "2", "--seconds", "4"),
    "network": ("--links", "1gbit", "10gbit", "--rounds", "2"),
    "checkpoint_stall": (),
    "recovery": ("--kills", "4"),
    "startup": ("--repeats", "3"),
    "order": (),
    "exact_cost": ("--rounds", "3"),
    "allreduce": ("--repeats", "1"),
}
BY_NAME = {"statistics_fit": (), "check_cost": (), "tune_search": (), "explain_peers": (), "data_sources": ()}
"""Not on the page: they run only if they are named."""
ON_GPU = {"gpt2_speed": (), "resnet_speed": (), "peak_memory": (), "input": ("--device", "cuda")}
QUICK = {
    "mnist_speed": ("--repeats", "1", "--epochs", "2", "--processes", "2"),
    "input": ("--rounds", "1", "--seconds", "3"),
    "checkpoint_stall": ("--rounds", "2"),
    "recovery": ("--kills", "1"),
    "startup": ("--repeats", "1", "--split-repeats", "1"),
    "scaling": ("--rounds", "1"),
    "check_cost": ("--rounds", "1", "--steps", "30"),
    "exact_cost": ("--rounds", "1"),
    "network": ("--links", "1gbit", "--rounds", "1"),
    "accelerate_examples": ("--repeats", "1"),
    "tune_search": ("--rounds", "1", "--trials", "2", "--epochs", "2"),
    "explain_peers": ("--only", "dataset sleeps", "--rounds", "1"),
}
ON_MNIST = ("mnist_speed", "tune_search")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"of {', '.join(ON_CPU)} (these are run unless names are given), {', '.join(BY_NAME)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--mnist", default="../shared/data/mnist", help="folder of MNIST's four idx files, gzipped")
    parser.add_argument("--quick", action="store_true", help="a try of each: the numbers say nothing")
    args = parser.parse_args()
    jobs = ON_GPU if torch.cuda.is_available() else ON_CPU
    if args.names:
        jobs = {**jobs, **BY_NAME}
    if unknown := set(args.names) - set(jobs):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}. There are: {', '.join(jobs)}.")
    left_out, failed = [], []
    for name, words in jobs.items():
        if args.names and name not in args.names:
            continue
        if name == "network" and os.geteuid():
            left_out.append("network: run as root, it makes network namespaces")
            continue
        if name in ON_MNIST and not (ROOT / args.mnist).is_dir():
            left_out.append(f"{name}: there is no {args.mnist}; give --mnist FOLDER with MNIST's files")
            continue
        words = QUICK.get(name, ()) if args.quick else words
        if name in ON_MNIST:
            words = ("--root", args.mnist, *words)
        begun = time.monotonic()
        print(f"== {name} {' '.join(words)}", flush=True)
        code = subprocess.run([sys.executable, HERE / f"{name}.py", *words], cwd=ROOT).returncode
        if code:  # the others are worth their minutes all the same
            failed.append(name)
        print(f"== {name}: {time.monotonic() - begun:.0f} s{f', failed with {code}' if code else ''}", flush=True)
    subprocess.run([sys.executable, HERE / "page.py"], cwd=ROOT, check=True)
    print("\n".join(f"left out: {each}" for each in left_out))
    if failed:
        sys.exit(f"failed, so the page has their earlier results: {', '.join(failed)}")


if __name__ == "__main__":
    main()
