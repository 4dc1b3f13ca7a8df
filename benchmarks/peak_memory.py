"""Peak memory of each rank: GPT-2 small under instep's ddp and fsdp, and under torch's own DDP and FSDP2, all compiled.

python benchmarks/peak_memory.py [--worlds 1 2]

bf16, context 1024, a global batch of 32. All ranks are on one GPU, where NCCL works between processes that claim to be
on hosts of their own. The number is what torch's allocator held at most on a rank, the largest of all ranks.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import BIN, HERE, table, write_result

VARIANTS = HERE / "gpt2_variants"
BATCH = 32
GOALS = {"ddp": 0.95, "fsdp": 1.0}
NAMES = {"ddp": "DDP", "fsdp": "FSDP2"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    gib = {}
    for how in GOALS:
        keys = [(how, size, by) for size in args.worlds for by in ("torch", "instep")]
        with ThreadPoolExecutor(len(keys)) as threads:  # memory does not depend on who else computes
            runs = {key: threads.submit(measure, *key, args.steps) for key in keys}
            gib |= {key: run.result() for key, run in runs.items()}
        print(gib, flush=True)
    rows = []
    for size in args.worlds:
        for how, goal in GOALS.items():
            torchs, insteps = gib[how, size, "torch"], gib[how, size, "instep"]
            ratio = insteps / torchs
            verdict = "reached" if ratio <= goal else "missed"
            rows.append([f"{how}, {size}", f"{torchs:.2f}", f"{insteps:.2f}", f"{ratio:.3f}", f"≤ {goal}", verdict])
    header = ["strategy, ranks", "torch's own, GiB", "instep, GiB", "instep / torch", "goal", ""]
    write_result("peak_memory", "Peak memory of a rank, GPT-2 small", table(header, rows), sys.argv[1:])


def measure(how, size, by, steps):
    with tempfile.TemporaryDirectory() as folder:
        make = torch_rank if by == "torch" else instep_rank
        outputs = run_ranks(f"{by} {how}", size, lambda *place: make(how, size, *place, steps, Path(folder)))
        if by == "torch":
            return max(json.loads(out.splitlines()[-1])["gib"] for out in outputs)
        return peak_in(Path(folder))


def run_ranks(name, size, start_rank):
    """Run `start_rank(rank, port)` for all ranks at the same time; return what they printed."""
    port = free_port()
    ranks = [start_rank(rank, port) for rank in range(size)]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{name} on {size}:\n" + "\n".join(err[-3000:] for _, err in outputs))
    return [out for out, _ in outputs]


def peak_in(folder):
    """Return the largest peak that ranks of instep have noted, in GiB."""
    return max(json.loads(path.read_text()) for path in folder.glob("peak-*"))


def torch_rank(how, size, rank, port, steps, _folder):
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, VARIANTS / "distributed.py", how, BATCH, steps]
    return start(command, rank, {name: str(value) for name, value in place.items()})


def instep_rank(how, size, rank, port, steps, folder, compiles="--compile"):
    command = [BIN / "instep", "train", VARIANTS / "task.py", "--batch-size", BATCH, "--steps", steps]
    command += ["--run-dir", folder / "run", "--save-every", "never", "-n", 1, "--strategy", how, compiles]
    if size > 1:
        command += ["--nnodes", size, "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
    return start(command, rank, {"PEAK_MEMORY": str(folder)})


def start(command, rank, variables):
    """Start a rank, or its launcher, on a host of its own in NCCL's eyes."""
    disabled = {f"NCCL_{way}_DISABLE": "1" for way in ("P2P", "SHM", "IB")}
    hosts = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", **disabled}
    env = {**os.environ, **hosts, **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), env=env, cwd=VARIANTS, **pipes)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    main()
