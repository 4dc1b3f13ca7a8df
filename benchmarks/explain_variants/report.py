"""The tables of explain_peers.py: what each tool says of each plant, the counts, and the costs."""

from importlib.metadata import version

from explain_variants import judge
from machine import HERE, table

TOOLS = {"traceml": "TraceML", "lightning": "Lightning, simple", "torch": "torch.profiler", "instep": "instep run"}
NEEDS = {
    "traceml": "two lines in the loop (`init`, `with trace_step`), its launcher",
    "lightning": 'a LightningModule, `profiler="simple"`; a file name for the tables of all ranks',
    "torch": "five lines in the loop",
    "instep": "no edit, its launcher",
    "train": "a Task",
}
JUDGING = """\
The rules are code, `explain_variants/judge.py`, written when the output of two plants had been read, and corrected
twice since: TraceML's summary has the blamed rank in two places, and a compiled graph that runs is not being compiled.

- **names**: the tool states the planted stage (and rank), or this tops its table; of several ranks, the planted rank's
  table and no other.
- shows: at least a tenth of the time is in a line for it, but the reader must know what the line means (TraceML's
  Residual for a checkpoint, torch.profiler's `ProfilerStep` for Python code), or has to compare the ranks' tables.
- no: it is in no line, or in one that stands for something else (DDP's transfers in Lightning's `backward`).

In favour of the peers: all work of a step is put within what they measure; TraceML's RESIDUAL-HEAVY counts as naming a
slow hook or Python in the loss, since it states what to look for; the tables of all ranks are read side by side; of
Lightning's table, the lines that enclose others are skipped; "compute" counts as named by what they say of every run
whose passes take long. In favour of instep: where other programs had the cores, the first cause beside it is judged, as
in explain.md; and the column for `instep train` is that of explain.md: longer runs, on which its rules were adjusted.
"""


def report(plants, readings, piece):
    shown_tools = [tool for tool in TOOLS if any(key[1] == tool for key in readings)]
    complete = [plant for plant in plants if all((plant, tool) in readings for tool in shown_tools)]
    planted = [plant for plant in complete if plant.cause != "nothing"]
    verdicts = {key: judge.judge(key[0], reading) for key, reading in readings.items()}
    counts = []
    for tool in shown_tools:
        said = [verdicts[plant, tool] for plant in planted]
        healthy = [verdicts[plant, tool] == judge.NAMES for plant in complete if plant.cause == "nothing"]
        numbers = [said.count(outcome) for outcome in (judge.NAMES, judge.SHOWS, judge.BLIND)]
        counts.append([TOOLS[tool], *numbers, f"{sum(healthy)} of {len(healthy)}", NEEDS[tool]])
    trained = trained_verdicts()
    right = [trained[plant.name][1] for plant in planted]
    own = ["instep train, from [explain.md](explain.md)", sum(right), "", len(right) - sum(right), "", NEEDS["train"]]
    cells = []
    for plant in complete:
        expected = plant.cause + (f", rank {plant.rank}" if isinstance(plant.rank, int) else "")
        said = [f"{mark(plant, verdicts[plant, tool])}: {readings[plant, tool].says}" for tool in shown_tools]
        verdict, is_right = trained[plant.name]
        cells.append(
            [plant.name, expected, *said, f"{mark(plant, judge.NAMES if is_right else judge.BLIND)}: {verdict}"]
        )
    left_out = [plant.name for plant in plants if plant not in complete]
    peers = ", ".join(f"{name} {version(name)}" for name in ("traceml-ai", "lightning", "torch"))
    return [
        f"Peers: {peers}. {len(planted)} planted bottlenecks and {len(complete) - len(planted)} healthy runs, "
        f"{piece}, one run each." + (f" Chosen, but not run: {'; '.join(left_out)}." if left_out else ""),
        "",
        *table(["tool", "names the cause", "shows it", "cannot see it", "healthy", "what it needs"], [*counts, own]),
        "",
        *JUDGING.splitlines(),
        "",
        *table(["plant", "planted", *(TOOLS[tool] for tool in shown_tools), "instep train"], cells),
    ]


def mark(plant, verdict):
    if plant.cause == "nothing":
        return "right" if verdict == judge.NAMES else "**wrong**"
    return "**names**" if verdict == judge.NAMES else verdict


def trained_verdicts():
    """Return what explain_campaign.py has recorded of `instep train`: by plant, the verdict and whether it is right."""
    rows = (line.strip("| ").split(" | ") for line in (HERE / "results/explain.md").read_text().splitlines())
    return {row[0]: (row[2], row[4] == "yes") for row in rows if len(row) > 5}


def report_costs(costs, num_steps):
    if not costs:
        return []
    header = [
        *("tool", "ms a step without", "with / without", "lowest to highest"),
        *("CPU ms a step without", "added", "lowest to highest"),
    ]
    return [
        "",
        "## What it costs",
        "",
        f"A small conv net with nothing planted, one process, {num_steps} steps, with and without the tool in turns;",
        "medians. Of torch.profiler, the steps that it records; in the others it is off. CPU time is the training "
        "process's: TraceML's aggregator is a process beside it.",
        "A ratio within the spread of the plain loop's own is noise.",
        "",
        *table(header, costs),
    ]
