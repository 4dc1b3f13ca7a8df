"""Run the pods of a Job here, as a kubelet would: each a network, a hostname, processes and mounts of its own.

The container's command is run as the manifest has it, with its variables, its volumes and its /dev/shm. The image is
this machine's own files. What DNS would answer stands in the pods' /etc/hosts, and may be held back for a while.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import patience
from commands import BIN
from rings import require

UNSHARED = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc")


class Pods:
    """The pods of one Job; as a context it ends with all of them gone."""

    def __init__(self, documents: list[dict[str, Any]], claims: dict[str, Path], folder: Path) -> None:
        require("networks")
        self.job = next(document for document in documents if document["kind"] == "Job")
        self.config = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
        self.claims, self.folder = claims, folder
        self.name, self.count = self.job["metadata"]["name"], self.job["spec"]["completions"]
        assert self.count == 2, "two network namespaces are joined by one pair of devices"
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Pods:
        self._remove()
        for index in range(self.count):
            _ip("netns", "add", self._net(index))
            _ip("-n", self._net(index), "link", "set", "lo", "up")
            full = f"{self.pod_name(index)}.{self.name}.default.svc.cluster.local"
            own = f"{self.address(index)} {full} {self.pod_name(index)}"  # as a kubelet writes it
            self._hosts(index).write_text(f"127.0.0.1 localhost\n{own}\n")
        _ip("link", "add", "eth0", "netns", self._net(0), "type", "veth", "peer", "name", "eth0", "netns", self._net(1))
        for index in range(self.count):
            _ip("-n", self._net(index), "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", self._net(index), "link", "set", "eth0", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()  # and with unshare its whole PID namespace
            process.communicate()
        self._remove()

    def address(self, index: int) -> str:
        return f"10.77.{os.getpid() % 250}.{index + 1}"

    def pod_name(self, index: int) -> str:
        return f"{self.name}-{index}"

    def publish(self) -> None:
        """Let the cluster's DNS know the pods of the headless Service."""
        for index in range(self.count):
            with self._hosts(index).open("a") as file:
                for other in range(self.count):
                    name = f"{self.pod_name(other)}.{self.job['spec']['template']['spec']['subdomain']}"
                    file.write(f"{self.address(other)} {name}\n")

    def start(self, index: int) -> None:
        """Start a pod, or the one that takes its place."""
        pod = self.job["spec"]["template"]["spec"]
        container = pod["containers"][0]
        env = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "JOB_COMPLETION_INDEX": str(index)}
        env["PYTHONPATH"] = os.environ.get("PYTHONPATH", "")
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            env[variable["name"]] = self.address(index) if source == "status.podIP" else variable["value"]
        command = [_expanded(word, env) for word in container["command"]]
        orders = {
            "hostname": self.pod_name(index),
            "hosts": str(self._hosts(index)),
            "mounts": [self._mount(pod, mount) for mount in container["volumeMounts"]],
            "command": command,
        }
        self.processes[index] = patience.Popen(
            [
                *("ip", "netns", "exec", self._net(index), "unshare", *UNSHARED, "--fork", "--kill-child"),
                *(sys.executable, "-S", str(Path(__file__).with_name("pod_init.py")), json.dumps(orders)),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, index: int, timeout_s: float = 60) -> tuple[int, str, str]:
        """Wait for a pod's end; give its exit code and what it printed."""
        out, err = self.processes[index].communicate(timeout=timeout_s)
        return self.processes[index].returncode, out, err

    def terminate(self, index: int) -> None:
        """Ask a pod to go, as a kubelet does: SIGTERM to its first process."""
        unshare = self.processes[index].pid  # ip netns exec became unshare
        first = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()
        os.kill(int(first[0]), signal.SIGTERM)

    def _mount(self, pod: dict[str, Any], mount: dict[str, Any]) -> tuple[str, str]:
        """Say what is mounted where; an empty source is memory."""
        volume = next(each for each in pod["volumes"] if each["name"] == mount["name"])
        if "emptyDir" in volume:
            assert volume["emptyDir"] == {"medium": "Memory"}
            return "", mount["mountPath"]
        if "configMap" in volume:
            folder = self.folder / volume["configMap"]["name"]
            folder.mkdir(exist_ok=True)
            for name, text in self.config[volume["configMap"]["name"]].items():
                (folder / name).write_text(text)
            return str(folder), mount["mountPath"]
        return str(self.claims[volume["persistentVolumeClaim"]["claimName"]]), mount["mountPath"]

    def _hosts(self, index: int) -> Path:
        return self.folder / f"hosts-{index}"

    def _net(self, index: int) -> str:
        return f"instep-pod-{os.getpid()}-{index}"

    def _remove(self) -> None:
        for index in range(self.count):
            subprocess.run(["ip", "netns", "del", self._net(index)], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _expanded(word: str, env: dict[str, str]) -> str:
    """Expand as Kubernetes does: $(A) where A is known, $$ to $."""
    return re.sub(
        r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else env.get(match[1] or "", match[0]), word
    )
