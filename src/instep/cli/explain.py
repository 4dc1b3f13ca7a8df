"""`instep explain`: what bounded the speed of a run, and what to try next."""

from __future__ import annotations

from pathlib import Path

from instep.cli.command import argument, command, option, print_json, say
from instep.core.errors import EXIT_DONE
from instep.monitor.bottleneck.verdict import explain_run, open_log


@command(
    "Say what bounded the speed of a run, how much time that cost, and what to try next (docs/see.md).",
    argument("run", Path, "RUN", "a run directory; the run may still train"),
    option("json", bool, False, "print the verdict as one line of JSON, and everything else to standard error"),
)
def explain(run: Path, json: bool) -> int:
    """Explain a run's speed."""
    log = open_log(run)
    verdict = explain_run(log)
    if (damage := log.damage_text()) is not None:
        say(f"notice: {damage}")
    if json:
        say(verdict.text)
        print_json(verdict.to_json())
    else:
        print(verdict.text)
    return EXIT_DONE
