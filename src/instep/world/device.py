"""Accelerator types: everything that instep must know about a kind of device, in one table.

[Note: Adding an accelerator type]
Subclass `Accelerator` and add an instance to `ACCELERATORS`. No other module names a device type or its collective
backend: they ask this one, or use what torch offers for every device (`torch.get_device_module(device)` returns
`torch.cuda` for a CUDA device, `torch.xpu` for an XPU). ROCm calls itself cuda in torch, so it is the same entry.

torch is imported when a function needs it, not with this module: launchers read names from here without torch.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Accelerator(ABC):
    """One accelerator type. Methods that ask torch use the module `torch.get_device_module` returns."""

    type: str
    """As in `torch.device(type, index)`."""
    backend: str
    """The process group backend that moves tensors between such devices without the host."""
    dispatch_key: str
    """PyTorch's name for kernels of this type."""
    vendor: str
    toolkit: str
    """What torch must be built with to use the device."""
    visible_devices: str
    """The environment variable that restricts which devices a process sees."""
    socket_variable: str
    """The environment variable from which the backend reads its network interface."""
    settings: tuple[str, ...]
    """Prefixes of the environment variables that configure the backend."""
    torchrun_variables: tuple[str, ...] = ()
    """Environment variables that torchrun sets for this backend."""
    kubernetes_resource: str
    has_streams = True
    """Whether copies between the device and pinned host memory run on streams, beside the host."""
    prefers_channels_last = False
    """Whether convolutions in half precision are fastest in that memory format."""
    deterministic_variables: Mapping[str, str] = {}
    """Environment variables that deterministic kernels need."""
    unseen_advice: str
    """What to do where torch is built for the device and sees none."""
    backend_advice: str
    """What to do where the backend does not work."""

    @property
    def module(self) -> Any:
        """torch's module for this device type."""
        import torch

        return torch.get_device_module(self.type)

    def is_available(self) -> bool:
        """Return whether torch can use a device of this type."""
        return bool(self.module.is_available())

    def device_count(self) -> int:
        """Return how many devices of this type this process sees."""
        return int(self.module.device_count())

    def default_generator(self, device: torch.device) -> torch.Generator:
        """Return a device's global random generator."""
        generator: torch.Generator = self.module.default_generators[device.index or 0]
        return generator

    def device_name(self, device: torch.device) -> str:
        """Return the model name of a device."""
        return str(self.module.get_device_name(device))

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return the most memory of a device that this process has reserved so far, without waiting for it."""
        return int(self.module.max_memory_reserved(device))

    def devices(self) -> tuple[tuple[str, int], ...]:
        """Return name and bytes of memory of each device."""
        properties = [self.module.get_device_properties(index) for index in range(self.device_count())]
        return tuple((each.name, each.total_memory) for each in properties)

    def deterministic_settings(self) -> tuple[tuple[Any, str, Any], ...]:
        """Return the attributes to set for deterministic kernels, as (object, name, value)."""
        return ()

    def prepare_deterministic(self, device: torch.device) -> None:  # noqa: B027 - most types need nothing
        """Do what must be done once on a device, with deterministic kernels on, before the first step."""

    @abstractmethod
    def supports_bf16(self) -> bool:
        """Return whether the current device computes in bfloat16 itself."""

    @abstractmethod
    def toolkit_version(self) -> str:
        """Return the version of the toolkit that torch was built with; empty: with none."""

    @abstractmethod
    def is_installed(self) -> bool:
        """Return whether the kernel knows a device of this type, whether or not torch can use it."""

    @abstractmethod
    def models(self) -> str:
        """Return the models of the devices that the kernel knows, without touching them."""


class Cuda(Accelerator):
    """GPUs by NVIDIA; and by AMD, in a ROCm build of torch."""

    type, backend, dispatch_key = "cuda", "nccl", "CUDA"
    vendor, toolkit = "NVIDIA", "CUDA"
    visible_devices = "CUDA_VISIBLE_DEVICES"
    socket_variable = "NCCL_SOCKET_IFNAME"
    settings = ("NCCL", "TORCH_NCCL")
    torchrun_variables = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
    kubernetes_resource = "nvidia.com/gpu"
    prefers_channels_last = True
    deterministic_variables: Mapping[str, str] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    unseen_advice = (
        "Unset CUDA_VISIBLE_DEVICES if it hides them. Otherwise update the driver, or install a torch built for it."
    )
    backend_advice = (
        "Run again with NCCL_DEBUG=INFO to see why. Common causes: a container with too little /dev/shm, a driver "
        "older than torch's CUDA, or NCCL_SOCKET_IFNAME naming an interface that does not exist."
    )
    proc = Path("/proc/driver/nvidia")

    def deterministic_settings(self) -> tuple[tuple[Any, str, Any], ...]:
        import torch

        return ((torch.backends.cudnn, "benchmark", False),)  # it chooses kernels by their speed

    def prepare_deterministic(self, device: torch.device) -> None:
        """Multiply once, so that torch reads cuBLAS's setting, then unset it unless the user chose another value.

        With deterministic kernels torch checks that variable at the first matrix product, and never again. While it is
        set, torch parses the workspace size from it in every product, with a regular expression: about 100 µs each.
        torch passes cuBLAS a workspace of its own either way, which is what makes it deterministic.
        """
        import torch

        for name, value in self.deterministic_variables.items():
            if os.environ.get(name) == value:
                one = torch.ones(1, 1, device=device)
                one.mm(one)
                del os.environ[name]

    def supports_bf16(self) -> bool:
        return bool(self.module.is_bf16_supported(including_emulation=False))

    def toolkit_version(self) -> str:
        import torch

        return torch.version.cuda or ""

    def is_installed(self) -> bool:
        return (self.proc / "version").exists() or Path("/dev/nvidia0").exists()

    def models(self) -> str:
        models = set()
        for path in sorted(self.proc.glob("gpus/*/information")):
            lines = path.read_text().splitlines()
            models |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
        return ", ".join(sorted(models))


ACCELERATORS: dict[str, Accelerator] = {accelerator.type: accelerator for accelerator in (Cuda(),)}
"""By device type. Where torch sees several types, the first one is used."""


def accelerator_of(device: torch.device | str) -> Accelerator | None:
    """Return the accelerator type of a device; None: the CPU, or a type that is not in the table."""
    kind = device if isinstance(device, str) else device.type
    return ACCELERATORS.get(kind.partition(":")[0])


def has_streams(device: torch.device) -> bool:
    """Return whether copies between a device and pinned host memory run beside the host."""
    accelerator = ACCELERATORS.get(device.type)
    return accelerator is not None and accelerator.has_streams


def current_accelerator() -> Accelerator | None:
    """Return the accelerator type that torch can use here; None: only the CPU."""
    return next((accelerator for accelerator in ACCELERATORS.values() if accelerator.is_available()), None)


def device_count() -> int:
    """Return how many accelerators this process sees."""
    return next(filter(None, (accelerator.device_count() for accelerator in ACCELERATORS.values())), 0)


def device_of(local_rank: int) -> str:
    """Return the device of a local rank; ranks share devices where there are more ranks."""
    accelerator = current_accelerator()
    return "cpu" if accelerator is None else f"{accelerator.type}:{local_rank % accelerator.device_count()}"


def device_backends() -> list[str]:
    """Return the process group backends that move tensors between accelerators without the host."""
    return [accelerator.backend for accelerator in ACCELERATORS.values()]


def dispatch_key_of(device: torch.device) -> str | None:
    """Return PyTorch's name for a device's kernels; None: a type that is not in the table."""
    if device.type == "cpu":
        return "CPU"
    return ACCELERATORS[device.type].dispatch_key if device.type in ACCELERATORS else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what was queued on it; the CPU has no queue."""
    if device.type in ACCELERATORS:
        ACCELERATORS[device.type].module.synchronize(device)


def gpu_models() -> str:
    """Return the models of the accelerators that the kernel knows, without touching them."""
    return ", ".join(filter(None, (accelerator.models() for accelerator in ACCELERATORS.values())))


def toolkit_versions() -> dict[str, str]:
    """Return the versions of the toolkits that torch was built with, by name; empty: not built with it."""
    return {accelerator.toolkit: accelerator.toolkit_version() for accelerator in ACCELERATORS.values()}


def torch_build() -> str:
    """Return what torch was built for, such as `CUDA 12.8`; empty: for the CPU only."""
    import torch

    versions = {**toolkit_versions(), "ROCm": torch.version.hip}
    return next((f"{toolkit} {version}" for toolkit, version in versions.items() if version), "")
