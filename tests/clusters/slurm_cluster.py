"""A real SLURM of four nodes on this machine: a controller, four slurmd, a munged of its own.

Everything lives in one scratch folder and on free ports, so that two clusters can be up at once. The nodes differ
in name and port only; node1 to node4 are names of the loopback address.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import patience
from ranks import free_port

NODES = ("node1", "node2", "node3", "node4")
DAEMONS = os.pathsep + "/usr/sbin" + os.pathsep + "/sbin"
HOSTS = Path("/etc/hosts")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

# A requeued job waits for as long as a credential is good (120 s by default), hence cred_expire.
CONFIGURATION = """\
ClusterName=instep
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.log
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=60
SlurmdTimeout=60
MessageTimeout=30
NodeName=node[1-4] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{node_ports}] CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=node[1-4] Default=YES MaxTime=01:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=patient Nodes=node[1-4] MaxTime=01:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=25
PartitionName=high Nodes=node[1-4] Default=NO MaxTime=01:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""

# A test that runs out of time ends the test runner at once, with no chance to stop anything.
GUARD = """
while kill -0 "$1" 2>/dev/null; do sleep 1; done
squeue --noheader --format=%i | xargs --no-run-if-empty scancel
sleep 3
cat "$2"/*.pid | xargs --no-run-if-empty kill
sleep 1
rm -rf "$2"
"""


