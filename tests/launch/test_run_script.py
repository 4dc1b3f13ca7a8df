"""Any script runs unchanged, and the ways it can end are distinguished."""

import pytest

import commands
from instep.launch.script import run_script
from launch_support import SCRIPTS


def script(run, name, *argv, **spec):
    return run(run_script, str(SCRIPTS / name), list(argv), False, **spec)


def test_multiprocessing_argparse_and_imports_beside(run):
    outcome = script(run, "helpers.py", "--n", "5")
    assert outcome.failed is None
    for rank in (0, 1):
        mine = [line.removeprefix(f"[rank{rank}] ") for line in outcome.out.splitlines() if f"rank{rank}" in line]
        assert mine == [
            "fork [25, 9]",
            "spawn [25, 9]",
            f"total 56 found beside the script {rank} 127.0.0.1",
            "handlers at exit run",
        ]


def test_workers_are_forks_of_the_command():
    """So torch is imported once. A forkserver that a script starts itself is not in the way of the command's."""
    done = commands.run("instep", "run", "-n", "1", str(SCRIPTS / "forked.py"))
    assert done.stdout.splitlines() == ["[rank0] ancestors 3", "[rank0] squares [9]"], done.stderr


def test_a_module_of_the_working_directory(run, monkeypatch):
    monkeypatch.chdir(SCRIPTS)
    outcome = run(run_script, "tool.report", ["--x", "${local_rank} $$"], True, processes=1)
    assert outcome.out == "[rank0] found in the package tool.report ['--x', '${local_rank} $$']\n"


@pytest.mark.parametrize(
    ("how", "code", "summary", "exit_code"),
    [
        ("sys.exit", 3, "sys.exit(3)", 1),
        ("sys.exit", 2, "sys.exit(2)", 2),
        ("os._exit", 7, "ended with exit code 7", 1),
        ("SIGKILL", 9, "killed (SIGKILL): out of memory", 3),
        ("SIGSEGV", 9, "killed (SIGSEGV)", 3),
    ],
)
def test_how_a_script_ended(run, how, code, summary, exit_code):
    failed = script(run, "leave.py", how, str(code)).failed
    assert [failure.rank for failure in failed.failures] == [1]
    assert failed.first.summary.startswith(summary)
    assert failed.first.exit_code == exit_code


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_exit_code_zero_is_no_failure(run, how):
    assert script(run, "leave.py", how, "0").results == {0: None, 1: None}


def test_a_script_that_is_not_there(run):
    failed = run(run_script, "nothing.py", [], False).failed
    assert failed.first.exit_code == 2
    assert "nothing.py" in failed.first.summary


def test_the_plain_example(run):
    example = SCRIPTS.parents[2] / "examples" / "plain_ddp.py"
    assert "test accuracy" in script(run, example, "--epochs", "1").out


def test_a_finished_run_never_aborts(run):
    for _ in range(6):
        assert script(run, "careless.py").failed is None
