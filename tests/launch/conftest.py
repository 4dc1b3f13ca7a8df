"""Launch an entry from a test, with what it printed."""

import io
from types import SimpleNamespace

import pytest

from instep.core.errors import RanksFailed
from instep.core.launch_spec import LaunchSpec
from instep.launch.launcher import LaunchJob, launch
from instep.launch.logs import LogPlan


@pytest.fixture
def run(tmp_path):
    """Return `run(entry, *args, **spec)`, which gives results, failures, out, err and the log directory."""

    def start(entry, *args, split=False, **spec):
        out, err = io.StringIO(), io.StringIO()
        logs = LogPlan(tmp_path / "logs", split)
        outcome = SimpleNamespace(results={}, failed=None, logs=logs.directory)
        spec.setdefault("processes", 2)
        try:
            outcome.results = launch(LaunchJob(entry, args, LaunchSpec(**spec), logs, stdout=out, stderr=err))
        except RanksFailed as failed:
            outcome.failed = failed
        outcome.out, outcome.err = out.getvalue(), err.getvalue()
        return outcome

    return start