class SlurmCluster:
    """A running cluster: its environment, and what the tests do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**without_slurm(os.environ), "SLURM_CONF": str(folder / "slurm.conf")}
        """For every process that is to speak to this cluster."""
        self.env["PATH"] += DAEMONS
        self._daemons: dict[str, int] = {}
        self._guard: subprocess.Popen[bytes] | None = None

    def run(self, *words: str, timeout_s: float = 60, check: bool = True, **more: object) -> str:
        """Run a program of SLURM's to its end, and give what it printed."""
        done = patience.run(list(words), timeout=timeout_s, env=self.env, **more)
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *words: str, **more: object) -> str:
        """Submit a script; give the job's number."""
        return self.run("sbatch", "--parsable", *words, **more).strip().split(";")[0]

    def srun(self, *words: str, timeout_s: float = 60, check: bool = True, **more: object) -> str:
        """Run a step in an allocation of its own, and give what it printed."""
        return self.run("srun", *words, timeout_s=timeout_s, check=check, **more)

    def job(self, job: str) -> dict[str, str]:
        """Read all that the controller knows of a job."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self, job: str) -> str:
        """Return a job's state: PENDING, RUNNING, COMPLETED and so on."""
        return self.job(job)["JobState"]

    def wait(self, job: str, *states: str, timeout_s: float = 60, hurry: bool = False) -> str:
        """Wait until a job is in one of some states, or by default has ended; `hurry` starts a requeued one at once."""
        wanted = states or ENDED
        begun = pending = time.monotonic()
        while (state := self.state(job)) not in wanted:
            if state in ENDED or time.monotonic() > begun + timeout_s * patience.PATIENCE:
                told = self.run("scontrol", "show", "job", job)
                raise AssertionError(f"job {job} is {state} and not {wanted}\n{told}{self.output(job)}")
            if state != "PENDING":
                pending = time.monotonic()
            # Within the second in which it was requeued, its new credential would be taken for the revoked one.
            elif hurry and time.monotonic() > pending + 2.5:
                self.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
                pending = time.monotonic()
            time.sleep(0.2)
        return state

    def output(self, job: str) -> str:
        """Return the end of what a job has printed."""
        path = Path(self.job(job).get("StdOut", ""))
        return path.read_text(errors="replace")[-4000:] if path.is_file() else ""

    def queue(self) -> list[str]:
        """Number the jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").split()

    def processes(self, job: str) -> list[int]:
        """Find the processes of a job, wherever they are: their environment carries its number."""
        return [pid for pid in _pids() if self._is_of(pid, f"SLURM_JOB_ID={job}".encode())]

    def fail_node(self, node: str) -> None:
        """Let a node fail as if its power were cut: its processes are gone, and the controller finds it down."""
        os.kill(self._daemons[node], signal.SIGKILL)
        for pid in _pids():
            is_here = self._is_of(pid, f"SLURMD_NODENAME={node}".encode()) or self._is_daemon_of(pid, node)
            if is_here and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def heal_node(self, node: str) -> None:
        """Bring a node back."""
        if not _is_alive(self._daemons[node]):
            self._start_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
        self._wait_idle()

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        for name in ("state", "log", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        _add_hosts()
        words = ["bash", "-c", GUARD, "guard", str(os.getpid()), str(self.folder)]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._guard = subprocess.Popen(words, env=self.env, start_new_session=True, **quiet)
        self._start_munged()
        ports = _free_ports(1 + len(NODES))
        text = CONFIGURATION.format(
            folder=self.folder, controller_port=ports[0], node_ports=",".join(map(str, ports[1:]))
        )
        (self.folder / "slurm.conf").write_text(text)
        self._daemons["slurmctld"] = self._start_daemon("slurmctld", self.folder / "slurmctld.pid")
        for node in NODES:
            self._start_node(node)
        self._wait_idle()

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        if self._guard is not None:
            os.killpg(self._guard.pid, signal.SIGKILL)
            self._guard.wait()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            if jobs := self.queue():
                self.run("scancel", *jobs, check=False)
                _wait(lambda: not self.queue(), 20, "jobs are left")
        left = [pid for pid in self._daemons.values() if _is_alive(pid)]
        for pid in left:
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            _wait(lambda: not any(map(_is_alive, left)), 10, "daemons are left")
        for pid in filter(_is_alive, left):
            os.kill(pid, signal.SIGKILL)
        for pid in _pids():  # steps that outlived their slurmd
            if self._is_of(pid, f"SLURM_CONF={self.folder}/slurm.conf".encode()) and pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        words = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        words.append(f"--socket={self.folder}/munge.socket")
        self._daemons["munged"] = self._start_daemon("munged", self.folder / "munge.pid", *words)

    def _start_node(self, node: str) -> None:
        self._daemons[node] = self._start_daemon("slurmd", self.folder / f"slurmd.{node}.pid", "-N", node)

    def _start_daemon(self, name: str, pid_file: Path, *words: str) -> int:
        pid_file.unlink(missing_ok=True)
        self.run(name, *words, stdin=subprocess.DEVNULL)
        _wait(lambda: pid_file.exists() and pid_file.read_text().strip().isdigit(), 20, f"{name} did not start")
        return int(pid_file.read_text())

    def _wait_idle(self) -> None:
        def idle() -> bool:
            return self.run("sinfo", "--noheader", "--Node", "--partition=low", "--format=%t").split() == ["idle"] * 4

        _wait(idle, 40, "not all nodes are idle")

    def _is_of(self, pid: int, variable: bytes) -> bool:
        """Return whether a process of this cluster has a variable in its environment."""
        environment = _environment(pid)
        return variable in environment and f"SLURM_CONF={self.folder}/slurm.conf".encode() in environment

    def _is_daemon_of(self, pid: int, node: str) -> bool:
        """Return whether a process is a step's slurmstepd of a node: it has its slurmd's spool folder."""
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd"):
                return any(f"{self.folder}/spool/{node}" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        return False


@contextlib.contextmanager
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Have a cluster for as long as the block lasts."""
    folder = Path(tempfile.mkdtemp(prefix="instep-slurm-"))
    folder.chmod(0o755)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def without_slurm(environ: object) -> dict[str, str]:
    """Leave out what another allocation, or the test runner, has set."""
    ours = ("SLURM", "SBATCH_", "PYTEST_", "OMP_")
    return {name: value for name, value in dict(environ).items() if not name.startswith(ours)}


def _add_hosts() -> None:
    known = {name for line in HOSTS.read_text().splitlines() for name in line.partition("#")[0].split()[1:]}
    if missing := [node for node in NODES if node not in known]:
        with HOSTS.open("a") as file:
            file.write(f"127.0.0.1 {' '.join(missing)}\n")


def _free_ports(count: int) -> list[int]:
    """Find ports that nobody listens on."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
    deadline = time.monotonic() + timeout_s * patience.PATIENCE
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.1)
