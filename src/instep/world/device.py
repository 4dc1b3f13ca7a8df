"""Accelerator types: everything that instep must know about a kind of device, in one table.

[Note: Adding an accelerator type]
Subclass `Accelerator` and add an instance to `ACCELERATORS`. No other module names a device type or its collective
backend: they ask this one, or use what torch offers for every device (`torch.get_device_module(device)` returns
`torch.cuda` for a CUDA device, `torch.xpu` for an XPU). ROCm calls itself cuda in torch, so it is the same entry.

torch is imported when a function needs it, not with this module: launchers read names from here without torch.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.core.errors import SpecError
from instep.world.accelerator import Accelerator, DeviceMemory, DeviceReading

if TYPE_CHECKING:
    import torch


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

    def dump_memory(self, path: Path) -> bool:
        self.module.memory._dump_snapshot(str(path))
        return True

    def sensors(self, device: torch.device) -> Callable[[], DeviceReading] | None:
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            uuid = str(self.module.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except (pynvml.NVMLError, AttributeError):  # no driver that has it, or a torch that knows no uuid
            return None
        return NvmlSensors(pynvml, handle).read

    def ranges(self) -> tuple[Callable[[str], None], Callable[[], None]]:
        return self.module.nvtx.range_push, self.module.nvtx.range_pop

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


class NvmlSensors:
    """Reads the sensors of a GPU through NVML; `nvml` is the module of the package nvidia-ml-py."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._slowed_by = {
            "power": nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
            "heat": nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        }

    def read(self) -> DeviceReading:
        """Return what the sensors say now; the calls of NVML do not wait for the GPU's work."""
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        reasons = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        return DeviceReading(
            utilisation=None if busy is None else busy.gpu / 100,
            power_w=self._number(nvml.nvmlDeviceGetPowerUsage, scale=1e-3),
            power_limit_w=self._number(nvml.nvmlDeviceGetEnforcedPowerLimit, scale=1e-3),
            temperature_c=self._number(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._number(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            max_clock_mhz=self._number(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            slowed_by=tuple(name for name, bits in self._slowed_by.items() if reasons & bits),
        )

    def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(self._handle, *args)
        except self._nvml.NVMLError:  # this GPU does not have it
            return None

    def _number(self, function: Callable[..., Any], *args: Any, scale: float = 1.0) -> float | None:
        value = self._ask(function, *args)
        return None if value is None else float(value) * scale


class Xpu(Accelerator):
    """GPUs by Intel."""

    type, backend, dispatch_key = "xpu", "xccl", "XPU"
    vendor, toolkit = "Intel", "oneAPI"
    visible_devices = "ZE_AFFINITY_MASK"
    socket_variable = "CCL_SOCKET_IFNAME"
    settings = ("CCL",)
    kubernetes_resource = "gpu.intel.com/xe"
    unseen_advice = "Unset ZE_AFFINITY_MASK if it hides them. Otherwise install Intel's compute runtime (Level Zero)."
    backend_advice = "Run again with CCL_LOG_LEVEL=info to see why, and check that torch was built with XCCL."
    driver = Path("/sys/bus/pci/drivers/xe")
    """Not i915: it also drives integrated graphics that torch cannot use."""

    def supports_bf16(self) -> bool:
        return bool(self.module.is_bf16_supported())

    def toolkit_version(self) -> str:
        import torch

        return getattr(torch.version, "xpu", None) or ""

    def is_installed(self) -> bool:
        return any(self.driver.glob("*:*"))

    def models(self) -> str:
        numbers = {path.read_text().strip().removeprefix("0x") for path in self.driver.glob("*:*/device")}
        return ", ".join(f"Intel {number}" for number in sorted(numbers))


class Mps(Accelerator):
    """The GPU of a Mac: one, without a process group of its own and without float64."""

    type, backend, dispatch_key = "mps", "", "MPS"
    vendor, toolkit = "Apple", "Metal"
    visible_devices = socket_variable = kubernetes_resource = ""
    settings = ()
    has_streams = has_float64 = False
    unseen_advice = "Update macOS: torch needs version 14 or newer."
    backend_advice = ""

    def default_generator(self, _device: torch.device) -> torch.Generator:
        generator: torch.Generator = self.module._get_default_mps_generator()
        return generator

    def device_name(self, _device: torch.device) -> str:
        return f"Apple {platform.machine()}"

    def devices(self) -> tuple[tuple[str, int], ...]:
        if not self.is_available():
            return ()
        return ((f"Apple {platform.machine()}", int(self.module.recommended_max_memory())),)

    def memory_bytes(self, _device: torch.device) -> int:
        return int(self.module.current_allocated_memory())

    def memory(self, _device: torch.device) -> DeviceMemory:
        module = self.module
        return DeviceMemory(int(module.current_allocated_memory()), int(module.driver_allocated_memory()), None)

    def peak_memory_bytes(self, _device: torch.device) -> int:
        return int(self.module.driver_allocated_memory())  # torch keeps no peak there

    def reset_peak_memory(self, _device: torch.device) -> None:
        self.module.empty_cache()

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one."""

    def prepare_deterministic(self, device: torch.device) -> None:
        raise SpecError(
            f"exact mode adds in float64, which {device} does not have. Train without --exact, or on another device."
        )

    def supports_bf16(self) -> bool:
        import torch

        return torch.backends.mps.is_macos_or_newer(14, 0)

    def toolkit_version(self) -> str:
        import torch

        return (platform.mac_ver()[0] or "built in") if torch.backends.mps.is_built() else ""

    def is_installed(self) -> bool:
        return sys.platform == "darwin" and platform.machine() == "arm64"

    def models(self) -> str:
        return f"Apple {platform.machine()}" if self.is_installed() else ""


ACCELERATORS: dict[str, Accelerator] = {accelerator.type: accelerator for accelerator in (Cuda(), Xpu(), Mps())}
"""By device type. Where torch sees several types, the first one is used."""


def accelerator_of(device: torch.device | str) -> Accelerator | None:
    """Return the accelerator type of a device; None: the CPU, or a type that is not in the table."""
    kind = device if isinstance(device, str) else device.type
    return ACCELERATORS.get(kind.partition(":")[0])


def has_streams(device: torch.device) -> bool:
    """Return whether copies between a device and pinned host memory run beside the host."""
    accelerator = ACCELERATORS.get(device.type)
    return accelerator is not None and accelerator.has_streams


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype that a device computes in."""
    import torch

    accelerator = ACCELERATORS.get(device.type)
    return torch.float64 if accelerator is None or accelerator.has_float64 else torch.float32


def check_world_size(device: str, world_size: int) -> None:
    """Raise SpecError for several ranks on a kind of device that has no process group."""
    accelerator = accelerator_of(device)
    if accelerator is not None and not accelerator.backend and world_size > 1:
        raise SpecError(
            f"{world_size} processes would share {device}, the only {accelerator.vendor} GPU of a machine, and torch "
            "has no process group for it. Train with one process."
        )


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
    return [accelerator.backend for accelerator in ACCELERATORS.values() if accelerator.backend]


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
