"""Notes when a process imports torch, meets the others, and joins the process group.

Copied as `sitecustomize.py` in front of Python's path by startup.py, for the runs that show the split; the
timed runs don't have it. One JSON line a moment: what, begin or end, seconds since 1970, the process.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
import time

AGENT = "torch.distributed.elastic.agent.server.api"
GROUP = "torch.distributed.distributed_c10d"


def note(what, moment):
    line = json.dumps({"what": what, "moment": moment, "time": time.time(), "pid": os.getpid()}) + "\n"
    with open(os.environ["STARTUP_TRACE"], "a") as file:
        file.write(line)


def timed(what, function):
    def wrapper(*args, **kwargs):
        note(what, "begin")
        try:
            return function(*args, **kwargs)
        finally:
            note(what, "end")

    return wrapper


class Watch(importlib.abc.MetaPathFinder):
    """Lets the import system find a module, and times what its loader does."""

    def find_spec(self, name, path=None, target=None):
        if name not in ("torch", "torch._dynamo", AGENT, GROUP):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        execute = timed(f"import {name}", spec.loader.exec_module)

        def execute_and_wrap(module):
            execute(module)
            if name == GROUP:
                module.init_process_group = timed("process group", module.init_process_group)
            elif name == AGENT:
                agent = module.SimpleElasticAgent
                agent._rendezvous = timed("rendezvous", agent._rendezvous)

        spec.loader.exec_module = execute_and_wrap
        return spec


if "STARTUP_TRACE" in os.environ:
    note("python", "begin")
    sys.meta_path.insert(0, Watch())
