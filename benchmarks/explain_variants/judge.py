"""Read each tool's summary, and judge by rule whether it names a planted cause, shows it, or cannot see it.

A summary becomes a `Reading`: what stands first in it, by rank where there is a table for each, and the share of the
time of each kind of work that has a line. A tool names a cause when that is what it states, or what tops its table; on
one rank: when it states that rank, or when that rank's table is topped by it and the other's is not. It shows a cause
when a line of its summary has at least a tenth of the time for it, but the reader must know what the line means; of a
slow rank: when the ranks' lines, backward apart, in which the others wait, differ by at least a tenth.
"""

import json
import re
from dataclasses import dataclass

NAMES, SHOWS, BLIND = "names", "shows", "no"
SHOWN = 0.1
COMPUTING = {"compute", "forward", "backward"}
# What stands for a planted stage: the kinds of lines that name it at the top, and those that show it anywhere.
NAMED_BY = {
    "input": {"input"},
    "hooks": {"hooks", "host", "residual"},
    "in forward": {"host", "residual"},
    "in backward": {"host", "planted"},
    "small batch": {"host"},
    "cores": {"cores"},
    "compute": COMPUTING,
    "communication": {"communication"},
    "straggler": {"straggler"},
    "checkpoint": {"checkpoint"},
    "evaluation": {"evaluation"},
    "startup": {"startup"},
    "nothing": COMPUTING | {"nothing"},
}
SHOWN_BY = NAMED_BY | {
    "hooks": {"hooks", "host", "residual", "outside"},
    "in forward": {"host", "residual", "outside", "forward"},
    "in backward": {"host", "planted", "backward"},
    "small batch": {"host", "optimizer"},
    "cores": {"cores", "busy"},
    "checkpoint": {"checkpoint", "residual", "outside"},
    "evaluation": {"evaluation", "residual", "outside"},
    "nothing": set(),
}


@dataclass
class Reading:
    says: str
    tops: dict[int | None, str]
    """The kind of the first line of each rank's table; of a verdict: by the rank that it blames, None for all."""
    lines: dict[int | None, dict[str, float]]
    """By rank, the share of the time of each kind that has a line."""
    is_verdict: bool


def stage_of(plant):
    """Return the stage in which a plant is slow."""
    if plant.cause != "host":
        return plant.cause
    if plant.hogs:
        return "cores"
    stages = {"hook_": "hooks", "stop_": "hooks", "loss_": "in forward", "backward_": "in backward"}
    return next((stage for word, stage in stages.items() if f"plant={word}" in plant.words), "small batch")


def judge(plant, reading):
    stage, rank = stage_of(plant), plant.rank if isinstance(plant.rank, int) else None
    right = NAMED_BY[stage]
    hits = {where for where, kind in reading.tops.items() if kind in right}
    if reading.is_verdict:
        is_named = bool(hits) and (rank is None or hits == {rank})
    else:
        is_named = hits == ({rank} if rank is not None and len(reading.tops) > 1 else set(reading.tops))
    if is_named:
        return NAMES
    seen = any(kind in SHOWN_BY[stage] for shares in reading.lines.values() for kind in above(shares))
    return SHOWS if hits or seen or (stage == "straggler" and is_skewed(reading, rank)) else BLIND


def above(shares):
    return {kind for kind, share in shares.items() if share >= SHOWN}


def is_skewed(reading, rank):
    """Tell whether the planted rank's table has more of some work than another's."""
    own = reading.lines.get(rank, {})
    others = [shares for other, shares in reading.lines.items() if other != rank]
    kinds = set(own) - {"backward", "communication"}
    return any(own[kind] - shares.get(kind, 0.0) >= SHOWN for shares in others for kind in kinds)


TRACEML = {
    "INPUT_BOUND": "input",
    "INPUT_STRAGGLER": "input",
    "COMPUTE_STRAGGLER": "straggler",
    "STRAGGLER": "straggler",
    "RESIDUAL_HEAVY": "residual",
    "COMPUTE_BOUND": "compute",
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": "nothing",
}


def read_traceml(folder, plant):
    """Read the primary diagnosis of the final summary, and the phases of its table by rank."""
    summary = json.loads((folder / "logs/run/final_summary.json").read_text())
    verdict, phases = summary["primary_diagnosis"], ("forward", "backward", "optimizer", "residual")
    lines = {}
    for rank, row in summary["step_time"]["groups"]["rows"].items():
        metrics = {name: value or 0.0 for name, value in row["metrics"].items()}
        whole = metrics["step_time_ms"] or 1.0
        shares = {phase: metrics[f"{phase}_ms"] / whole for phase in phases}
        lines[int(rank)] = shares | {"input": metrics["input_wait_ms"] / whole}
    if summary["system"]["diagnosis"]["kind"] == "HIGH_CPU":
        lines[None] = {"busy": 1.0}
    kind = TRACEML.get(verdict["kind"], verdict["kind"])
    blamed = summary["step_time"]["diagnosis"]["evidence"].get("culprit_rank")
    score = verdict["evidence"].get("score")
    says = verdict["status"] + (f", rank {blamed}" if blamed is not None else "") + (f" {score:.0%}" if score else "")
    return Reading(says, {blamed: kind}, lines, True)


