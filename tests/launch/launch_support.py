"""What several tests of the launcher need."""

import contextlib
import subprocess
import sys
from pathlib import Path

from instep.events.schema import NodeRecord
from instep.launch.membership.node_info import NodeInfo

SCRIPTS = Path(__file__).parent / "scripts"


def is_alive(pid):
    """Say whether a process runs; a zombie, which nobody here may be able to reap, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


VERSIONS = {"instep": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "Python": "3.11.7", "CUDA": ""}


def node_record(host="h1", versions=None, **more):
    """Return the facts of a node that is like all others, but for what is given."""
    values = {"platform": {"torch": "2.13.0", "cpu": "AVX512"}, "variables": {}, "code": {}, "packages_sha256": "0"}
    return NodeRecord(host=host, versions=VERSIONS | (versions or {}), **values | more)


def node_info(key, host=None, versions=None, **more):
    """Return what such a node registers."""
    values = {"address": f"10.0.0.{key + 1}", "store_address": "10.0.0.1", "port": 1, "pid": 100 + key}
    values |= {"node_rank": None, "nnodes": "2", "backend": "c10d", "request": {"seed": 0}, "packages": {}}
    return NodeInfo(key=key, record=node_record(host or f"h{key + 1}", versions), **values | more)


@contextlib.contextmanager
def hosting(port, job="a"):
    """Host a control store in a process of its own, which may be stopped or killed."""
    plan = f"StorePlan('127.0.0.1', {port}, {job!r}, True)"
    code = f"""
import time
from instep.launch.membership.control_store import ControlStore
from instep.launch.membership.rendezvous import StorePlan
store = ControlStore.open({plan}, print)
print("here", flush=True)
time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout.readline() == "here\n"
            yield host
        finally:
            host.kill()
