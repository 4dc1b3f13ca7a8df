"""Explain why memory ran out: where, and what holds it.

Ranks: the one that failed. No collectives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from instep.profile.holders import KINDS, ModelAndOptimizers, holders_by_module, live_tensors, where_in_model
from instep.profile.summary import size
from instep.world.device import accelerator_of

_NUM_NAMED = 3


def explain_out_of_memory(
    error: BaseException,
    trained: Sequence[ModelAndOptimizers],
    device: torch.device,
    folder: Path | None,
    rank: int,
    advice: str = "",
) -> str:
    """Return a paragraph that names where memory ran out and the largest holders; write all of them to a folder.

    On an accelerator, torch's snapshot of its memory is written, too, for https://pytorch.org/memory_viz.
    """
    place = where_in_model(trained, error.__traceback__)
    holders = holders_by_module(trained)
    others = live_tensors(trained, device.type)
    sentences = [f"Rank {rank} ran out of memory{f' in {place}' if place else ''}."]
    if holders:
        named = [f"{row['module']} {size(row['total_bytes'])} ({_kinds(row)})" for row in holders[:_NUM_NAMED]]
        sentences.append(f"The largest holders by module: {'; '.join(named)}.")
    if others:
        largest = ", ".join(f"{one.description} ({size(one.num_bytes)})" for one in others[:_NUM_NAMED])
        total = sum(one.num_bytes for one in others)
        sentences.append(
            f"{len(others)} other live tensors hold {size(total)} (activations, batches, what your code keeps); the "
            f"largest: {largest}."
        )
    accelerator = accelerator_of(device)
    if accelerator is not None:
        sentences.append(f"{device} has {size(accelerator.memory_bytes(device))} of this process's tensors.")
    if advice:
        sentences.append(advice)
    files = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        files = [str(folder / f"out-of-memory-rank-{rank}.json")]
        content = {
            "rank": rank,
            "device": str(device),
            "where": place,
            "error": str(error),
            "modules": holders,
            "other_tensors": [{"num_bytes": one.num_bytes, "tensor": one.description} for one in others[:100]],
        }
        Path(files[0]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        snapshot = folder / f"out-of-memory-rank-{rank}.pickle"
        if accelerator is not None and accelerator.dump_memory(snapshot):
            files.append(f"{snapshot} (open it at https://pytorch.org/memory_viz)")
    return "\n".join([" ".join(sentences), *([f"All holders: {', '.join(files)}"] if files else [])])


def _kinds(row: dict[str, object]) -> str:
    kinds = [(kind.replace("_", " "), row[f"{kind}_bytes"]) for kind in KINDS]
    return ", ".join(f"{kind} {size(float(str(num_bytes)))}" for kind, num_bytes in kinds if num_bytes)
