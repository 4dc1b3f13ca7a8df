"""`instep checkpoints`: list, verify, prune and export the checkpoints of a run."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from instep.checkpoint.inventory import Entry, Inventory, Kind, newest_good, take_inventory, verify
from instep.checkpoint.policy import RetentionPolicy
from instep.cli.command import argument, command, option, print_json
from instep.core.errors import EXIT_DONE, EXIT_USER, CheckpointError, SpecError
from instep.monitor.progress import metrics_text
from instep.monitor.reading import ReadingDisplay, size_text

if TYPE_CHECKING:  # they need torch, and a list does not
    from instep.checkpoint.export import ExportResult, ExportSpec
    from instep.checkpoint.prune import PrunePlan
    from instep.checkpoint.rundir import RunDirectory

_STYLES = {"good": "green", "sizes agree": "green", "damaged": "bold red", "other format": "yellow"}


@dataclass(frozen=True, kw_only=True)
class CheckpointsSpec:
    """The options of `instep checkpoints`."""

    run: Path
    verify: bool = False
    prune: int | None = None
    damaged: bool = False
    dry_run: bool = False
    export: str | None = None
    out: Path | None = None
    files: Path | None = None
    step: int | None = None
    max_shard: str | None = None
    ema: bool = False
    force: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        asked = {"--verify": self.verify, "--prune": self.prune is not None, "--export": self.export is not None}
        given = [option for option, is_given in asked.items() if is_given]
        if len(given) > 1:
            raise SpecError(f"{' and '.join(given)} cannot be combined. Give one: --prune and --export also verify.")
        if self.prune is not None and self.prune < 1:
            raise SpecError(f"--prune {self.prune} would leave no checkpoint. Keep 1 or more, or delete the run.")
        of_prune = {"--damaged": self.damaged, "--dry-run": self.dry_run}
        of_export = {"--step": self.step is not None, "--max-shard": self.max_shard is not None, "--force": self.force}
        of_export |= {"--out": self.out is not None, "--files": self.files is not None}
        of_export |= {"--ema": self.ema}
        for action, more in (("--prune", of_prune), ("--export", of_export)):
            names = ", ".join(name for name, is_given in more.items() if is_given)
            if names and not asked[action]:
                raise SpecError(f"{names} is for {action}, which is not given. Add {action}.")


@command(
    "List, verify, prune or export the checkpoints of a run.",
    argument("run", Path, "RUN", "a run directory, or the directory of one checkpoint"),
    option("verify", bool, False, "read every file and compare its size and hash"),
    option("prune", int | None, None, "keep only the newest N good ones", metavar="N"),
    option("damaged", bool, False, "also prune damaged and half-written ones"),
    option("dry_run", bool, False, "only print what --prune would delete"),
    option("export", str | None, None, "write the weights to a folder or a .safetensors file", metavar="TARGET"),
    option("out", Path | None, None, "the target; --export is then the format: weights, hf or peft", metavar="TARGET"),
    option("files", Path | None, None, "config and tokenizer for the export, not the run's", metavar="FOLDER"),
    option("step", int | None, None, "export this step, not the newest good one"),
    option("max_shard", str | None, None, "size of an exported file [default: 5GB]", metavar="SIZE"),
    option("ema", bool, False, "export the averaged weights of a run with --ema"),
    option("force", bool, False, "replace the files of an earlier export"),
    option("json", bool, False, "print the outcome as one line of JSON"),
)
def checkpoints(**options: Any) -> int:
    """List, verify, prune or export checkpoints."""
    spec = CheckpointsSpec(**options)
    console = Console(stderr=spec.json, highlight=False)
    if spec.prune is not None:
        ok, outcome = _prune(spec, spec.prune, console)
    elif spec.export is not None:
        ok, outcome = _export(spec, _export_spec(spec, spec.export), console)
    else:
        ok, outcome = _list(spec, console)
    if spec.json:
        print_json({"ok": ok, **outcome})
    return EXIT_DONE if ok else EXIT_USER


def _list(spec: CheckpointsSpec, console: Console) -> tuple[bool, dict[str, Any]]:
    inventory = take_inventory(spec.run)
    if spec.verify:
        total = sum(entry.num_bytes for entry in inventory.entries if entry.kind is not Kind.UNFINISHED)
        with ReadingDisplay("verifying", total) as progress:
            checked = [verify(entry, progress) for entry in inventory.entries]
        inventory = inventory._replace(entries=tuple(entry for entry in checked if entry is not None))
    metric, best = _best(inventory)
    _show_entries(console, inventory.entries, best)
    _say(console, _verdict(inventory, spec.verify))
    if best is not None:
        _say(console, f"Best by --keep-best {metric}: {best}.")
    entries = [_as_json(entry) | {"best": entry.name == best} for entry in inventory.entries]
    return inventory.ok, {"run": str(inventory.path), "verified": spec.verify, "checkpoints": entries}


def _best(inventory: Inventory) -> tuple[str, str | None]:
    """Return the metric of the run's --keep-best and the name of its best checkpoint, as far as there are any."""
    try:
        metric = json.loads((inventory.path / "spec.json").read_bytes())["spec"]["keep_best"]
        policy = RetentionPolicy.from_options(1, None, metric)
    except (OSError, ValueError, KeyError, TypeError):  # no run, or one whose spec.json is damaged
        return "", None
    whole = {entry.name: dict(entry.scores) for entry in inventory.entries if entry.is_whole and entry.scores}
    return str(metric), policy.best_of(whole) if metric else None


