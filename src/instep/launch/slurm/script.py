"""Write the batch script of a job: pure, from a SubmitSpec to a script that a user can read, keep and submit again.

[Note: The life of a batch script]
SLURM runs the script on the first node of the allocation. The script starts one
launcher per node as a step, and waits. It passes USR1 (the time is nearly up) on to the step: the ranks save and exit,
and the script requeues the job. SIGTERM (preemption, scancel) goes from SLURM to the ranks directly; the script must
stay, because its end would end the step. Where a partition gives a grace time before it preempts, SLURM leaves the job
running until then, and signals the ranks but not always the script. So ranks that exit with 0 and without a result
were asked to. The queue distinguishes such a job, which is requeued, from a cancelled one, which is not.

A job of a search is alike. It has no result of its own: it is done when what its command printed says so.
"""

import shlex

from instep.core.version import __version__
from instep.launch.slurm.job import SubmitSpec

SCRIPT = "submit.sh"
COMMENT = "instep"
SEARCH_COMMENT = "instep-tune"
"""The comments by which `instep jobs` recognizes its jobs in the queue."""
_TRAPS = """\
# The ranks save before they stop. USR1 is passed on to them; SLURM itself sends them SIGTERM.
step='' stop=''
trap 'stop="The time is up"; [[ -z $step ]] || kill -USR1 "$step"' USR1
trap 'stop=${stop:-The job was preempted}' TERM"""
_CHECK_PRELUDE = """\
# A line of --prelude that fails ends the job here, before the training.
check_prelude() {
    local code=$?
    [[ $code -eq 0 ]] && return
    echo "--prelude: '$1' ended with exit code $code, so the training was not started." >&2
    exit 2
}"""


def batch_script(spec: SubmitSpec) -> str:
    """Return the whole script."""
    parts = [_header(spec), _TRAPS, *_prepare(spec), _variables(spec), _command(spec), _step(spec), _end(spec)]
    return "\n\n".join(parts) + "\n"


def _header(spec: SubmitSpec) -> str:
    # SLURM expands %j and the like in this option; a % in the path is doubled.
    log = str(spec.run_dir).replace("%", "%%") + "/logs/slurm-" + ("%A_%a" if spec.is_array else "%j") + ".out"
    lines = [
        "#!/bin/bash",
        f"# Written by instep {__version__}. Submit it again to continue the run:",
        f"#   sbatch {shlex.quote(str(spec.run_dir / SCRIPT))}",
        *_directives(
            ("job-name", spec.name),
            ("comment", COMMENT if spec.searchers is None else SEARCH_COMMENT),
            ("chdir", spec.cwd),
            ("output", log),
            ("open-mode", "append"),
            ("nodes", spec.nodes),
            ("ntasks-per-node", "1"),
            ("cpus-per-task", spec.cpus_per_node),
            ("gpus-per-node", spec.gpus_per_node),
            ("time", spec.time),
            ("partition", spec.partition),
            ("array", None if spec.array is None else f"0-{spec.array - 1}"),
        ),
        f"# SLURM signals this script, and no other process, {spec.signal_before_s} s before the time is up.",
        *_directives(("signal", f"B:USR1@{spec.signal_before_s}")),
        *(["# A node that fails is left out.", "#SBATCH --no-kill"] if spec.on_node_failure == "continue" else []),
        "#SBATCH --requeue" if spec.requeue else "#SBATCH --no-requeue",
    ]
    if spec.sbatch_options:
        lines += ["# Given after --:", f"#SBATCH {' '.join(map(_quoted, spec.sbatch_options))}"]
    return "\n".join(lines)


def _prepare(spec: SubmitSpec) -> list[str]:
    """Return the parts for --set-env and --prelude."""
    exports = [f"export {name}={shlex.quote(value)}" for name, _, value in (text.partition("=") for text in spec.env)]
    prelude = [line for text in spec.prelude for line in (text, f"check_prelude {shlex.quote(text)}")]
    parts = [exports, [_CHECK_PRELUDE, *prelude] if prelude else []]
    return ["\n".join(lines) for lines in parts if lines]


def _variables(spec: SubmitSpec) -> str:
    if spec.searchers is not None:
        return f"""\
run_dir={shlex.quote(str(spec.run_dir))} # of the search: all jobs of the array share it
outcome="$run_dir/logs/outcome-$SLURM_ARRAY_TASK_ID.json" # what --json prints in the end"""
    port = "port=$((15000 + SLURM_JOB_ID % 15000)) # differs between jobs that share a node"
    lines = [
        f"run_dir={shlex.quote(str(spec.run_dir))}",
        'run_dir+="${SLURM_ARRAY_TASK_ID:+/$SLURM_ARRAY_TASK_ID}" # each job of an array has its own',
    ]
    if spec.sweep:
        words = " ".join(map(shlex.quote, spec.sweep.words))
        lines += ["", f"# The jobs of this array differ in {spec.sweep.name}.", f"words=({words})"]
    if spec.nodes > 1:
        lines += ["", "# The launchers of all nodes meet at the first node, where this script runs.", port]
    return "\n".join(lines)


