"""Real scripts: what ranks write down about their steps, what rules make of it, and that nothing else changes."""

import json
import re
from pathlib import Path

import pytest

import commands

SCRIPT = Path(__file__).parent / "scripts" / "gradient_steps.py"
SOUND = ("accumulated", "gan", "oddities", "local_sgd", "weighted", "closures", "scaled")
WRONG = ("carried", "bypassed", "unfrozen", "contrasted", "correlated", "summed")
RULES = {
    "accumulation-scale",
    "clipping",
    "ddp-options",
    "forward-bypasses-ddp",
    "gather-cuts-gradient",
    "gradients-differ",
    "loss-summed",
    "no-sync-misplaced",
    "optimizer-before-wrapping",
    "parameters-changed-after-wrapping",
    "wrong-device",
    "zero-grad",
}


def _weights(text: str) -> list[str]:
    return sorted(re.findall(r"weights (\w.* [0-9a-f]{64})$", text, re.MULTILINE))


def _check(*ways: str) -> tuple[set[tuple[str, str]], str]:
    """Return (rule, comment of its line) of all findings of these rules, and what the script printed."""
    done = commands.run("instep", "check", "-n", "2", "--steps", "200", "--json", str(SCRIPT), *ways)
    assert done.stdout, done.stderr
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    return {
        (finding["rule"], lines[finding["line"] - 1].partition("# ")[2])
        for finding in findings
        if finding["rule"] in RULES and finding["evidence"] != lines[finding["line"] - 1].strip()  # what was only read
    }, done.stderr


def test_sound_scripts_stay_silent_and_compute_the_same_bits():
    findings, printed = _check(*SOUND)
    assert findings == set()
    alone = commands.run("instep", "run", "-n", "2", str(SCRIPT), *SOUND)
    assert _weights(printed) == _weights(alone.stdout)
    assert len(_weights(printed)) == 2 * len(SOUND)


def test_mistakes_are_found_at_their_lines():
    findings, _ = _check(*WRONG)
    assert {rule for rule, comment in findings if comment == rule} == {
        "accumulation-scale",
        "ddp-options",
        "forward-bypasses-ddp",
        "gather-cuts-gradient",
        "gradients-differ",
        "loss-summed",
        "parameters-changed-after-wrapping",
        "zero-grad",
    }
    assert {rule for rule, comment in findings if comment != rule} == {"gather-cuts-gradient"}


# Sharding, compiling and scaling go the same way through rules: test_step_rules.py, test_gradient_rules.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "rules"),
    [
        ("sharded", set()),
        ("flat", set()),
        ("compiled", set()),
        ("scaled wrong", {"clipping"}),
        ("sharded wrong", {"no-sync-misplaced"}),
        ("flat wrong", {"clipping"}),
        ("stale", {"optimizer-before-wrapping"}),
    ],
)
def test_sharded_compiled_scaled(way: str, rules: set[str]):
    assert {rule for rule, _ in _check(way)[0]} == rules
