"""The table of accelerator types: what follows from an entry, without a device."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import patience
from instep.cli.findings import judge_accelerators
from instep.core.errors import SpecError
from instep.core.spec import TrainSpec
from instep.core.topology import Place
from instep.launch.failures import failure_of_exception
from instep.launch.membership.node_info import variables_of
from instep.train.arriving import ArrivingNumbers
from instep.train.precision import resolve_precision
from instep.world import device
from instep.world.device import ACCELERATORS, Cuda, Mps, Xpu
from instep.world.interfaces import socket_variables
from instep.world.world import World, backend_for, place_here

SOURCE = Path(device.__file__).parents[1]


def no_device(*_: object) -> bool:
    return False


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Xpu:
    """Two Intel GPUs, as torch and the kernel would show them."""
    properties = types.SimpleNamespace(name="Max 1550", total_memory=1 << 36)
    module = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda _: properties,
        is_bf16_supported=lambda: True,
    )
    monkeypatch.setattr(Xpu, "module", module)
    monkeypatch.setattr(Xpu, "driver", tmp_path / "xe")
    for number in (1, 2):
        (folder := tmp_path / "xe" / f"0000:0{number}:00.0").mkdir(parents=True)
        (folder / "device").write_text("0x0bd5\n")
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    monkeypatch.setattr(ACCELERATORS["cuda"], "is_available", no_device)
    monkeypatch.setattr(ACCELERATORS["cuda"], "device_count", lambda: 0)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda backend: backend == "xccl")
    accelerator = ACCELERATORS["xpu"]
    assert isinstance(accelerator, Xpu)
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
    assert device.wide_dtype(torch.device("xpu")) is torch.float64
    assert device.dispatch_key_of(torch.device("xpu")) == "XPU"
    assert socket_variables("eth0", {})["CCL_SOCKET_IFNAME"] == "eth0"
    assert variables_of({"ZE_AFFINITY_MASK": "0,1"}) == {"ZE_AFFINITY_MASK (how many)": "2"}
    assert device.toolkit_versions()["oneAPI"] == "20250302"
    assert device.torch_build() == "oneAPI 20250302"
    assert device.gpu_models().endswith("Intel 0bd5")
    assert xpu.devices() == (("Max 1550", 1 << 36),) * 2
    assert xpu.why_unavailable() == ""
    assert resolve_precision(TrainSpec(), "xpu:0").precision == "bf16"


@pytest.fixture
def mps(monkeypatch: pytest.MonkeyPatch) -> Mps:
    """The GPU of a Mac, as torch would show it."""
    module = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        recommended_max_memory=lambda: 1 << 34,
        _get_default_mps_generator=lambda: torch.default_generator,
    )
    monkeypatch.setattr(Mps, "module", module)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: True)
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(ACCELERATORS[kind], "is_available", no_device)
        monkeypatch.setattr(ACCELERATORS[kind], "device_count", lambda: 0)
    accelerator = ACCELERATORS["mps"]
    assert isinstance(accelerator, Mps)
    return accelerator


def test_a_device_without_a_process_group_and_float64(mps):
    on_mps = torch.device("mps:0")
    assert place_here().device == "mps:0"
    assert device.wide_dtype(on_mps) is torch.float32
    assert device.wide_dtype(torch.device("cpu")) is torch.float64
    assert not device.has_streams(on_mps)
    assert mps.default_generator(on_mps) is torch.default_generator
    assert mps.devices()[0][1] == 1 << 34
    assert "" not in device.device_backends()
    assert "" not in socket_variables("eth0", {})
    with World.join(Place(device="mps:0")) as world:  # there is no device to choose
        assert world.device == on_mps
    with pytest.raises(SpecError, match="2 processes would share mps:0, the only Apple GPU"):
        World.join(Place(device="mps:0", world_size=2, local_world_size=2))
    with pytest.raises(SpecError, match="exact mode adds in float64, which mps:0 does not have"):
        mps.prepare_deterministic(on_mps)
    assert resolve_precision(TrainSpec(), "mps:0").precision == "bf16"


def test_why_a_kind_of_device_is_not_there(monkeypatch, tmp_path):
    xpu = ACCELERATORS["xpu"]
    monkeypatch.setattr(Xpu, "driver", tmp_path / "xe")
    monkeypatch.setattr(Xpu, "module", types.SimpleNamespace(is_available=no_device))
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert xpu.why_unavailable() == "this torch is built without oneAPI"
    monkeypatch.setattr(torch.version, "xpu", "20250302", raising=False)
    assert xpu.why_unavailable() == "this machine has no Intel GPU"
    (tmp_path / "xe" / "0000:01:00.0").mkdir(parents=True)
    assert xpu.why_unavailable() == "torch sees no device"
    judgement = judge_accelerators({"cuda": "", "xpu": "torch sees no device"})
    assert judgement.text == "cuda: found; xpu: not found (torch sees no device)"


def test_a_lost_peer_is_not_seen_in_every_text():
    assert not failure_of_exception(RuntimeError("something else was aborted"), 0, 0, "").consequence
    assert failure_of_exception(RuntimeError("xccl: remote process failed"), 0, 0, "").consequence


def test_a_type_that_torch_does_not_know_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(Xpu):
        type = "unheard_of"

    monkeypatch.setattr(device, "ACCELERATORS", {"unheard_of": Unknown()})
    assert device.current_accelerator() is None
    assert device.device_count() == 0


def test_the_cpu_is_no_accelerator():
    cpu = torch.device("cpu")
    assert device.accelerator_of(cpu) is device.accelerator_of("cpu") is None
    assert device.accelerator_of("cuda:1") is device.accelerator_of(torch.device("cuda")) is ACCELERATORS["cuda"]
    assert not device.has_streams(cpu)
    assert device.dispatch_key_of(cpu) == "CPU"
    assert device.dispatch_key_of(torch.device("meta")) is None
    device.synchronize(cpu)
    assert ArrivingNumbers([torch.tensor([1.5]), torch.tensor(2)]).tolist() == [1.5, 2.0]  # no stream to copy beside


def test_gpus_are_named_without_touching_them(tmp_path, monkeypatch):
    for number in (0, 1):
        folder = tmp_path / "gpus" / str(number)
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 7\n")
    monkeypatch.setattr(Cuda, "proc", tmp_path)
    assert device.gpu_models() == "NVIDIA H200"


def test_names_are_read_without_torch():
    program = "import sys, instep.world.device, instep.world.interfaces; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60 * patience.PATIENCE)


def test_no_other_module_names_a_device_type_or_its_backend():
    word = re.compile(r"cuda|nccl|nvidia|cublas|cudnn|\bxpu\b|xccl|oneapi|\bmps\b", re.IGNORECASE)
    # What check says of a stranger's script names what the script names.
    paths = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "check"]
    files = [path for path in paths if word.search(path.read_text())]
    assert files == [Path(device.__file__)]