def _prune(spec: CheckpointsSpec, keep: int, console: Console) -> tuple[bool, dict[str, Any]]:
    from instep.checkpoint.prune import plan_pruning, prune

    inventory = take_inventory(spec.run)
    if not inventory.is_run:
        raise SpecError(f"{spec.run} is a single checkpoint, and --prune needs a run. Give the run.")
    with ExitStack() as stack:
        if not spec.dry_run:
            stack.callback(_lock(inventory.path).unlock)
        inventory = take_inventory(inventory.path)  # again, now that no training can change it
        with ReadingDisplay("verifying what is kept") as progress:
            plan = plan_pruning(inventory, keep, spec.damaged, progress)
        for entry in plan.kept:
            _say(console, f"keep {entry.name}  good")
        for entry in plan.doomed if spec.dry_run else prune(plan):
            _say(console, f"{'would delete' if spec.dry_run else 'deleted'} {entry.name}  {size_text(entry.num_bytes)}")
    ok = bool(plan.kept) or not inventory.entries
    _say(console, _prune_verdict(plan, spec, ok))
    return ok, {
        "run": str(inventory.path),
        "dry_run": spec.dry_run,
        "kept": [entry.name for entry in plan.kept],
        "deleted": [entry.name for entry in plan.doomed],
        "left": [_as_json(entry) for entry in plan.left],
        "num_bytes_deleted": sum(entry.num_bytes for entry in plan.doomed),
    }


def _lock(path: Path) -> RunDirectory:
    """Lock a run directory, so that checkpoints can be deleted."""
    from instep.checkpoint.rundir import RunDirectory

    directory = RunDirectory(path)
    try:
        directory.lock()
        directory.restore_replaced()
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is in use by {directory.owner()}, which deletes old checkpoints itself (--keep). Nothing was "
            "deleted. Wait until it has ended, or end it; --dry-run works meanwhile."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be locked: {error.strerror}. Nothing was deleted.") from error
    return directory


def _prune_verdict(plan: PrunePlan, spec: CheckpointsSpec, ok: bool) -> str:
    if not ok:
        return f"{spec.run} has no good checkpoint, so nothing is deleted: the damaged ones may still be of use."
    total = sum(entry.num_bytes for entry in plan.doomed)
    would = "would be " if spec.dry_run else ""
    lines = [f"{len(plan.kept)} kept, {len(plan.doomed)} {would}deleted, {size_text(total)} {would}freed."]
    for entry in plan.left:
        why = "never deleted" if entry.kind is Kind.FOREIGN else "not deleted; --damaged deletes it"
        lines.append(f"{entry.name} is {entry.state}: {why}.")
    return "\n".join(lines)


def _export_spec(spec: CheckpointsSpec, export: str) -> ExportSpec:
    """Return where and how to export: `--export TARGET`, or `--export FORMAT --out TARGET`."""
    from instep.checkpoint.export import ExportSpec, read_size
    from instep.checkpoint.export_formats import FORMATS

    known = ", ".join(FORMATS)
    if spec.out is not None and export not in FORMATS:
        raise SpecError(f"--export {export} is not a format. With --out, it is one of {known}.")
    if spec.out is None and export in ("hf", "peft"):
        raise SpecError(f"--export {export} is a format and needs --out FOLDER. A folder of this name: ./{export}.")
    chosen = FORMATS[export if spec.out is not None else "weights"]
    if spec.files is not None and (chosen.name == "weights" or not spec.files.is_dir()):
        why = "is not a folder" if chosen.name != "weights" else "is for --export hf and --export peft"
        raise SpecError(f"--files {spec.files} {why}. Give a folder with the model's config and tokenizer.")
    target = spec.out if spec.out is not None else Path(export)
    wanted = ExportSpec(
        target, read_size(spec.max_shard or "5GB"), spec.force, format=chosen, files=spec.files, ema=spec.ema
    )
    if wanted.is_file and chosen.name != "weights":
        raise SpecError(f"--out {target} is one file, and --export {export} writes a folder. Give a folder.")
    if (wanted.is_file or not chosen.may_shard) and spec.max_shard is not None:
        raise SpecError(f"--export {export} asks for one file, and --max-shard for several. Give one of them.")
    return wanted