def _command(spec: SubmitSpec) -> str:
    name = "train" if spec.searchers is None else "tune"
    task = " ".join(map(shlex.quote, (spec.python, "-m", "instep.cli.entry", name, spec.task, *spec.values)))
    # Inside a scheduler's task, instep launches ranks only if it is given a rendezvous.
    endpoint = '"$SLURMD_NODENAME:$port"' if spec.nodes > 1 else "127.0.0.1:0"
    lines = ["command=(", f"    {task}"]
    if spec.options:
        lines.append(f"    {' '.join(map(shlex.quote, spec.options))}")
    if spec.searchers is not None:
        return "\n".join([*lines, f'    -n {spec.processes} --run-dir "$run_dir" --storage journal --json', ")"])
    if spec.sweep:  # after the options and values: the last one counts
        lines.append('    "${words[$SLURM_ARRAY_TASK_ID]}"')
    lines += [
        f'    -n {spec.processes} --run-dir "$run_dir"',
        f"    --nnodes {spec.nnodes} --rdzv-backend c10d --rdzv-endpoint {endpoint}",
        '    --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"',
        ")",
    ]
    return "\n".join(lines)


def _step(spec: SubmitSpec) -> str:
    flags = "--no-kill --kill-on-bad-exit=0 --wait=0" if spec.on_node_failure == "continue" else "--kill-on-bad-exit=1"
    if spec.cpus_per_node is not None:
        flags += f" --cpus-per-task={spec.cpus_per_node}"  # srun does not inherit it from sbatch
    return f"""\
{_LOOK_AT_RUN if spec.searchers is None else _LOOK_AT_SEARCH}
newest_before=$(newest) result_before=$(result)

# One launcher per node; it starts the ranks there.
srun --ntasks-per-node=1 {flags} "${{command[@]}}"{"" if spec.searchers is None else ' > "$outcome"'} &
step=$!
wait "$step"; status=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ended the wait, not the step
[[ $status -le 128 ]] || {{ wait "$step"; status=$?; }}
# If a signal and the end of the step coincide, bash loses the exit code; then the files below decide.
[[ $status -ge 0 ]] || status=0"""


_LOOK_AT_RUN = """\
newest() { find "$run_dir/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1; }
result() { stat --format=%i/%y "$run_dir/result.json" 2>/dev/null; }"""
_LOOK_AT_SEARCH = """\
# The newest checkpoint of any trial. This job is done if nothing is left to start, though others may still run trials.
newest() {
    find "$run_dir"/trials/*/checkpoints -maxdepth 1 -name 'step-*' -printf '%T@ %p\\n' 2>/dev/null |
        sort -n | tail -n 1 | cut -d ' ' -f 2-
}
result() { [[ ${status:-0} -eq 0 ]] && grep -oE '"status": "(complete|running)"' "$outcome" 2>/dev/null; }
rm -f "$outcome" # of this job before it was requeued"""


_CHECK_COMPLETE = """\
# A new result means that the training is complete, whatever happened to a node meanwhile. So does an old one if the
# ranks found nothing left to do.
result=$(result)
[[ -n $result && ( $result != "$result_before" || ( $status -eq 0 && -z $stop ) ) ]] && exit 0

# Ranks that exit with 0 and without a result were asked to stop, and have saved. All else is a failure.
[[ -n $stop || $status -eq 0 ]] || exit "$status"
stop=${stop:-The job was preempted}

# A task of an array is named by its index: the last task has the id of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
if ! state=$(squeue --noheader --jobs="$job" --format=%T/%r); then
    echo "$stop, and squeue failed. Submit this script again to continue." >&2
    exit 3
fi
# A cancelled job stays cancelled, and a job that SLURM has requeued itself needs nothing more.
[[ $state == RUNNING/* || $state == */TimeLimit ]] || exit "$status\""""


def _end(spec: SubmitSpec) -> str:
    if not spec.requeue:
        return f"""\
{_CHECK_COMPLETE}
echo "$stop, and the training is not complete. Submit this script again to continue." >&2
[[ $status -ne 0 ]] || status=3
exit "$status\""""
    return f"""\
{_CHECK_COMPLETE}

# Ranks that exit with 0 have saved. If they failed and there is no new checkpoint, a requeued job would get no further.
if [[ $status -ne 0 && $(newest) == "$newest_before" ]]; then
    echo "$stop, and this job saved no new step. Submit it with more --time." >&2
    exit 3
fi
echo "$stop: requeued, to continue from $(newest)."
if ! scontrol requeue "$job"; then
    echo "It could not be requeued. Submit this script again to continue." >&2
    exit 3
fi"""


def _directives(*pairs: tuple[str, object]) -> list[str]:
    return [f"#SBATCH {_quoted(f'--{name}={value}')}" for name, value in pairs if value is not None]


def _quoted(text: str) -> str:
    """Quote a text for sbatch's own parser, which is not the shell's: it does not expand $."""
    if text and not set(text) & set(" '\"\\#"):
        return text
    name, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}{equals}"{escaped}"'
