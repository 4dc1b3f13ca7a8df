"""The ways in that people come from: torchrun's spellings, torch.distributed.launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import result_of, run
from instep.core.errors import SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.spec import TrainSpec
from instep.launch.membership.rendezvous import plan_store
from instep.launch.resources import free_ports


@pytest.fixture
def options_of_run(monkeypatch: pytest.MonkeyPatch):
    """Return a function that parses a command line of `run` or `train`, and returns its spec."""
    import instep.cli.run
    import instep.cli.train

    def parse(kind: type[LaunchSpec], *words: str) -> LaunchSpec:
        specs = []
        module = instep.cli.train if kind is TrainSpec else instep.cli.run
        command = module.train if kind is TrainSpec else module.run

        def keep(kind, values):
            specs.append(LaunchSpec.__new__(kind))
            specs[0].__init__(**{**values, "processes": int(values["processes"])})
            raise SpecError("parsed")

        monkeypatch.setattr(module, "make_spec", keep)
        with pytest.raises(SystemExit):
            command.main([*words, "x.py"])
        return specs[0]

    return parse


@pytest.mark.parametrize("kind", [LaunchSpec, TrainSpec])
def test_underscores_are_dashes(kind, options_of_run):
    words = ("--nproc_per_node=3", "--max_restarts", "2", "--rdzv_endpoint", "h_1:29", "--rdzv_id=a_b", "--node_rank=1")
    spec = options_of_run(kind, *words, "--nnodes=2", "--rdzv_backend=static", "--local_addr", "10.0.0.1")
    assert (spec.processes, spec.max_restarts, spec.rdzv_endpoint, spec.rdzv_id) == (3, 2, "h_1:29", "a_b")
    assert (spec.node_rank, spec.nnodes, spec.local_addr) == (1, "2", "10.0.0.1")


def test_underscores_in_every_option_and_choice(options_of_run):
    spec = options_of_run(
        TrainSpec, "--batch_size", "8", "--no_flush_denormals", "--comm", "shared_memory", "--eval_every=never"
    )
    assert (spec.batch_size, spec.flush_denormals, spec.comm, spec.eval_every) == (8, False, "shared-memory", "never")


def test_the_master_of_torchrun(options_of_run):
    words = ("--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=1234")
    spec = options_of_run(LaunchSpec, *words)
    assert (spec.rdzv_backend, spec.rdzv_endpoint, spec.master_addr, spec.master_port) == (
        "static",
        "10.0.0.1:1234",
        "",
        None,
    )
    assert spec.words() == [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--rdzv-backend",
        "static",
        "--rdzv-endpoint",
        "10.0.0.1:1234",
    ]
    plan = plan_store(spec)
    assert plan is not None
    assert (plan.host, plan.port, plan.is_host) == ("10.0.0.1", 1234, False)
    assert LaunchSpec(nnodes="2", master_addr="fd00::1").rdzv_endpoint == "[fd00::1]:29500"
    assert plan_store(LaunchSpec(master_port=29501)) is None  # one node chooses a free port, whatever is asked for
    assert LaunchSpec(standalone=True).rdzv_endpoint == ""


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"nnodes": "2", "master_port": 1}, "Add --master-addr"),
        ({"master_addr": "a", "rdzv_endpoint": "b:1"}, "both say where"),
        ({"master_port": -1}, "too small"),
        ({"standalone": True, "nnodes": "2"}, "Leave --standalone out"),
        ({"standalone": True, "rdzv_endpoint": "a:1"}, "Leave --standalone out"),
    ],
)
def test_what_contradicts_itself(options, part):
    with pytest.raises(SpecError, match=part):
        LaunchSpec(**options)


def test_torch_distributed_launch_with_a_tasks_file(tmp_path: Path):
    (port,) = free_ports(1)
    words = ("--nproc_per_node", "2", f"--master_port={port}", "examples/digits.py", "--steps", "2", "--json")
    done = run("python", "-W", "ignore", "-m", "torch.distributed.launch", *words, "--run_dir", str(tmp_path / "run"))
    result = result_of(done)
    assert (result["world_size"], result["steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("environ", "part"),
    [({}, "LOCAL_RANK, which it sets, too, is not set"), ({"LOCAL_RANK": "0"}, "contradicts LOCAL_RANK=0")],
)
def test_a_local_rank_that_is_wrong(environ, part):
    from instep.world.environment import check_local_rank

    check_local_rank(None, environ)
    check_local_rank(1, {"LOCAL_RANK": "1"})
    with pytest.raises(SpecError, match=re.escape(part)):
        check_local_rank(1, environ)


def test_main_ignores_the_local_rank_of_its_launcher(monkeypatch, capsys, tmp_path):
    import instep
    from tasks import Small

    words = ["--local_rank=1", "--steps", "1", "--batch-size", "10", "--quiet", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        instep.main(Small, [*words])
    assert ended.value.code == 2
    assert "--local-rank=1 is what torch.distributed.launch appends" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        instep.main(Small, [*words])
    assert ended.value.code == 0, capsys.readouterr().err
