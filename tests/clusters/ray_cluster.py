"""A real Ray of two nodes on this machine, one CPU each, in a network namespace with loopback only."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from commands import start
from loopback import Loopback, loopback_only

PORT = 6399
_START = ("start", "--num-cpus", "1", "--object-store-memory", "80000000", "--disable-usage-stats")
_HIDE = 'mount -t tmpfs none "$1" && shift && exec "$@"'


class RayHome:
    """A namespace for Ray, and the folders that it keeps its files in."""

    def __init__(self, inside: Loopback, folder: Path) -> None:
        self.inside, self.folder = inside, folder
        self.env = {"HOME": str(folder), "RAY_TMPDIR": str(folder), "RAY_worker_niceness": "0"}
        """For every process that has to do with this Ray; its workers are not to stand back behind other tests."""

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of the environment in here."""
        return start(*self.inside.words(*words), env=self.env)

    def run(self, *words: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment in here to its end."""
        process = self.start(*words)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


class RayCluster(RayHome):
    """A running cluster."""

    address = f"127.0.0.1:{PORT}"

    @property
    def hidden(self) -> Path:
        """A folder of which the second node sees nothing."""
        return self.folder / "hidden"

    def start_nodes(self) -> None:
        """Start the head, then the other node."""
        self.hidden.mkdir()
        self._ray("--head", "--port", str(PORT), "--include-dashboard=false")
        hide = ("/usr/bin/unshare", "--mount", "sh", "-c", _HIDE, "sh", str(self.hidden))
        self._ray("--address", self.address, before=hide)

    def _ray(self, *words: str, before: tuple[str, ...] = ()) -> None:
        ray = self.inside.words("ray")[-1]
        done = self.run(*before, ray, *_START, *words)
        assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def ray_home(kind: type[RayHome] = RayHome) -> Iterator[RayHome]:
    """Have a place to run a Ray in for as long as the block lasts."""
    # Not pytest's folder: the paths of Ray's sockets would be too long for the kernel.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        with loopback_only() as inside:
            yield kind(inside, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Have a cluster for as long as the block lasts."""
    with ray_home(RayCluster) as cluster:
        assert isinstance(cluster, RayCluster)
        cluster.start_nodes()
        yield cluster
