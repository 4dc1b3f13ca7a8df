"""The pod: one elastic agent, the volumes, the memory that processes share. Pure."""

from __future__ import annotations

from typing import Any

from instep.core.errors import EXIT_SPEC, EXIT_USER
from instep.launch.kubernetes.asked import PORT, TASK_FOLDER, KubernetesSpec
from instep.launch.kubernetes.yaml import Noted
from instep.world.device import ACCELERATORS

PREEMPTED = 143
"""What a pod ends with that was asked to go and has saved: 0 would pass for a training that is done."""
_JOIN_S = 1800
"""How long a pod waits for the others: some may have to wait for a machine, and for the image."""
_SHM = (
    "Processes of one pod speak, and DataLoader's workers pass samples, through /dev/shm.\n"
    "A container has 64 MB of it unless more is mounted; it counts as the pod's memory."
)
_CLAIM = "All pods read and write the run directory: the claim must be ReadWriteMany."
_GRACE = "At SIGTERM all ranks save at one step; this is the time they have for it."
_HOST = "The address that the other pods reach this one at."


def agent_command(spec: KubernetesSpec, host: str) -> list[str]:
    """Give the command line of one pod's agent; the pods meet at `host`, which is the first of them."""
    words = ["instep", "train", spec.task, *spec.words, "--run-dir", spec.run_dir]
    words += ["--nproc-per-node", str(spec.processes), "--preempted-exit", str(PREEMPTED)]
    escaped = [word.replace("$", "$$") for word in words]  # Kubernetes would read $(A) as a variable
    if spec.max_nodes > 1:
        escaped += ["--nnodes", spec.nodes, "--rdzv-endpoint", f"{host}:{PORT}", "--rdzv-id", spec.name]
        escaped += ["--rdzv-conf", f"join_timeout={_JOIN_S}", "--local-addr", "$(POD_IP)"]
    return escaped


def container(spec: KubernetesSpec, name: str, host: str, port_name: str) -> dict[str, Any]:
    """Describe the one container of a pod."""
    env: list[Any] = [{"name": key, "value": value.replace("$", "$$")} for key, value in spec.env]
    if spec.max_nodes > 1:
        env.append(Noted(_HOST, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}))
    mounts: list[Any] = [{"name": f"volume-{n}", "mountPath": volume.path} for n, volume in enumerate(spec.volumes)]
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})  # noqa: S108 - in the pod
    if spec.task_text is not None:
        mounts.append({"name": "task", "mountPath": TASK_FOLDER, "readOnly": True})
    found: dict[str, Any] = {"name": name, "image": spec.image, "command": agent_command(spec, host)}
    found |= {"env": env} if env else {}
    found["ports"] = [{"name": port_name, "containerPort": PORT}]
    found |= {"resources": resources} if (resources := _resources(spec)) else {}
    return {**found, "volumeMounts": mounts}


def _resources(spec: KubernetesSpec) -> dict[str, Any]:
    """Ask for what a pod needs: memory and GPUs are given whole or not at all, so asking is also the limit."""
    asked = {"cpu": spec.cpus, "memory": spec.memory}
    requests = {name: value for name, value in asked.items() if value is not None}
    limits: dict[str, Any] = {"memory": spec.memory} if spec.memory is not None else {}
    if spec.gpus_per_node:
        limits[next(iter(ACCELERATORS.values())).kubernetes_resource] = spec.gpus_per_node
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def pod_spec(
    spec: KubernetesSpec, host: str, restart: str, container_name: str = "train", port_name: str = "rendezvous"
) -> dict[str, Any]:
    """Describe a pod."""
    volumes: list[Any] = [
        Noted(_CLAIM, {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.claim}})
        if n == 0
        else {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.claim}}
        for n, volume in enumerate(spec.volumes)
    ]
    volumes.append(Noted(_SHM, {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}))
    if spec.task_text is not None:
        volumes.append({"name": "task", "configMap": {"name": f"{spec.name}-task"}})
    return {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": Noted(_GRACE, spec.grace_s),
        "containers": [container(spec, container_name, host, port_name)],
        "volumes": volumes,
    }


def failure_policy(container_name: str) -> dict[str, Any]:
    """Say which ends are worth another try: what a machine did is, what the code or the command line did is not."""

    def on_exit(values: list[int]) -> dict[str, Any]:
        return {"containerName": container_name, "operator": "In", "values": values}

    lost = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "rules": [
            Noted(
                "A wrong command line, or an error in the Task: another try would end the same way.",
                {"action": "FailJob", "onExitCodes": on_exit([EXIT_USER, EXIT_SPEC])},
            ),
            Noted(
                "The machine was taken away: try again, and do not count it.",
                {"action": "Ignore", "onPodConditions": lost},
            ),
            Noted(
                "Asked to go, and saved: the same. All else (137: killed, out of memory) counts for backoffLimit.",
                {"action": "Ignore", "onExitCodes": on_exit([PREEMPTED])},
            ),
        ]
    }
