"""The table of accelerator types: what follows from an entry, without a device."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from instep.core.topology import Place
from instep.launch.membership.node_info import variables_of
from instep.world import device
from instep.world.device import ACCELERATORS, Accelerator, Cuda
from instep.world.interfaces import socket_variables
from instep.world.world import backend_for, place_here

SOURCE = Path(device.__file__).parents[1]


class Xpu(Accelerator):
    type, backend, dispatch_key = "xpu", "xccl", "XPU"
    vendor, toolkit = "Intel", "oneAPI"
    visible_devices = "ZE_AFFINITY_MASK"
    socket_variable = "CCL_SOCKET_IFNAME"
    settings = ("CCL",)
    kubernetes_resource = "gpu.intel.com/i915"
    unseen_advice = backend_advice = "Look at the driver."
    module = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)

    def supports_bf16(self) -> bool:
        return True

    def toolkit_version(self) -> str:
        return "2026.1"

    def is_installed(self) -> bool:
        return True

    def models(self) -> str:
        return "X1"


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> Xpu:
    accelerator = Xpu()
    monkeypatch.setattr(ACCELERATORS["cuda"], "is_available", lambda: False)
    monkeypatch.setattr(ACCELERATORS["cuda"], "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: backend == "xccl")
    monkeypatch.setitem(ACCELERATORS, "xpu", accelerator)
    return accelerator


def test_one_entry_is_all_that_a_device_type_takes(xpu, monkeypatch):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert place_here().device == "xpu:1"
    assert device.device_count() == 2
    assert backend_for(Place(world_size=2, local_world_size=2, device="xpu:1")) == "xccl"
    assert backend_for(Place(world_size=3, local_world_size=3, device="xpu:1")) == "gloo"
    assert device.device_backends() == ["nccl", "xccl"]
    assert device.accelerator_of(torch.device("xpu", 1)) is xpu
    assert device.has_streams(torch.device("xpu"))
    assert device.dispatch_key_of(torch.device("xpu")) == "XPU"
    assert socket_variables("eth0", {})["CCL_SOCKET_IFNAME"] == "eth0"
    assert variables_of({"ZE_AFFINITY_MASK": "0,1"}) == {"ZE_AFFINITY_MASK (how many)": "2"}
    assert device.toolkit_versions()["oneAPI"] == "2026.1"
    assert device.gpu_models().endswith("X1")


def test_the_cpu_is_no_accelerator():
    cpu = torch.device("cpu")
    assert device.accelerator_of(cpu) is device.accelerator_of("cpu") is None
    assert device.accelerator_of("cuda:1") is device.accelerator_of(torch.device("cuda")) is ACCELERATORS["cuda"]
    assert not device.has_streams(cpu)
    assert device.dispatch_key_of(cpu) == "CPU"
    assert device.dispatch_key_of(torch.device("meta")) is None
    device.synchronize(cpu)


def test_gpus_are_named_without_touching_them(tmp_path, monkeypatch):
    for number in (0, 1):
        folder = tmp_path / "gpus" / str(number)
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    monkeypatch.setattr(Cuda, "proc", tmp_path)
    assert device.gpu_models() == "NVIDIA H200"


def test_names_are_read_without_torch():
    program = "import sys, instep.world.device, instep.world.interfaces; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_no_other_module_names_a_device_type_or_its_backend():
    word = re.compile("cuda|nccl|nvidia|cublas|cudnn", re.IGNORECASE)
    files = [path for path in SOURCE.rglob("*.py") if word.search(path.read_text())]
    assert files == [Path(device.__file__)]
