"""The files that describe a model besides its weights, in the run directory's `files`: for exports to other libraries.

`config.json` and `generation_config.json` of a Hugging Face model, `adapter_config.json` of a PEFT model, and what the
Task's `save_files` writes there: a tokenizer, a processor. transformers and PEFT are not imported: a model that has
such a config brings what writes it.

Ranks: rank 0.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from instep.checkpoint.export_formats import FILES
from instep.core.errors import CheckpointError

SaveFiles = Callable[[Path], object]


def configs_of(model: nn.Module) -> list[SaveFiles]:
    """Return what writes the configs of a model into a folder; nothing for a model that has none."""
    adapters, active = getattr(model, "peft_config", None), getattr(model, "active_adapter", None)
    if isinstance(adapters, Mapping) and active in adapters:
        adapter = copy.deepcopy(adapters[active])
        adapter.inference_mode = True  # as PEFT stores it: loaded, it is not trained further unless asked to
        return [adapter.save_pretrained]
    if not _can_save(getattr(model, "config", None)):
        return []
    config: Any = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], getattr(model, "dtype", None)
    generation: Any = copy.deepcopy(getattr(model, "generation_config", None))
    return [each.save_pretrained for each in (config, generation) if _can_save(each)]


def write_files(run_dir: Path, savers: list[SaveFiles]) -> None:
    """Write a model's files into the run directory, in place of earlier ones."""
    if not savers:
        return
    scratch, final = run_dir / f".{FILES}.{os.getpid()}", run_dir / FILES
    try:
        scratch.mkdir()
        for save in savers:
            save(scratch)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(scratch, final)
    except OSError as error:
        raise CheckpointError(f"{final} could not be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _can_save(config: Any) -> bool:
    return callable(getattr(config, "save_pretrained", None)) and callable(getattr(config, "to_dict", None))
