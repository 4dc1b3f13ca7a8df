"""Write the batch script of a job: pure, from a SubmitSpec to text that a person can read, keep and submit again.

[Note: The life of a batch script] SLURM runs the script on the first node of the allocation. It starts one launcher a
node as a step, and waits. USR1 (the time is nearly up) it passes on to the step: the ranks save and leave, and the
script puts the job back into the queue. SIGTERM (preemption, scancel) SLURM sends to every process itself, the ranks
too; the script only has to stay, because its end would be the end of the step.
"""

from __future__ import annotations

import shlex

from instep.core.version import __version__
from instep.launch.slurm.job import SubmitSpec

SCRIPT = "submit.sh"
_TRAPS = """\
# Asked to end, the ranks save first. USR1 is passed on to them; SIGTERM they get from SLURM itself.
step='' asked=no
trap 'asked=yes; [[ -z $step ]] || kill -USR1 "$step"' USR1
trap : TERM"""


def batch_script(spec: SubmitSpec) -> str:
    """Write the whole script."""
    parts = [_head(spec), _TRAPS, *_settings(spec), _place(spec), _command(spec), _step(spec), _end(spec)]
    return "\n\n".join(parts) + "\n"


def _head(spec: SubmitSpec) -> str:
    # %j and the like are SLURM's in this one option; a % of the person's own is doubled.
    log = str(spec.run_dir).replace("%", "%%") + "/logs/slurm-" + ("%A_%a" if spec.is_array else "%j") + ".out"
    lines = [
        "#!/bin/bash",
        f"# Written by instep {__version__}. Submitted again as it is, it goes on with the run:",
        f"#   sbatch {shlex.quote(str(spec.run_dir / SCRIPT))}",
        *_directives(
            ("job-name", spec.name),
            ("chdir", str(spec.cwd)),
            ("output", log),
            ("open-mode", "append"),
            ("nodes", str(spec.nodes)),
            ("ntasks-per-node", "1"),
            ("cpus-per-task", _text(spec.cpus_per_node)),
            ("gpus-per-node", _text(spec.gpus_per_node)),
            ("time", spec.time),
            ("partition", spec.partition),
            ("array", f"0-{len(spec.sweep.values) - 1}" if spec.sweep else None),
        ),
        f"# {spec.signal_before_s} s before the time is up, SLURM tells this script, and no other process.",
        *_directives(("signal", f"B:USR1@{spec.signal_before_s}")),
        *_requeueing(spec),
    ]
    if spec.sbatch_options:
        lines += ["# Given after --:", f"#SBATCH {' '.join(map(_quoted, spec.sbatch_options))}"]
    return "\n".join(lines)


def _requeueing(spec: SubmitSpec) -> list[str]:
    lines = ["#SBATCH --requeue" if spec.requeue else "#SBATCH --no-requeue"]
    if spec.on_node_failure == "continue":
        lines = ["# A node that fails is left behind.", "#SBATCH --no-kill", *lines]
    return lines


def _settings(spec: SubmitSpec) -> list[str]:
    """Write what --set-env and --prelude gave."""
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in (text.partition("=") for text in spec.env)]
    lines = [*exports, *spec.prelude]
    return ["\n".join(lines)] if lines else []


def _place(spec: SubmitSpec) -> str:
    port = "port=$((15000 + SLURM_JOB_ID % 15000)) # two jobs that share a node do not share it"
    lines = [
        f"run_dir={shlex.quote(str(spec.run_dir))}",
        'run_dir+="${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}" # the jobs of an array have one each',
    ]
    if spec.sweep:
        values = " ".join(map(shlex.quote, spec.sweep.values))
        lines += ["", f"# The jobs of this array differ in {spec.sweep.name}.", f"values=({values})"]
        lines += ['value="${values[$SLURM_ARRAY_TASK_ID]}"']
    if spec.nodes > 1:
        lines += ["", "# The launchers of all nodes meet at the first one, where this script runs.", port]
    return "\n".join(lines)


def _command(spec: SubmitSpec) -> str:
    task = " ".join(map(shlex.quote, (spec.python, "-m", "instep.cli.entry", "train", spec.task, *spec.values)))
    # A scheduler's task launches ranks only where it is told of a rendezvous.
    meeting = '"$SLURMD_NODENAME:$port"' if spec.nodes > 1 else "127.0.0.1:0"
    lines = ["command=(", f"    {task}"]
    if spec.options:
        lines.append(f"    {' '.join(map(shlex.quote, spec.options))}")
    if spec.sweep:  # after the options and values: what comes last counts
        lines.append(f'    "{spec.sweep.word("$value")}"')
    lines += [
        f'    -n {spec.processes} --run-dir "$run_dir"',
        f"    --nnodes {spec.nnodes} --rdzv-backend c10d --rdzv-endpoint {meeting}",
        '    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        ")",
    ]
    return "\n".join(lines)


def _step(spec: SubmitSpec) -> str:
    flags = "--no-kill --kill-on-bad-exit=0 --wait=0" if spec.on_node_failure == "continue" else "--kill-on-bad-exit=1"
    if spec.cpus_per_node is not None:
        flags += f" --cpus-per-task={spec.cpus_per_node}"  # srun does not take it over from sbatch by itself
    return f"""\
newest() {{ find "$run_dir/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }}
before=$(newest)
was_complete=no; [[ ! -e $run_dir/result.json ]] || was_complete=yes

# One launcher a node; it starts the ranks there.
srun --ntasks-per-node=1 {flags} "${{command[@]}}" &
step=$!
wait "$step"; status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ended the wait, not the step
[[ $status -le 128 ]] || {{ wait "$step"; status=$?; }}"""


def _end(spec: SubmitSpec) -> str:
    complete = """\
# A result that is new says that the training is complete, whatever became of a node in the meantime.
[[ -e $run_dir/result.json && ( $status -eq 0 || $was_complete == no ) ]] && exit 0"""
    if not spec.requeue:
        return f"""\
{complete}
[[ $asked == no ]] || echo "The time was up before the training was complete. Submit this script again to go on."
exit "$status\""""
    return f"""\
{complete}
[[ $asked == yes ]] || exit "$status"

# Ranks that left well have saved. Where they did not, and nothing is new, another time would bring it no further.
if [[ $status -ne 0 && $(newest) == "$before" ]]; then
    echo "This job's time was up before it had made and saved a step. Submit it with more --time." >&2
    exit 3
fi
echo "The time is up: requeued, to go on from $(newest)."
if ! scontrol requeue "$SLURM_JOB_ID"; then
    echo "It could not be requeued. Submit this script again to go on." >&2
    exit 3
fi"""


def _directives(*pairs: tuple[str, str | None]) -> list[str]:
    return [f"#SBATCH {_quoted(f'--{name}={value}')}" for name, value in pairs if value is not None]


def _quoted(word: str) -> str:
    """Quote for sbatch's own reading of a line, which is not the shell's: $ stands for itself."""
    if word and not set(word) & set(" '\"\\#"):
        return word
    name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)
