"""torchvision for the tests, where it is installed: `pip install --no-deps torchvision==0.28.0 pillow` for torch 2.13.

It is not among the packages of `dev`: the build on PyPI is for torch with CUDA, which cannot be imported as it is
beside a torch for the CPU, and libraries that find it installed would try.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed (tests/vision.py says how)"
)
_declared: list[Any] = []


def import_torchvision() -> None:
    """Import torchvision, although its compiled operators may be for another build of torch.

    Then torchvision stops at the first two operators whose results it describes. Declared here, they let the rest be
    imported: transforms, models and datasets are Python.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")  # the operators go with it
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        import torchvision
    assert torchvision.transforms is not None


def load_example(name: str) -> ModuleType:
    """Return an example that needs torchvision, as a module."""
    import_torchvision()
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
