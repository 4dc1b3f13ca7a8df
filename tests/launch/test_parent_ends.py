"""However the launcher ends, none of its processes is left, and nothing that they have shared."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from commands import BIN
from instep.world.shared_memory import SHARED_MEMORY
from launch_support import SCRIPTS


def session_members(session: int) -> list[str]:
    """Return the processes of a session, without zombies, which nobody here can reap."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(f"{process.pid} {process.name()}")
    return members


PROGRAM = (sys.executable, SCRIPTS / "launcher.py")
COMMAND = (BIN / "instep", "run", "-n", "2", "--log-dir")


@pytest.mark.parametrize(
    ("launching", "number", "code", "within_s"),
    [(COMMAND, signal.SIGKILL, -9, 2), (PROGRAM, signal.SIGINT, 130, 5), (COMMAND, signal.SIGTERM, 3, 5)],
)
def test_no_process_outlives_the_launcher(tmp_path, launching, number, code, within_s):
    temporary = tmp_path / ("too-long-for-a-socket-" * 4) / tmp_path.name
    temporary.mkdir(parents=True)
    command = [*launching, tmp_path / "logs", SCRIPTS / "long.py"]
    launcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        seen = []
        while sum("working" in line for line in seen) < 2:
            seen.append(launcher.stdout.readline())
            assert seen[-1], seen
        assert sum("launching" in line for line in seen) == (launching == PROGRAM)  # no worker ran that script
        assert any("instep:r1" in member for member in session_members(launcher.pid))
        launcher.send_signal(number)
        sent = time.monotonic()
        assert launcher.wait(10) == code
        while (left := session_members(launcher.pid)) and time.monotonic() - sent < within_s:
            time.sleep(0.02)
        assert left == []
        assert not list(SHARED_MEMORY.glob(f"*-{tmp_path.name}")), "what killed ranks have shared"
        said = launcher.stdout.read()
        assert "Traceback" not in said
        assert ("ended by SIGTERM" in said) == (number == signal.SIGTERM)
        assert list(temporary.glob("instep-*")) == []
    finally:
        launcher.kill()
        launcher.stdout.close()
