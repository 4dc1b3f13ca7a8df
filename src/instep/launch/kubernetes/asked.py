"""What was asked of Kubernetes, and whether it can be. Pure."""

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
"""Where a Task's file that travels with the job is in the pods."""
_LONGEST_NAME = 48
"""With what is put behind it (-worker-1000, -node-0-1000), a pod's name ends at 63."""
MOST_TASK_BYTES = 240 << 10
"""`kubectl apply` writes what it is given into an annotation too, as JSON; all of these together have 256 KiB."""
_CONFIG_MAP_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,252}")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTP]i?)?")


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the pods see it."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Read CLAIM:/path."""
        claim, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            raise SpecError(f"volume={text!r} is not CLAIM:/path. Write for instance training-data:/data.")
        check_name("volume", claim, longest=253)
        return cls(claim, str(PurePosixPath(path)))

    def holds(self, path: str) -> bool:
        """Tell whether a path lies on this volume."""
        return ".." not in PurePosixPath(path).parts and PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """A training as Kubernetes is asked for it: one pod a machine, one agent a pod."""

    name: str
    image: str
    task: str
    """TASK.py[:Class], as the pods find it."""
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
    """The Task's file, where it travels with the job."""

    def __post_init__(self) -> None:
        check_name("name", self.name)
        if self.namespace is not None:
            check_name("namespace", self.namespace, longest=63)
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", self.nodes) or self.min_nodes > self.max_nodes:
            raise SpecError(f"nodes={self.nodes!r} is neither a number nor MIN:MAX. Use for instance 2, or 1:4.")
        if not self.image or re.search(r"\s", self.image):
            raise SpecError(f"image={self.image!r} names no image. Write it as docker pull takes it: NAME:TAG.")
        if self.gpus_per_node < 0 or self.grace_s < 1:
            raise SpecError(f"gpus_per_node={self.gpus_per_node}, grace={self.grace_s}: these cannot be negative.")
        for what in ("cpus", "memory"):
            value = getattr(self, what)
            if value is not None and not _QUANTITY.fullmatch(value):
                raise SpecError(
                    f"{what}={value!r} is not a quantity. Write for instance 8 or 500m cpus, 16Gi of memory."
                )
        self._check_run_dir()

    def _check_run_dir(self) -> None:
        why = "The pods share no disk of their own, and a pod's files go when it goes: checkpoints would be lost"
        if not self.volumes:
            raise SpecError(
                f"There is no volume for the run directory {self.run_dir}. {why}. Give --volume CLAIM:/path with a "
                "PersistentVolumeClaim that all pods can mount (ReadWriteMany)."
            )
        if not any(volume.holds(self.run_dir) for volume in self.volumes):
            known = ", ".join(volume.path for volume in self.volumes)
            raise SpecError(f"run_dir={self.run_dir} lies on none of the volumes ({known}). {why}. Use a path in one.")
        paths = [volume.path for volume in self.volumes] + [TASK_FOLDER, "/dev/shm"]  # noqa: S108 - in the pods
        twice = {path for path in paths if paths.count(path) > 1}
        if twice:
            raise SpecError(f"{', '.join(sorted(twice))} would be mounted twice. Give each --volume a path of its own.")

    @property
    def min_nodes(self) -> int:
        """The fewest pods to train on."""
        return int(self.nodes.split(":")[0])

    @property
    def max_nodes(self) -> int:
        """The pods that are started."""
        return int(self.nodes.split(":")[-1])


def check_name(what: str, name: str, longest: int = _LONGEST_NAME) -> None:
    """Refuse what Kubernetes would not take for a name (DNS-1123, and a letter first, as a Service wants it)."""
    if len(name) > longest:
        raise SpecError(f"{what}={name!r} has {len(name)} characters. Use at most {longest}.")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) and not (
        what == "volume" and re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name)
    ):
        raise SpecError(
            f"{what}={name!r} is no name for Kubernetes. Use lower-case letters, digits and -, with a letter first and "
            f"no - last; {as_name(name)!r} would do."
        )


def as_name(text: str) -> str:
    """Make a name that Kubernetes takes out of any text."""
    dashed = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return dashed[:_LONGEST_NAME].rstrip("-") or "training"


def parse_env(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Read A=B texts."""
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise SpecError(f"set_env={text!r} is not NAME=VALUE.")
        found.append((name, value))
    return tuple(found)


def task_key(file: str) -> str:
    """Name a Task's file in a ConfigMap: as it is called here, if that can be a key there."""
    name = PurePosixPath(file).name
    return name if _CONFIG_MAP_KEY.fullmatch(name) else "task.py"


def check_task_text(path: str, data: bytes) -> str:
    """Give the text of a Task's file, if it can travel in a ConfigMap."""
    try:
        text = data.decode()
        compile(text, path, "exec", dont_inherit=True)
    except (UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise SpecError(f"{path} is no Python file that pods could load: {error}.") from None
    if (size := _bytes_as_json(text)) > MOST_TASK_BYTES:
        raise SpecError(
            f"{path} takes {size:,} bytes as JSON, and kubectl apply can bring {MOST_TASK_BYTES:,} in a ConfigMap. Put "
            "the file into the image, and give its path there."
        )
    return text


def _bytes_as_json(text: str) -> int:
    """Measure a text as kubectl writes it: it spells some characters as \\u003c that Python does not."""
    return len(json.dumps(text, ensure_ascii=False).encode()) + 5 * len(re.findall("[<>&\u2028\u2029]", text))
