"""`--hosts a,b` over a real ssh: same bits, same code everywhere or a word about it, and nothing left behind."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from commands import ROOT, TESTS, is_alive, pids_of, result_of, run, start, steps_in, wait_for
from instep.cli.app import app
from instep.cli.hosts import judge
from instep.core.errors import EnvironmentFailed, SpecError
from instep.core.launch_spec import LaunchSpec
from instep.core.spec import TrainSpec
from instep.launch.hosts.plan import (
    check_addresses,
    exit_code_of,
    launcher_specs,
    outcome,
    parse_hosts,
    remote_command,
)
from instep.launch.hosts.preflight import HostInfo, compare
from rings import unless
from sshd import Hosts, fake_version, ssh_hosts

DIGITS = str(ROOT / "examples" / "digits.py")
SLOW = str(TESTS / "faults" / "slow_task.py")
PLAIN = ('exec sh -c "$SSH_ORIGINAL_COMMAND"\n',)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with ssh_hosts(tmp_path_factory.mktemp("ssh") / "server") as connected:
        yield connected


@pytest.fixture(autouse=True)
def _as_usual(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "hosts" in request.fixturenames:
        request.getfixturevalue("hosts").force(*PLAIN)


def remote_processes(hosts: Hosts) -> list[str]:
    """What runs on the hosts: all that sessions of this sshd have started, by its command line."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            session = [value for value in path.read_bytes().split(b"\0") if value.startswith(b"SSH_CONNECTION=")]
            words = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if session and session[0].endswith(f" {hosts.port}".encode()) and words:
            processes.append(words)
    return processes


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and see that it is gone afterwards."""
    process = start(*words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class TestTraining:
    @pytest.mark.timeout(120)
    def test_two_hosts_train_to_the_bits_of_one_process(self, tmp_path: Path, hosts: Hosts) -> None:
        patch = ".".join([*importlib.metadata.version("torch").split(".")[:2], "99"])
        hosts.force(fake_version(tmp_path / "fake", "torch", patch))
        options = ("--exact", "--epochs", "1", "--json")
        words = ("instep", "train", DIGITS, *options, "--hosts", "hosta,hostb", "--ssh", hosts.ssh)
        with started(*words, "--run-dir", str(tmp_path / "run")) as both:
            alone = result_of(run("python", DIGITS, *options, "--run-dir", str(tmp_path / "alone")))
            out, err = both.communicate(timeout=100)
        done = result_of(subprocess.CompletedProcess(words, both.returncode, out, err))
        assert len(out.splitlines()) == 1
        assert done["world_size"] == 2
        assert done["weights_sha256"] == alone["weights_sha256"]
        assert f"warning: hostb: torch {patch}, here" in err  # a patch apart: worth a word, no more
        assert "[hosta] " in err
        assert "[hostb] " in err
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".instep")] == []

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize(
        "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))]
    )
    def test_nothing_is_left_behind(self, tmp_path: Path, hosts: Hosts, number: int) -> None:
        run_dir = tmp_path / "run"
        options = ("--steps", "2000", "--batch-size", "12", "--drop-last", "pause_s=0.05", "--json")
        options += ("--preempted-exit", "143")
        words = ("instep", "train", SLOW, *options, "--hosts", "hosta,hostb", "--ssh", hosts.ssh)
        with started(*words, "--run-dir", str(run_dir)) as local:
            wait_for(lambda: len(steps_in(run_dir)) >= 3, timeout_s=60)
            workers = pids_of(run_dir, 2)
            assert all(map(is_alive, workers))
            assert sum("instep.launch.hosts.supervisor" in words for words in remote_processes(hosts)) == 2
            local.send_signal(number)
            if number == signal.SIGKILL:
                local.wait()
            else:
                out, err = local.communicate(timeout=60)
                assert local.returncode == (130 if number == signal.SIGINT else 143), err
                assert "failed first" not in err
                assert number == signal.SIGINT or json.loads(out)["status"] == "preempted"
            wait_for(lambda: not remote_processes(hosts) and not any(map(is_alive, workers)), timeout_s=30)
        if number != signal.SIGINT:  # SIGKILL too: the agents have noticed, and had time to save
            assert list((run_dir / "checkpoints").glob("step-*"))


class TestBefore:
    def train(self, hosts: Hosts, folder: Path, names: str, *more: str) -> subprocess.CompletedProcess[str]:
        options = ("--steps", "1", "--hosts", names, "--ssh", hosts.ssh, "--run-dir", str(folder / "run"))
        return run("instep", "train", DIGITS, *options, *more)

    def refused(self, done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        for part in parts:
            assert part in done.stderr, f"{part!r} is not in {done.stderr!r}"

    def test_a_host_is_down(self, tmp_path: Path, hosts: Hosts) -> None:
        done = self.train(hosts, tmp_path, "hosta,down")
        self.refused(done, 3, "down: ssh cannot connect", "Connection refused", "Nothing was started")
        assert "hosta:" not in done.stderr
        assert not (tmp_path / "run").exists()

    def test_another_torch(self, tmp_path: Path, hosts: Hosts) -> None:
        hosts.force(fake_version(tmp_path, "torch", "1.99.0"))
        done = self.train(hosts, tmp_path, "hosta,hostb")
        self.refused(done, 3, "hostb: torch 1.99.0, here 2.", "--allow-differences")
        assert not (tmp_path / "run").exists()

    @unless("namespaces")
    def test_another_disk_and_another_file(self, tmp_path: Path, hosts: Hosts) -> None:
        mounted = 'exec unshare --mount sh -c "mount {} && $SSH_ORIGINAL_COMMAND"\n'
        hosts.force(mounted.format(f"-t tmpfs tmpfs {tmp_path}"))
        self.refused(
            self.train(hosts, tmp_path, "hosta,hostb"), 3, f"hostb: its {tmp_path} is not the same folder as hosta's"
        )
        (other := tmp_path / "other.py").write_text("x = 1\n")
        hosts.force(mounted.format(f"--bind {other} {DIGITS}"))
        self.refused(self.train(hosts, tmp_path, "hosta,hostb"), 3, f"hostb: {DIGITS} differs (sha256 ")

    def test_a_folder_that_is_not_there(self, tmp_path: Path, hosts: Hosts) -> None:
        hosts.force('exec sh -c "$(printf %s "$SSH_ORIGINAL_COMMAND" | sed \'s#^cd #cd /nowhere#\')"\n')
        self.refused(self.train(hosts, tmp_path, "hosta,hostb"), 3, "hostb: instep cannot run there", "/nowhere")

    def test_asked_to_stop_before_anything_is_started(self, tmp_path: Path, hosts: Hosts) -> None:
        options = ("--hosts", "hosta,hostb", "--ssh", hosts.ssh, "--run-dir", str(tmp_path / "run"))
        with started("instep", "train", SLOW, *options, "--preempted-exit", "143") as local:
            assert local.stderr is not None
            assert local.stderr.readline().startswith("looking at hosta, hostb")
            local.send_signal(signal.SIGUSR1)
            _, err = local.communicate(timeout=40)
        assert (local.returncode, err) == (143, "asked to stop before anything was started.\n")
        assert not (tmp_path / "run").exists()

    def test_no_such_program(self, tmp_path: Path, hosts: Hosts) -> None:
        done = run("instep", "train", DIGITS, "--hosts", "a,b", "--ssh", "no-such-ssh")
        self.refused(done, 3, "no-such-ssh is not on the path")

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (("--hosts", "a,b:22"), "'b:22' is not a host"),
            (("--hosts", "a,-oProxyCommand=x"), "is not a host"),
            (("--hosts", "a,a"), "names a twice"),
            (("--ssh", "ssh -v"), "--ssh and --allow-differences are for --hosts"),
            (("--hosts", "a,b", "--ssh", "'"), "cannot be read"),
        ],
    )
    def test_input(self, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str) -> None:
        with pytest.raises(SystemExit) as end:
            app(args=["train", DIGITS, *words])
        assert end.value.code == 2
        assert part in capsys.readouterr().err


class TestScripts:
    @pytest.mark.timeout(100)
    def test_the_first_failure_s_exit_code(self, tmp_path: Path, hosts: Hosts) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            "import os, sys, time\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1])\n"
            "if os.environ['RANK'] == '1': raise KeyError('seventeen')\ntime.sleep(60)\n"
        )
        done = run("instep", "run", "--hosts", "hosta,hostb", "--ssh", hosts.ssh, str(script), "a b", timeout_s=90)
        assert done.returncode == 1, done.stderr
        assert "KeyError: 'seventeen'" in done.stderr
        assert "rank 0 of 2 a b" in done.stdout
        assert "failed first, with exit code 1" in done.stderr
        wait_for(lambda: not remote_processes(hosts), timeout_s=20)


class TestGuard:
    def start(self, *command: str) -> subprocess.Popen[str]:
        guard = subprocess.Popen(
            [sys.executable, "-m", "instep.launch.hosts.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        guard.stdin.write(json.dumps(command) + "\n")
        guard.stdin.flush()
        return guard

    @pytest.mark.parametrize("end", ["killed", "terminated", "let go"])
    def test_the_agent_ends_with_it(self, end: str) -> None:
        with self.start("sh", "-c", "echo $$; exec sleep 100") as guard:
            agent = int(guard.stdout.readline())
            assert is_alive(agent)
            {"killed": guard.kill, "terminated": guard.terminate, "let go": guard.stdin.close}[end]()
            wait_for(lambda: not is_alive(agent), timeout_s=5)

    def test_signals_and_the_exit_code(self) -> None:
        script = "trap 'echo told; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
        with self.start("sh", "-c", script) as guard:
            assert guard.stdout.readline() == "ready\n"
            guard.stdin.write("\nSIGUSR1\n")
            guard.stdin.flush()
            assert guard.stdout.readline() == "told\n"
            assert guard.wait(10) == 7


HERE = HostInfo(instep="0.1.0", code="c1", python="3.11.2", torch="2.13.0+cpu", numpy="2.4.6", file="f1", port=1)


class TestPlans:
    @pytest.mark.parametrize(
        ("there", "text", "fatal"),
        [
            ({"torch": "2.11.0"}, "b: torch 2.11.0, here 2.13.0+cpu", True),
            ({"torch": "2.13.1"}, "b: torch 2.13.1, here 2.13.0+cpu", False),
            ({"torch": "2.13.0+cu128"}, "b: torch 2.13.0+cu128, here 2.13.0+cpu", False),
            ({"torch": ""}, "b: torch is not installed, here 2.13.0+cpu", True),
            ({"python": "3.12.2"}, "b: python 3.12.2, here 3.11.2", True),
            ({"python": "3.11.9"}, "b: python 3.11.9, here 3.11.2", False),
            ({"numpy": "1.26.0"}, "b: numpy 1.26.0, here 2.4.6", False),
            ({"instep": "0.2.0", "code": "c2"}, "b: instep 0.2.0, here 0.1.0", True),
            ({"code": "c2"}, "b: instep's files differ (c2, here c1)", True),
            ({"file": "f2"}, "b: t.py differs (sha256 f2, here f1)", True),
            ({"file": ""}, "b: t.py does not exist", True),
        ],
    )
    def test_differences(self, there: dict[str, str], text: str, fatal: bool) -> None:
        (actual,) = compare(HERE, replace(HERE, **there), "b", "t.py")
        assert (actual.text, actual.fatal) == (text, fatal)

    def test_the_same(self) -> None:
        assert compare(HERE, HERE, "b", "t.py") == []

    def test_differences_are_allowed(self, capsys: pytest.CaptureFixture[str]) -> None:
        answers = {"b": replace(HERE, torch="2.11.0", code="c2")}
        with pytest.raises(EnvironmentFailed, match=r"b: torch 2\.11\.0, here"):
            judge(HERE, answers, "t.py", allowed=False)
        judge(HERE, answers, "t.py", allowed=True)
        assert capsys.readouterr().err.count("warning: b: ") == 2
        with pytest.raises(EnvironmentFailed, match=r"t\.py does not exist"):
            judge(HERE, {"b": replace(HERE, file="")}, "t.py", allowed=True)

    def test_agents_meet_at_the_first(self) -> None:
        spec = TrainSpec(hosts="a,b", ssh="ssh -v", processes=2, epochs=2, rdzv_conf="join_timeout=9")
        actual = launcher_specs(spec, {"a": "10.0.0.1", "b": "b.lan"}, 4711, "job")
        shared = ["--nproc-per-node", "2", "--nnodes", "2", "--rdzv-endpoint", "10.0.0.1:4711", "--rdzv-id", "job"]
        tails = {"a": ("1", "10.0.0.1"), "b": ("0", "b.lan")}
        for host, (is_host, address) in tails.items():
            own = ["--rdzv-conf", f"join_timeout=9,is_host={is_host}", "--local-addr", address]
            assert actual[host].words() == [*shared, *own, "--epochs", "2"]

    def test_contradictions(self) -> None:
        addresses = {"a": "10.0.0.1", "b": "10.0.0.2"}
        with pytest.raises(SpecError, match="nnodes=3 contradicts the 2 hosts"):
            launcher_specs(LaunchSpec(hosts="a,b", nnodes="3"), addresses, 1, "job")
        assert launcher_specs(LaunchSpec(hosts="a,b", nnodes="1:2"), addresses, 1, "job")["a"].nnodes == "1:2"
        with pytest.raises(SpecError, match="mean themselves"):
            check_addresses({"a": "127.0.0.1", "b": "10.0.0.2"})

    def test_a_remote_shell_sees_words_not_commands(self) -> None:
        text = remote_command("/a b; rm -rf $HOME", "/usr/bin/python3", "m", "/x:$(y)")
        assert text == "cd '/a b; rm -rf $HOME' && exec env 'PYTHONPATH=/x:$(y)' /usr/bin/python3 -P -m m"

    def test_which_failure_counts(self) -> None:
        assert outcome([("a", 0), ("b", 0)], {0}, 2) == (0, "")
        assert outcome([("a", 3), ("b", 1)], {0}, 2) == (1, "b")
        assert outcome([("a", 3), ("b", 130)], {0}, 2) == (3, "a")
        assert outcome([("a", 3), ("b", 0)], {0}, 1) == (0, "")  # --nnodes 1:2

    def test_preempted_is_no_failure(self) -> None:
        assert outcome([("a", 143), ("b", 143)], {0, 143}, 2) == (143, "")
        assert outcome([("a", 3), ("b", 143)], {0, 143}, 1) == (143, "")
        assert outcome([("a", 143), ("b", 1)], {0, 143}, 2) == (1, "b")
        assert outcome([("a", 143), ("b", 143)], {0}, 2) == (143, "a")

    def test_which_exit_codes_count(self) -> None:
        assert (exit_code_of(255), exit_code_of(-9), exit_code_of(143)) == (3, 3, 143)

    def test_users(self) -> None:
        assert parse_hosts("me@a.lan, b") == ("me@a.lan", "b")