def _export(spec: CheckpointsSpec, wanted: ExportSpec, console: Console) -> tuple[bool, dict[str, Any]]:
    from instep.checkpoint.export import check_target, export

    inventory = take_inventory(spec.run)
    candidates = _candidates(inventory, spec.step)
    check_target(wanted, candidates[0].path)
    with ReadingDisplay("verifying") as progress:
        good, damaged = newest_good(candidates, 1, progress)
    for entry in damaged:
        _say(console, f"{entry.name} is {entry.state}: {'; '.join(map(str, entry.problems))}.", "bold red")
    skipped = [_as_json(entry) for entry in damaged]
    if not good:
        advice = "No good checkpoint is left: restore one from a backup, or continue the training."
        if spec.step is not None and len(inventory.checkpoints) > 1:
            advice = "Without --step, the newest good one is exported."
        _say(console, f"Nothing was exported. {advice}")
        return False, {"checkpoint": None, "files": [], "skipped": skipped}
    if damaged:
        _say(console, f"The older {good[0].name} is exported instead.", "yellow")
    done = export(good[0].path, wanted)
    _say_export(console, good[0], done)
    paths = {"files": list(map(str, done.files)), "replaced": list(map(str, done.replaced))}
    exported = {"checkpoint": str(good[0].path), "step": good[0].step, **done._asdict(), **paths}
    return True, {**exported, "skipped": skipped}


def _candidates(inventory: Inventory, step: int | None) -> tuple[Entry, ...]:
    """Return the checkpoints that may be exported, newest first; with --step only that one."""
    entries = inventory.checkpoints if inventory.is_run else inventory.entries
    chosen = tuple(entry for entry in entries if step in (None, entry.step))
    if step is not None and not chosen:
        steps = ", ".join(str(entry.step) for entry in entries) or "none"
        raise CheckpointError(f"{inventory.path} has no checkpoint of step {step}. It has: {steps}.")
    if not chosen:
        raise CheckpointError(f"{inventory.path} has no checkpoint yet, so there is nothing to export.")
    return chosen


def _say_export(console: Console, entry: Entry, done: ExportResult) -> None:
    for path in done.replaced:
        _say(console, f"replaced {path}")
    for path in done.files:
        _say(console, str(path))
    if done.left_out:
        names = ", ".join(done.left_out)
        _say(console, f"Left out because they are not tensors: {names}. Load with strict=False.", "yellow")
    if done.other_models:
        _say(console, f"Not exported: {', '.join(done.other_models)}. Only the first model is.", "yellow")
    _say(console, f"{entry.name}: {done.num_tensors} tensors, {size_text(done.num_bytes)} exported.")


def _show_entries(console: Console, entries: Sequence[Entry], best: str | None) -> None:
    if not entries:
        return
    width = max(len(entry.name) for entry in entries)
    _say(console, f"{'':<{width}}  {'step':>9}  {'when':<16}  {'size':>9}  {'files':>5}  state", "dim")
    for entry in entries:
        when = datetime.datetime.fromtimestamp(entry.saved_at_s).strftime("%Y-%m-%d %H:%M")
        step = "?" if entry.step is None else f"{entry.step:,}"
        line = f"{entry.name:<{width}}  {step:>9}  {when}  {size_text(entry.num_bytes):>9}  {entry.num_files:>5}  "
        scores = metrics_text(dict(entry.scores))
        state = (_state(entry), _STYLES.get(entry.state, "yellow"))
        marks = "".join(f"  {text}" for text in (scores, "best" * (entry.name == best)) if text)
        console.print(Text.assemble(line, state, marks), soft_wrap=True)
        for problem in entry.problems:
            _say(console, f"{'':<{width}}  {problem}")


def _state(entry: Entry) -> str:
    if entry.kind is Kind.UNFINISHED:
        return "half-written, or being written now"
    if entry.kind is Kind.ASIDE:
        if entry.path.name.startswith("doubtful-"):
            return "set aside: saved while the ranks had diverged"
        return "set aside as damaged" + (", though all its files are good" * (entry.verified and not entry.problems))
    return entry.state


def _verdict(inventory: Inventory, verified: bool) -> Text:
    num_damaged = sum(entry.is_damaged for entry in inventory.entries)
    num_good = sum(entry.is_whole for entry in inventory.entries)
    if not inventory.entries:
        return Text(f"{inventory.path} has no checkpoints yet.")
    if num_damaged:
        return Text(f"{num_damaged} damaged, {num_good} {'good' if verified else 'with the right sizes'}.", "red")
    if verified:
        return Text(f"{num_good} good: every file has the size and hash it was written with.", "green")
    return Text(f"{num_good} with the right sizes; --verify also compares hashes.", "green")


def _as_json(entry: Entry) -> dict[str, Any]:
    saved_at = datetime.datetime.fromtimestamp(entry.saved_at_s, datetime.UTC)
    return {
        "name": entry.name,
        "path": str(entry.path),
        "step": entry.step,
        "state": entry.state,
        "saved_at": saved_at.isoformat(timespec="seconds"),
        "num_bytes": entry.num_bytes,
        "num_files": entry.num_files,
        "metrics": dict(entry.scores),
        "problems": [problem._asdict() for problem in entry.problems],
    }


def _say(console: Console, text: str | Text, style: str = "") -> None:
    console.print(text if isinstance(text, Text) else Text(text, style), soft_wrap=True)
