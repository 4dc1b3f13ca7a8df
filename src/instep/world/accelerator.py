"""What instep must know about a kind of device: one abstract class. device.py has the table of them.

torch is imported when a method needs it, not with this module: launchers read names from here without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class DeviceMemory(NamedTuple):
    """What this process holds of a device's memory, in bytes."""

    allocated: int
    """Of its tensors now."""
    reserved: int
    """Taken from the device now; what tensors do not use is kept for later ones."""
    peak: int | None
    """The most that was allocated so far; None: torch does not count it."""


class DeviceReading(NamedTuple):
    """What the sensors of a device say at one moment; None: it has no such sensor."""

    utilisation: float | None = None
    """The share of the last fraction of a second in which it computed anything."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    slowed_by: tuple[str, ...] = ()
    """Why its clock is lower than it could be: `power`, `heat`, both or nothing."""


class Accelerator(ABC):
    """One accelerator type. Methods that ask torch use the module `torch.get_device_module` returns."""

    type: str
    """As in `torch.device(type, index)`."""
    backend: str
    """The process group backend that moves tensors between such devices without the host; empty: there is none."""
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
    has_float64 = True
    """Whether it computes in float64, in which losses and scalars are added up."""
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
        try:
            return bool(self.module.is_available())
        except RuntimeError:  # this torch does not know the type: its package was not imported
            return False

    def device_count(self) -> int:
        """Return how many devices of this type this process sees."""
        return int(self.module.device_count()) if self.is_available() else 0

    def default_generator(self, device: torch.device) -> torch.Generator:
        """Return a device's global random generator."""
        generator: torch.Generator = self.module.default_generators[device.index or 0]
        return generator

    def device_name(self, device: torch.device) -> str:
        """Return the model name of a device."""
        return str(self.module.get_device_name(device))

    def memory_bytes(self, device: torch.device) -> int:
        """Return the memory of a device that this process's tensors take now, without waiting for it."""
        return int(self.module.memory_allocated(device))

    def memory(self, device: torch.device) -> DeviceMemory:
        """Return what this process holds of a device's memory, without waiting for it; a tenth of a millisecond."""
        sums = self.module.memory_stats(device)
        names = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak")
        return DeviceMemory(*(int(sums.get(name, 0)) for name in names))

    def peak_memory_bytes(self, device: torch.device) -> int:
        """Return the most memory of a device that this process has reserved so far, without waiting for it."""
        return int(self.module.max_memory_reserved(device))

    def reset_peak_memory(self, device: torch.device) -> None:
        """Release memory that no tensor uses, and let `peak_memory_bytes` begin anew."""
        self.module.empty_cache()
        self.module.reset_peak_memory_stats(device)

    def dump_memory(self, path: Path) -> bool:  # noqa: ARG002 - for subclasses
        """Write a snapshot of the memory that this process has on the devices; return whether there is one."""
        return False

    def sensors(self, device: torch.device) -> Callable[[], DeviceReading] | None:  # noqa: ARG002 - for subclasses
        """Return what reads a device's sensors, from any thread; None: there are none, or no package to read them."""
        return None

    def timing_event(self) -> Any:
        """Return an event that measures time on a device: `record`, `query`, `elapsed_time` (ms), as torch has them."""
        return self.module.Event(enable_timing=True)

    def ranges(self) -> tuple[Callable[[str], None], Callable[[], None]] | None:
        """Return what opens and closes a range that a profiler outside shows (NVTX); None: there is nothing."""
        return None

    def devices(self) -> tuple[tuple[str, int], ...]:
        """Return name and bytes of memory of each device."""
        properties = [self.module.get_device_properties(index) for index in range(self.device_count())]
        return tuple((each.name, each.total_memory) for each in properties)

    def deterministic_settings(self) -> tuple[tuple[Any, str, Any], ...]:
        """Return the attributes to set for deterministic kernels, as (object, name, value)."""
        return ()

    def prepare_deterministic(self, device: torch.device) -> None:  # noqa: B027 - most types need nothing
        """Do what must be done once on a device, with deterministic kernels on, before the first step."""

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one of this process."""
        self.module.set_device(device)

    def why_unavailable(self) -> str:
        """Return why torch cannot use a device of this type; empty: it can."""
        if self.is_available():
            return ""
        if not self.toolkit_version():
            return f"this torch is built without {self.toolkit}"
        return "torch sees no device" if self.is_installed() else f"this machine has no {self.vendor} GPU"

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
