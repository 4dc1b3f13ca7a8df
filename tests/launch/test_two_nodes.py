"""Two launchers, as on two nodes, make one world and restart together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import patience
from launch_support import SCRIPTS


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.slow)])
def test_two_nodes_restart_together(tmp_path, backend):
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [
        patience.Popen(
            [sys.executable, SCRIPTS / "node.py", backend, endpoint, str(node_rank), tmp_path / "logs"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        )
        for node_rank in (0, 1)
    ]
    try:
        said = [node.communicate(timeout=50)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    # Only the last lines: torch itself may warn when the node with the store is the first to leave.
    assert sorted(text.splitlines()[-1] for text in said) == ["{0: 1}", "{1: 1}"]