LIGHTNING = (
    (r"train_dataloader_next", "input"),
    (r"save_checkpoint|ModelCheckpoint", "checkpoint"),
    (r"validation|val_next|evaluation", "evaluation"),
    (r"\.training_step$", "forward"),
    (r"\.backward$", "backward"),
    (r"train_dataloader$|val_dataloader$|setup|configure_(optimizers|model|callbacks)", "startup"),
    (r".", "hooks"),
)
ENCLOSING = r"^Total$|^run_training_(epoch|batch)$|\]\w+\.optimizer_step$"
"""Lines whose time is that of the lines under them."""


def read_lightning(folder, plant):
    """Read each rank's table: its first line that encloses no other."""
    tops, lines, says = {}, {}, []
    for file in sorted(folder.glob("fit-profile*.txt")):
        rank = int(re.search(r"(\d*)\.txt", file.name)[1] or 0)
        rows = [
            [cell.strip() for cell in line.split("|")[1:6]] for line in file.read_text().splitlines() if "|" in line
        ]
        rows = [(row[0], float(row[4].rstrip(" %"))) for row in rows if row[4:] and row[0] != "Action"]
        leaves = [row for row in rows if not re.search(ENCLOSING, row[0])]
        shares, inside = {}, 0.0
        for name, percent in leaves:
            kind = next(kind for pattern, kind in LIGHTNING if re.search(pattern, name))
            shares[kind] = max(shares.get(kind, 0.0), percent / 100)  # a callback's line encloses that of the saving
            inside += percent if kind in ("forward", "backward") else 0.0
        update = sum(percent for name, percent in rows if re.search(r"Module\.optimizer_step$", name))
        shares["optimizer"] = max(0.0, update - inside) / 100
        name, percent = leaves[0]
        tops[rank] = next(kind for pattern, kind in LIGHTNING if re.search(pattern, name))
        lines[rank] = shares
        says.append(f"{shorten(name)} {percent:.0f}%")
    return Reading(by_rank(says), tops, lines, False)


TORCH = (
    (r"^enumerate\(DataLoader\)", "input"),
    (r"^ProfilerStep", "outside"),
    (r"gloo|c10d|nccl", "communication"),
    (r"^Slow", "planted"),
    (r"^Optimizer\.", "optimizer"),
    (r"compile_inner|compile_fx|dynamo_timed", "startup"),
    (r".", "compute"),
)


def read_torch(folder, plant):
    """Read each rank's table of self CPU time; `outside` is the time of a step that is in no operation."""
    tops, lines, says = {}, {}, []
    for file in sorted(folder.glob("rank-*.json")):
        rank, entries = int(file.stem[5:]), json.loads(file.read_text())
        whole, shares = sum(seconds for _, seconds in entries), {}
        for name, seconds in entries:
            kind = next(kind for pattern, kind in TORCH if re.search(pattern, name))
            shares[kind] = shares.get(kind, 0.0) + seconds / whole
        # The operations of an update are its own, but its line has their sum as "CPU total %".
        table = file.with_suffix(".txt").read_text()
        if update := re.search(r"^ *Optimizer\.step\S* +\S+ +\S+ +([\d.]+)%", table, re.MULTILINE):
            shares["optimizer"] = float(update[1]) / 100
        tops[rank] = next(kind for pattern, kind in TORCH if re.search(pattern, entries[0][0]))
        lines[rank] = shares
        says.append(f"{shorten(entries[0][0])} {entries[0][1] / whole:.0%}")
    return Reading(by_rank(says), tops, lines, False)


INSTEP = {"data": "input", "delayed": "cores"}


def read_instep(folder, plant):
    """Read the first cause and the costs; that others had the cores counts only where they were planted."""
    verdict = json.loads((folder / "explain.json").read_text())
    causes = [cause for cause in verdict["causes"] if cause["kind"] != "delayed" or plant.hogs]
    first = causes[0] if causes else {"bounded_by": "nothing", "rank": None, "share": 0.0, "kind": ""}
    kind = "cores" if first["kind"] == "delayed" else first["bounded_by"]
    shares = {INSTEP.get(phase, phase): seconds / verdict["wall_s"] for phase, seconds in verdict["costs"].items()}
    blamed = f", rank {first['rank']}" if first["rank"] is not None else ""
    says = f"{'host, others had the cores' if kind == 'cores' else kind}{blamed} {first['share']:.0%}"
    return Reading(says, {first["rank"]: kind}, {None: shares}, True)


def shorten(name):
    name = re.sub(r"^\[\w+\]\w*?\.?(?=\w+$)|\{.*\}", "", name)
    name = re.sub(r"enumerate\(DataLoader\)#.*", "enumerate(DataLoader)", name)
    return re.sub(r"^\[\w+\]", "", name)[:44].replace("*", "")


def by_rank(says):
    return says[0] if len(says) == 1 else "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(says))


READERS = {"traceml": read_traceml, "lightning": read_lightning, "torch": read_torch, "instep": read_instep}
