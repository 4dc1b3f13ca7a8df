"""`instep explain`: what bounded the speed of a run, and what to try next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE
from instep.monitor.bottleneck.verdict import explain_run, open_log

_NOTHING_TO_TRY = "Nothing was tried: no advice is an option of `instep train` with a predicted gain."


@command(
    "Say what bounded the speed of a run, how much time that cost, and what to try next (docs/see.md).",
    argument("run", Path, "RUN", "a run directory; the run may still train"),
    option(
        "try_it",
        bool,
        False,
        "also train the advice for a few steps, in turns with the same command without it, in scratch directories, and "
        "report the measured gain beside the predicted one",
        "--try",
    ),
    option("json", bool, False, "print the verdict as one line of JSON, and everything else to standard error"),
)
def explain(run: Path, try_it: bool, json: bool) -> int:
    """Explain a run's speed."""
    log = open_log(run)
    verdict = explain_run(log)
    if (damage := log.damage_text()) is not None:
        say(f"notice: {damage}")
    (say if json else print)(verdict.text)
    trial = None
    if try_it:
        from instep.cli.try_advice import try_advice

        trial = try_advice(run, verdict, say)
        (say if json else print)(_NOTHING_TO_TRY if trial is None else trial.text)
    if json:
        tried = {"tried": None if trial is None else asdict(trial)} if try_it else {}
        print_json(verdict.to_json() | tried)
    return EXIT_DONE
