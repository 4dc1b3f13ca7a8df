"""The options of a training on Kubernetes, checked. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from instep.core.errors import SpecError

Kind = Literal["trainjob", "pytorchjob", "job"]

PORT = 29400
TASK_FOLDER = "/run/instep/task"
"""Where the pods mount the ConfigMap with the Task's file."""
_MAX_NAME_LENGTH = 48
"""With a suffix (-worker-1000, -node-0-1000), a pod's name has at most 63 characters."""
MAX_TASK_BYTES = 240 << 10
"""`kubectl apply` copies the object as JSON into an annotation; all annotations together may have 256 KiB."""
_CONFIG_MAP_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim and its mount path in the pods."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Parse CLAIM:/path."""
        claim, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            raise SpecError(f"volume={text!r} is not CLAIM:/path. Write for instance training-data:/data.")
        check_name("volume", claim, max_length=253)
        return cls(claim, str(PurePosixPath(path)))

    def holds(self, path: str) -> bool:
        """Return whether a path lies on this volume."""
        return ".." not in PurePosixPath(path).parts and PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """A training on Kubernetes: one pod per node, one launcher per pod."""

    name: str
    image: str
    task: str
    """TASK.py[:Class], with its path in the pods."""
    words: tuple[str, ...]
    """Values of the Task's fields and options of `train`."""
    nodes: str
    processes: int | str
    run_dir: str
    volumes: tuple[Volume, ...]
    namespace: str | None = None
    gpus_per_node: int = 0
    cpus: str | None = None
    memory: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    grace_s: int = 120
    max_restarts: int = 3
    task_text: str | None = None
    """The content of the Task's file, if a ConfigMap carries it."""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.namespace is not None:
            check_name("namespace", self.namespace, max_length=63)
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nodes) or self.min_nodes > self.max_nodes:
            raise SpecError(f"nodes={self.nodes!r} is neither a number nor MIN:MAX. Use for instance 2, or 1:4.")
        if not self.image or re.search(r"\s", self.image):
            raise SpecError(f"image={self.image!r} is not the name of an image. Write it as for docker pull: NAME:TAG.")
        if self.gpus_per_node < 0 or self.grace_s < 1:
            raise SpecError(f"gpus_per_node={self.gpus_per_node}, grace={self.grace_s}: use at least 0 GPUs, 1 s.")
        for resource, value in (("cpus", self.cpus), ("memory", self.memory)):
            if value is not None and not _QUANTITY.fullmatch(value):
                raise SpecError(f"{resource}={value!r} is not a quantity. Write for instance --cpus 8, --memory 16Gi.")
        self._check_run_dir()

    def _check_run_dir(self) -> None:
        why = "A pod's own files are deleted with the pod, and no other pod sees them: checkpoints would be lost"
        if not self.volumes:
            raise SpecError(
                f"There is no volume for the run directory {self.run_dir}. {why}. Give --volume CLAIM:/path with a "
                "PersistentVolumeClaim that all pods can mount (ReadWriteMany)."
            )
        if not any(volume.holds(self.run_dir) for volume in self.volumes):
            mounted = ", ".join(volume.path for volume in self.volumes)
            raise SpecError(
                f"run_dir={self.run_dir} lies on none of the volumes ({mounted}). {why}. Use a path on one of them."
            )
        paths = [volume.path for volume in self.volumes] + [TASK_FOLDER, "/dev/shm"]  # noqa: S108 - in the pods
        if twice := sorted({path for path in paths if paths.count(path) > 1}):
            raise SpecError(f"{', '.join(twice)} would be mounted twice. Give each --volume a path of its own.")

    @property
    def min_nodes(self) -> int:
        """The least number of pods that train."""
        return int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The number of pods that are started."""
        return int(self.nodes.split(":")[-1])


def check_name(field: str, name: str, max_length: int = _MAX_NAME_LENGTH) -> None:
    """Raise SpecError unless Kubernetes accepts the name: DNS-1123, and a letter first, as for a Service."""
    if len(name) > max_length:
        raise SpecError(f"{field}={name!r} has {len(name)} characters. Use at most {max_length}.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and not (
        field == "volume" and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)
    ):
        raise SpecError(
            f"{field}={name!r} is not a valid name in Kubernetes. Use lower-case letters, digits and -, with a letter "
            f"first and no - last, for instance {as_name(name)!r}."
        )


def as_name(text: str) -> str:
    """Return a valid Kubernetes name that resembles the text."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return dashed[:_MAX_NAME_LENGTH].rstrip("-") or "training"


def parse_env(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse NAME=VALUE texts."""
    for text in texts:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", text):
            raise SpecError(f"set_env={text!r} is not NAME=VALUE.")
    return tuple((name, value) for name, _, value in (text.partition("=") for text in texts))


def task_key(file: str) -> str:
    """Return the ConfigMap key for a Task's file: its own name, if that is a valid key."""
    name = PurePosixPath(file).name
    return name if _CONFIG_MAP_KEY.fullmatch(name) else "task.py"


def check_task_text(path: str, data: bytes) -> str:
    """Return the text of a Task's file; raise SpecError if a ConfigMap cannot carry it."""
    try:
        text = data.decode()
        compile(text, path, "exec", dont_inherit=True)
    except (UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise SpecError(f"{path} is not a Python file that the pods could load: {error}.") from None
    if (size := _bytes_as_json(text)) > MAX_TASK_BYTES:
        raise SpecError(
            f"{path} takes {size:,} bytes as JSON, and kubectl apply takes at most {MAX_TASK_BYTES:,} in a ConfigMap. "
            "Put the file into the image, and give its path there."
        )
    return text


def _bytes_as_json(text: str) -> int:
    """Return the size of a text as kubectl encodes it, which escapes some characters that Python does not."""
    return len(json.dumps(text, ensure_ascii=False).encode()) + 5 * len(re.findall("[<>&\u2028\u2029]", text))
