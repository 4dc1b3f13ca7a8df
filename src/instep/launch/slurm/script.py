"""Write the batch script of a job: pure, from a SubmitSpec to text that a person can read, keep and submit again.

[Note: The life of a batch script] SLURM runs the script on the first node of the allocation. It starts one launcher a
node as a step, and waits. USR1 (the time is nearly up) it passes on to the step: the ranks save and leave, and the
script puts the job back into the queue. SIGTERM (preemption, scancel) SLURM sends to the ranks itself; the script has
to stay, because its end would be the end of the step. Where a partition gives a grace time before it preempts, SLURM
leaves the job running until then, and tells the ranks but not always the script: ranks that leave with 0 and without a
result have been asked to. The queue tells such a job, which is put back, from one that was cancelled, which is not.
"""

from __future__ import annotations

import shlex

from instep.core.version import __version__
from instep.launch.slurm.job import SubmitSpec

SCRIPT = "submit.sh"
MARK = "instep"
"""The comment by which jobs of ours are known in the queue."""
_TRAPS = """\
# Asked to end, the ranks save first. USR1 is passed on to them; SIGTERM they get from SLURM itself.
step='' asked=''
trap 'asked="The time is up"; [[ -z $step ]] || kill -USR1 "$step"' USR1
trap 'asked=${asked:-The job is to make room}' TERM"""
_CHECKED = """\
# A line that fails ends the job here, not somewhere in the training.
worked() {
    local code=$?
    [[ $code -eq 0 ]] || { echo "--prelude: '$1' ended with exit code $code, so nothing was trained." >&2; exit 2; }
}"""


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
            ("comment", MARK),
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
    prelude = [line for text in spec.prelude for line in (text, f"worked {shlex.quote(text)}")]
    parts = [exports, [_CHECKED, *prelude] if prelude else []]
    return ["\n".join(lines) for lines in parts if lines]


def _place(spec: SubmitSpec) -> str:
    port = "port=$((15000 + SLURM_JOB_ID % 15000)) # two jobs that share a node do not share it"
    lines = [
        f"run_dir={shlex.quote(str(spec.run_dir))}",
        'run_dir+="${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}" # the jobs of an array have one each',
    ]
    if spec.sweep:
        words = " ".join(map(shlex.quote, spec.sweep.words))
        lines += ["", f"# The jobs of this array differ in {spec.sweep.name}.", f"words=({words})"]
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
        lines.append('    "${words[$SLURM_ARRAY_TASK_ID]}"')
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
result() {{ stat --format=%i/%y "$run_dir/result.json" 2>/dev/null; }}
newest_before=$(newest) result_before=$(result)

# One launcher a node; it starts the ranks there.
srun --ntasks-per-node=1 {flags} "${{command[@]}}" &
step=$!
wait "$step"; status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ended the wait, not the step
[[ $status -le 128 ]] || {{ wait "$step"; status=$?; }}
# Where a signal and the step's end come together, bash loses its exit code; then the files decide.
[[ $status -ge 0 ]] || status=0"""


_LEFT_EARLY = """\
# A result that is new says that the training is complete, whatever became of a node in the meantime; an old one does
# where the ranks found nothing left to do.
result=$(result)
[[ -n $result && ( $result != "$result_before" || ( $status -eq 0 && -z $asked ) ) ]] && exit 0

# Ranks that left well without a result were asked to, and have saved. All else is a failure.
[[ -n $asked || $status -eq 0 ]] || exit "$status"
asked=${asked:-The job is to make room}

# One task of an array by its place there: the last one has the number of them all.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
if ! state=$(squeue --noheader --jobs="$job" --format=%T/%r); then
    echo "$asked, and the queue cannot be asked about it. Submit this script again to go on." >&2
    exit 3
fi
# One that was cancelled stays so, and one that SLURM has put back already needs no more.
[[ $state == RUNNING/* || $state == */TimeLimit ]] || exit "$status\""""


def _end(spec: SubmitSpec) -> str:
    if not spec.requeue:
        return f"""\
{_LEFT_EARLY}
echo "$asked, and the training is not complete. Submit this script again to go on." >&2
[[ $status -ne 0 ]] || status=3
exit "$status\""""
    return f"""\
{_LEFT_EARLY}

# Ranks that left well have saved. Where they did not, and nothing is new, another time would bring it no further.
if [[ $status -ne 0 && $(newest) == "$newest_before" ]]; then
    echo "$asked, and this job had not made and saved a step. Submit it with more --time." >&2
    exit 3
fi
echo "$asked: requeued, to go on from $(newest)."
if ! scontrol requeue "$job"; then
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
