"""Plant bottlenecks and see whether `instep explain` names them first; train healthy runs and see that it names none.

python benchmarks/explain_campaign.py [--held-out | --gpu] [--only NAME …] [--list] [--runs FOLDER] [--try]

Each run is a short training of explain_task.py on 1 or 2 processes. A verdict is right when it names the planted cause
(and the rank, where it was planted on one) before all others. Where the machine is busy with other work, the verdict
says that first, rightly: the table has the share of the time for which the ranks waited for a core, and judges the
causes after it. The rules were adjusted on PLANTS. --held-out trains the runs of HELD_OUT instead, on which no rule may
be adjusted; one that a rule was changed for moves to PLANTS. --gpu trains those of ON_GPU. With --try, the advice for
TRIED is trained as `instep explain --try` does, and its gain is measured.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import BIN, HERE, table, write_result

TASK = HERE / "explain_task.py"
LIMIT_S = 400
ANY = "any"


@dataclass(frozen=True)
class Plant:
    """One run: what is given to `instep train`, and what the verdict should be."""

    name: str
    cause: str
    words: str
    rank: int | str | None = None
    steps: int = 60
    hogs: int = 0
    """Programs that compute beside it."""
    link: str = ""
    """Two nodes, network namespaces on this machine, with a link of this rate (root only)."""

    @property
    def command(self):
        words = ["--steps", str(self.steps), "--quiet", "--threads", "1", "--batch-size", "32", *self.words.split()]
        return [str(BIN / "instep"), "train", str(TASK), *words]


CONV = "width=48 depth=4"
"""About 100 ms of computing per step on one core."""
READS = "--data-workers 0"
PLANTS = (
    Plant("dataset sleeps", "input", f"plant=sample_sleep seconds=0.004 {READS}"),
    Plant("dataset sleeps, 2 ranks", "input", f"-n 2 plant=sample_sleep seconds=0.004 {READS}"),
    Plant("dataset sleeps on rank 1", "input", f"-n 2 plant=sample_sleep seconds=0.004 rank=1 {READS}", 1),
    Plant("dataset sleeps on rank 0", "input", f"-n 2 plant=sample_sleep seconds=0.004 rank=0 {READS}", 0),
    Plant("dataset computes", "input", f"plant=sample_work seconds=0.004 {READS}"),
    Plant("dataset computes, 2 ranks", "input", f"-n 2 plant=sample_work seconds=0.004 {READS}"),
    Plant("dataset computes on rank 1", "input", f"-n 2 plant=sample_work seconds=0.006 rank=1 {READS}", 1),
    Plant("one reader for a slow disk", "input", "plant=sample_sleep seconds=0.006 --data-workers 1"),
    Plant("one reader, 2 ranks", "input", "-n 2 plant=sample_sleep seconds=0.012 --data-workers 1"),
    Plant("collate sleeps", "input", f"plant=collate_sleep seconds=0.1 {READS}"),
    Plant("collate sleeps on rank 0", "input", f"-n 2 plant=collate_sleep seconds=0.1 rank=0 {READS}", 0),
    Plant("rank 1 computes longer", "straggler", "-n 2 plant=loss_work seconds=0.1 rank=1", 1),
    Plant("rank 0 computes longer", "straggler", "-n 2 plant=loss_work seconds=0.1 rank=0", 0),
    Plant("rank 1 sleeps in forward", "straggler", "-n 2 plant=loss_sleep seconds=0.1 rank=1", 1),
    Plant("rank 0 sleeps in backward", "straggler", "-n 2 plant=backward_sleep seconds=0.1 rank=0", 0),
    Plant("uneven batch", "straggler", f"-n 2 {CONV} pixels=32 --batch-size 3", 1, 120),
    Plant("a checkpoint every step", "checkpoint", "net=mlp width=1500 depth=3 --save-every 1"),
    Plant("a checkpoint every step, 2 ranks", "checkpoint", "-n 2 net=mlp width=1500 depth=3 --save-every 1", ANY),
    Plant("an evaluation every 5 steps", "evaluation", f"{CONV} eval_samples=512 --eval-every 5", None, 30),
    Plant(
        "an evaluation every 5 steps, 2 ranks", "evaluation", f"-n 2 {CONV} eval_samples=512 --eval-every 5", None, 30
    ),
    Plant("metrics sleep", "evaluation", "plant=metric_sleep seconds=0.5 --eval-every 10", None, 100),
    Plant("one long evaluation at the end", "evaluation", f"{CONV} eval_samples=3000 --eval-every never", None, 30),
    Plant("tiny batch", "host", f"net=mlp width=1400 depth=3 --batch-size 1 {READS}", None, 800),
    Plant("Python in the loss", "host", "plant=loss_work seconds=0.3", None, 90),
    Plant("a batch of 2 for a deep small net", "host", "net=mlp width=16 depth=60 --batch-size 2", None, 3000),
    Plant("on_step sleeps", "host", "plant=hook_sleep seconds=0.1"),
    Plant("on_step computes", "host", "plant=hook_work seconds=0.1"),
    Plant("on_step sleeps, 2 ranks", "host", "-n 2 plant=hook_sleep seconds=0.1", 0),
    Plant("stop() sleeps, 2 ranks", "host", "-n 2 plant=stop_sleep seconds=0.1", 0),
    Plant("the loss sleeps", "host", "plant=loss_sleep seconds=0.1"),
    Plant("the loss sleeps, 2 ranks", "host", "-n 2 plant=loss_sleep seconds=0.1"),
    Plant("backward sleeps", "host", "plant=backward_sleep seconds=0.1"),
    Plant("two other programs compute", "host", f"-n 2 {CONV}", None, 40, hogs=2),
    Plant("one other program computes", "host", f"-n 2 {CONV}", ANY, 40, hogs=1),
    Plant("one thread of two cores", "compute", f"{CONV} pixels=32 --threads 1", None, 20),
    Plant("slow train_data()", "startup", "plant=slow_data seconds=30"),
    Plant("slow model(), 2 ranks", "startup", "-n 2 plant=slow_model seconds=30"),
    Plant("compiled for a few steps", "startup", "--compile", None, 20),
    Plant("compiled again for each shape", "startup", "plant=shapes --compile", None, 40),
    Plant("much to send, gloo", "communication", "-n 2 net=mlp width=2000 depth=3 --comm gloo --batch-size 2"),
    Plant(
        "much to send, shared memory",
        "communication",
        f"-n 2 net=mlp width=2000 depth=2 --batch-size 2 {READS}",
        None,
        80,
    ),
    Plant("a link of 200 Mbit/s", "communication", "net=mlp width=500 depth=2 --comm gloo", link="200mbit"),
    Plant(
        "a link of 1 Gbit/s, much to send",
        "communication",
        "net=mlp width=2000 depth=3 --comm gloo",
        None,
        30,
        link="1gbit",
    ),
    Plant("healthy: conv", "nothing", f"{CONV} --threads 2", None, 60),
    Plant("healthy: conv, 2 ranks", "nothing", f"-n 2 {CONV}", None, 100),
    Plant("healthy: conv, exact", "nothing", f"{CONV} --exact --shards 4", None, 60),
    Plant("healthy: conv, exact, 2 ranks", "nothing", f"-n 2 {CONV} --exact --shards 4", None, 60),
    Plant("healthy: conv, fsdp", "nothing", f"-n 2 {CONV} --strategy fsdp", None, 60),
    Plant("healthy: conv, readers", "nothing", f"{CONV} --data-workers 1 --threads 2", None, 60),
    Plant(
        "healthy: transformer", "nothing", "net=transformer width=256 depth=4 --batch-size 128 --threads 2", None, 40
    ),
    Plant(
        "healthy: transformer, 2 ranks", "nothing", "-n 2 net=transformer width=256 depth=4 --batch-size 256", None, 40
    ),
    Plant(
        "healthy: wide mlp, large batch",
        "nothing",
        "net=mlp width=1000 depth=3 --batch-size 1024 --threads 2",
        None,
        20,
    ),
    Plant("healthy: saves and evaluates", "nothing", f"{CONV} --save-every 30s --eval-every 30 --threads 2", None, 90),
)

HELD_OUT = (
    Plant("collate sleeps, 2 ranks", "input", f"-n 2 net=mlp width=300 plant=collate_sleep seconds=0.06 {READS}"),
    Plant(
        "dataset computes, transformer", "input", f"net=transformer width=64 plant=sample_work seconds=0.006 {READS}"
    ),
    Plant("one reader, slow on rank 1", "input", "-n 2 plant=sample_sleep seconds=0.01 rank=1 --data-workers 1", 1),
    Plant(
        "rank 1 sleeps in backward", "straggler", "-n 2 net=mlp width=200 plant=backward_sleep seconds=0.08 rank=1", 1
    ),
    Plant(
        "rank 0 sleeps in forward", "straggler", "-n 2 net=transformer width=64 plant=loss_sleep seconds=0.15 rank=0", 0
    ),
    Plant("a checkpoint every 2 steps, SGD", "checkpoint", "net=mlp width=2000 depth=3 sgd=true --save-every 2"),
    Plant(
        "metrics sleep, 2 ranks", "evaluation", "-n 2 net=mlp width=200 plant=metric_sleep seconds=0.3 --eval-every 10"
    ),
    Plant("a batch of 2, 2 ranks", "host", f"-n 2 net=mlp width=24 depth=50 --batch-size 2 {READS}", None, 2000),
    Plant("on_step computes, 2 ranks", "host", "-n 2 net=mlp width=200 plant=hook_work seconds=0.08", 0),
    Plant("stop() sleeps", "host", "net=mlp width=200 plant=stop_sleep seconds=0.08"),
    Plant("Python in the loss, 2 ranks", "host", "-n 2 net=mlp width=200 plant=loss_work seconds=0.2", None, 60),
    Plant("backward sleeps, 2 ranks", "host", "-n 2 net=mlp width=200 plant=backward_sleep seconds=0.08"),
    Plant("slow train_data(), 2 ranks", "startup", "-n 2 plant=slow_data seconds=25"),
    Plant("compiled for a few steps, transformer", "startup", "net=transformer width=32 --compile", None, 20),
    Plant(
        "much to send, SGD",
        "communication",
        f"-n 2 net=mlp width=2500 depth=2 sgd=true --batch-size 2 {READS}",
        None,
        80,
    ),
    Plant(
        "much to send, SGD, gloo",
        "communication",
        "-n 2 net=mlp width=2500 depth=2 sgd=true --comm gloo --batch-size 2",
    ),
    Plant(
        "a link of 100 Mbit/s, transformer", "communication", "net=transformer width=128 --comm gloo", link="100mbit"
    ),
    Plant("healthy: conv, SGD", "nothing", f"{CONV} sgd=true --threads 2", None, 60),
    Plant(
        "healthy: mlp, large batch, 2 ranks", "nothing", "-n 2 net=mlp width=800 depth=3 --batch-size 1024", None, 30
    ),
    Plant(
        "healthy: transformer, exact", "nothing", "net=transformer width=192 depth=4 --batch-size 128 --exact", None, 30
    ),
)
"""What no rule was adjusted on."""

BUSY = "width=256 depth=8 pixels=64 --batch-size 128"
"""About 0.1 s of computing per step on a large GPU."""
ON_GPU = (
    Plant("dataset sleeps", "input", f"plant=sample_sleep seconds=0.004 {READS} --no-compile"),
    Plant(
        "dataset computes, rank 1 of 2", "input", f"-n 2 plant=sample_work seconds=0.006 rank=1 {READS} --no-compile", 1
    ),
    Plant("one reader for a slow disk", "input", "plant=sample_sleep seconds=0.006 --data-workers 1"),
    Plant("waits for the GPU in the loss", "host", "net=mlp width=256 plant=loss_sync", None, 400),
    Plant("Python in the loss", "host", "plant=loss_work seconds=0.1"),
    Plant("a batch of 2 for a deep small net", "host", "net=mlp width=16 depth=60 --batch-size 2", None, 1500),
    Plant("on_step sleeps", "host", f"{BUSY} plant=hook_sleep seconds=0.3", None, 40),
    Plant("rank 1 of 2 sleeps in forward", "straggler", "-n 2 plant=loss_sleep seconds=0.1 rank=1", 1),
    Plant("rank 0 of 2 computes longer", "straggler", "-n 2 plant=loss_work seconds=0.1 rank=0", 0),
    Plant("a checkpoint every step", "checkpoint", "net=mlp width=4000 depth=4 --save-every 1", None, 20),
    Plant("an evaluation every 5 steps", "evaluation", f"{BUSY} eval_samples=2048 --eval-every 5", None, 30),
    Plant("metrics sleep", "evaluation", "plant=metric_sleep seconds=0.3 --eval-every 10", None, 100),
    Plant("slow train_data()", "startup", "plant=slow_data seconds=20"),
    Plant("compiled again for each shape", "startup", "plant=shapes --compile", None, 30),
    Plant("much to send, gloo", "communication", "-n 2 net=mlp width=4000 depth=3 --batch-size 2", None, 30),
    Plant("healthy: conv", "nothing", BUSY, None, 150),
    Plant("healthy: conv, bf16", "nothing", f"{BUSY} --precision bf16", None, 250),
    Plant("healthy: wide mlp, SGD", "nothing", "net=mlp width=12000 depth=6 sgd=true --batch-size 1024", None, 150),
)
"""On one GPU, which two ranks share."""

TRIED = (
    "dataset sleeps",
    "dataset sleeps, 2 ranks",
    "dataset computes",
    "one reader for a slow disk",
    "a checkpoint every step",
    "an evaluation every 5 steps",
    "metrics sleep",
    "tiny batch",
    "compiled for a few steps",
    "much to send, gloo",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], help="names of runs")
    parser.add_argument("--runs", help="keep the runs here; those that are there already are only explained again")
    parser.add_argument("--try", dest="tries", action="store_true", help="also try the advice for some of them")
    parser.add_argument("--list", action="store_true", help="print the names")
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument("--held-out", action="store_true", help="the runs of HELD_OUT instead")
    sets.add_argument("--gpu", action="store_true", help="the runs of ON_GPU instead")
    args = parser.parse_args()
    chosen = HELD_OUT if args.held_out else ON_GPU if args.gpu else PLANTS
    plants = [plant for plant in chosen if not args.only or plant.name in args.only]
    if args.list:
        print("\n".join(plant.name for plant in plants))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(args.runs or folder)
        rows = [judge(plant, runs) for plant in plants]
        trials = [try_advice(plant, runs) for plant in plants if args.tries and plant.name in TRIED]
    if not args.only:
        flags = ["--held-out"] * args.held_out + ["--gpu"] * args.gpu + ["--try"] * args.tries
        file = "explain_held_out" if args.held_out else "explain_gpu" if args.gpu else "explain"
        title, lines = "What `instep explain` says of planted bottlenecks", [*report(rows), *report_trials(trials)]
        write_result("explain_campaign", title, lines, flags, file)


def folder_of(plant, folder):
    return folder / re.sub(r"\W+", "-", plant.name)


def judge(plant, folder):
    """Train one run, and return the plant, the verdict, its first cause, and whether that is right."""
    run_dir = folder_of(plant, folder)
    if not (run_dir / "result.json").exists():
        hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(plant.hogs)]
        try:
            train(plant, run_dir)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
    command = [str(BIN / "instep"), "explain", str(run_dir), "--json"]
    explained = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    verdict = json.loads(explained.stdout.splitlines()[-1])
    causes = [cause for cause in verdict["causes"] if cause["kind"] != "delayed" or plant.hogs]
    first = causes[0] if causes else {"bounded_by": "nothing", "rank": None, "share": 0.0}
    is_right = first["bounded_by"] == plant.cause and plant.rank in (ANY, first["rank"])
    print(f"{'right' if is_right else 'WRONG'}  {plant.name}: {verdict['costs']}\n  {verdict['text']}", flush=True)
    return plant, verdict, first, is_right


def try_advice(plant, folder):
    """Return what `instep explain --try` has measured, or why not."""
    command = [str(BIN / "instep"), "explain", str(folder_of(plant, folder)), "--try", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * LIMIT_S)
    trial = json.loads(done.stdout.splitlines()[-1]).get("tried")
    print(f"tried  {plant.name}: {trial or done.stderr[-300:]}", flush=True)
    return plant, trial


def report_trials(trials):
    if not trials:
        return []
    cells, num_close = [], 0
    for plant, trial in trials:
        if trial is None:
            cells.append([plant.name, "", "", "", "nothing to try"])
            continue
        is_close = abs(trial["measured"] - trial["predicted"]) <= 0.2 * trial["predicted"]
        num_close += is_close
        gains = f"{trial['predicted']:.0%}", f"{trial['measured']:.0%}"
        cells.append([plant.name, trial["options"], *gains, "yes" if is_close else "**no**"])
    return [
        "",
        f"`--try`: the measured gain is within 20 % of the predicted one in {num_close} of {len(trials)}.",
        "",
        *table(["run", "tried", "predicted gain", "measured gain", "within 20 %"], cells),
    ]


def train(plant, run_dir):
    """Train on this machine, or on two nodes with a slow link, one rank each."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [*plant.command, "--run-dir", str(run_dir)]
    with contextlib.ExitStack() as stack:
        commands = [(command, environ)]
        if plant.link:
            from network import two_hosts

            ours = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "veth0"}
            ours |= {"MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29533"}
            commands = [
                (["ip", "netns", "exec", host, *command], environ | ours | {"RANK": str(rank)})
                for rank, host in enumerate(stack.enter_context(two_hosts(plant.link)))
            ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes = [subprocess.Popen(words, env=env, **pipes) for words, env in commands]
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        for process, output in zip(processes, outputs, strict=True):
            if process.returncode:
                sys.exit(f"{plant.name}: {output[-2000:]}")


def report(rows):
    planted = [row for row in rows if row[0].cause != "nothing"]
    healthy = [row for row in rows if row[0].cause == "nothing"]
    cells = []
    for plant, verdict, first, is_right in rows:
        delayed = verdict["costs"].get("delayed", 0.0) / verdict["wall_s"]
        expected = plant.cause + (f", rank {plant.rank}" if isinstance(plant.rank, int) else "")
        said = first["bounded_by"] + (f", rank {first['rank']}" if first["rank"] is not None else "")
        advice = verdict["advice"][0] if verdict["advice"] and delayed < 0.1 else {}
        told = (advice.get("options") or advice.get("text", "").split(":")[0][:60]) if advice else ""
        right = "yes" if is_right else "**no**"
        cells.append(
            [
                plant.name,
                expected,
                said,
                f"{first['share']:.0%}",
                right,
                f"{delayed:.0%}",
                f"{verdict['wall_s']:.0f}",
                told,
            ]
        )
    return [
        f"Planted: {sum(row[3] for row in planted)} of {len(planted)} right. "
        f"Healthy: {sum(row[3] for row in healthy)} of {len(healthy)} right.",
        "",
        "Where other programs had the cores for a tenth of the time or more, `instep explain` itself says that, too "
        "(in busy runs first); the verdict in this table is the first cause beside it, and no advice is shown.",
        "",
        *table(["run", "planted", "verdict", "share", "right", "waited for a core", "s", "advice"], cells),
    ]


if __name__ == "__main__":
    main()
