"""Plant bottlenecks and see whether `instep explain` names them first; train healthy runs and see that it names none.

python benchmarks/explain_campaign.py [--only NAME,…] [--list]

Each run is a short training of explain_task.py on 1 or 2 processes. A verdict is right when it names the planted cause
(and the rank, where it was planted on one) before all others. Where the machine is busy with other work, the verdict
says that first, rightly: the table has the share of the time for which the ranks waited for a core, and judges the
causes after it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
    Plant("uneven batch", "straggler", f"-n 2 {CONV} pixels=32 --batch-size 3", 0, 120),
    Plant("a checkpoint every step", "checkpoint", "net=mlp width=1500 depth=3 --save-every 1"),
    Plant("a checkpoint every step, 2 ranks", "checkpoint", "-n 2 net=mlp width=1500 depth=3 --save-every 1", ANY),
    Plant("an evaluation every 5 steps", "evaluation", f"{CONV} eval_samples=512 --eval-every 5", None, 30),
    Plant(
        "an evaluation every 5 steps, 2 ranks", "evaluation", f"-n 2 {CONV} eval_samples=512 --eval-every 5", None, 30
    ),
    Plant("metrics sleep", "evaluation", "plant=metric_sleep seconds=0.5 --eval-every 10", None, 100),
    Plant("one long evaluation at the end", "evaluation", f"{CONV} eval_samples=3000 --eval-every never", None, 30),
    Plant("tiny batch", "host", "net=mlp width=700 depth=3 --batch-size 1", None, 600),
    Plant("on_step sleeps", "host", "plant=hook_sleep seconds=0.1"),
    Plant("on_step computes", "host", "plant=hook_work seconds=0.1"),
    Plant("on_step sleeps, 2 ranks", "host", "-n 2 plant=hook_sleep seconds=0.1", 0),
    Plant("stop() sleeps, 2 ranks", "host", "-n 2 plant=stop_sleep seconds=0.1", 0),
    Plant("the loss sleeps", "host", "plant=loss_sleep seconds=0.1"),
    Plant("the loss sleeps, 2 ranks", "host", "-n 2 plant=loss_sleep seconds=0.1"),
    Plant("backward sleeps", "host", "plant=backward_sleep seconds=0.1"),
    Plant("more threads than cores", "host", f"-n 2 {CONV} pixels=32 --threads 8", None, 30),
    Plant("slow train_data()", "startup", "plant=slow_data seconds=30"),
    Plant("slow model(), 2 ranks", "startup", "-n 2 plant=slow_model seconds=30"),
    Plant("compiled for a few steps", "startup", "--compile", None, 20),
    Plant("compiled again for each shape", "startup", "plant=shapes --compile", None, 40),
    Plant("much to send, gloo", "communication", "-n 2 net=mlp width=2000 depth=3 --comm gloo --batch-size 2"),
    Plant("much to send, shared memory", "communication", "-n 2 net=mlp width=1000 depth=2 --batch-size 2", None, 200),
    Plant("healthy: conv", "nothing", f"{CONV}", None, 60),
    Plant("healthy: conv, 2 ranks", "nothing", f"-n 2 {CONV}", None, 100),
    Plant("healthy: conv, exact", "nothing", f"{CONV} --exact --shards 4", None, 60),
    Plant("healthy: conv, exact, 2 ranks", "nothing", f"-n 2 {CONV} --exact --shards 4", None, 60),
    Plant("healthy: conv, fsdp", "nothing", f"-n 2 {CONV} --strategy fsdp", None, 60),
    Plant("healthy: conv, readers", "nothing", f"{CONV} --data-workers 1", None, 60),
    Plant("healthy: transformer", "nothing", "net=transformer width=256 depth=4 --batch-size 128", None, 40),
    Plant(
        "healthy: transformer, 2 ranks", "nothing", "-n 2 net=transformer width=256 depth=4 --batch-size 256", None, 40
    ),
    Plant("healthy: wide mlp, large batch", "nothing", "net=mlp width=1000 depth=3 --batch-size 1024", None, 20),
    Plant("healthy: saves and evaluates", "nothing", f"{CONV} --save-every 30s --eval-every 30", None, 90),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the names")
    args = parser.parse_args()
    plants = [plant for plant in PLANTS if not args.only or plant.name in args.only.split(",")]
    if args.list:
        print("\n".join(plant.name for plant in plants))
        return
    rows = [judge(plant) for plant in plants]
    if not args.only:
        write_result(
            "explain_campaign", "What `instep explain` says of planted bottlenecks", report(rows), [], "explain"
        )


def judge(plant):
    """Train one run, and return the plant, the verdict, whether it is right, and the seconds that the command took."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, begun = Path(folder) / "run", time.monotonic()
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "env": environ}
        trained = subprocess.run([*plant.command, "--run-dir", str(run_dir)], **options)
        if trained.returncode:
            sys.exit(f"{plant.name}: {trained.stderr[-2000:]}")
        took_s = time.monotonic() - begun
        explained = subprocess.run([str(BIN / "instep"), "explain", str(run_dir), "--json"], **options)
    verdict = json.loads(explained.stdout.splitlines()[-1])
    causes = [
        cause for cause in verdict["causes"] if cause["kind"] != "delayed" or plant.name.startswith("more threads")
    ]
    first = causes[0] if causes else {"bounded_by": "nothing", "rank": None, "share": 0.0}
    is_right = first["bounded_by"] == plant.cause and plant.rank in (ANY, first["rank"])
    print(f"{'right' if is_right else 'WRONG'}  {plant.name}: {verdict['costs']}\n  {verdict['text']}", flush=True)
    return plant, verdict, first, is_right, took_s


def report(rows):
    planted = [row for row in rows if row[0].cause != "nothing"]
    healthy = [row for row in rows if row[0].cause == "nothing"]
    cells = []
    for plant, verdict, first, is_right, took_s in rows:
        delayed = verdict["costs"].get("delayed", 0.0) / verdict["wall_s"]
        expected = plant.cause + (f", rank {plant.rank}" if isinstance(plant.rank, int) else "")
        said = first["bounded_by"] + (f", rank {first['rank']}" if first["rank"] is not None else "")
        advice = verdict["advice"][0] if verdict["advice"] and delayed < 0.1 else {}
        told = (advice.get("options") or advice.get("text", "").split(":")[0][:60]) if advice else ""
        right = "yes" if is_right else "**no**"
        cells.append(
            [plant.name, expected, said, f"{first['share']:.0%}", right, f"{delayed:.0%}", f"{took_s:.0f}", told]
        )
    return [
        f"Planted: {sum(row[3] for row in planted)} of {len(planted)} right. "
        f"Healthy: {sum(row[3] for row in healthy)} of {len(healthy)} right.",
        "",
        *table(["run", "planted", "verdict", "share", "right", "waited for a core", "s", "advice"], cells),
    ]


if __name__ == "__main__":
    main()
