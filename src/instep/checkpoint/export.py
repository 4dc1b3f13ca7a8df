"""Export the weights of a checkpoint for other programs: safetensors files with the names that Hugging Face uses.

    FOLDER/model.safetensors                                               if it fits into one shard
    FOLDER/model-00001-of-00003.safetensors, … model.safetensors.index.json    if not
    NAME.safetensors                                                       if the target has this suffix: one file
    FOLDER/preprocess.json, or NAME.preprocess.json                        if the Task has a preprocess()

A tied weight is stored once in a checkpoint. It is exported under each of its names, so that `load_state_dict` finds
all of them without knowing which are tied; formats of other libraries are in `export_formats.py`. One tensor is in
memory at a time, so a model that several ranks trained can be exported on a machine with too little memory for it.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep.checkpoint.export_formats import FILES, FORMATS, ExportFormat
from instep.checkpoint.files import Checkpoint, sync_directory
from instep.checkpoint.manifest import EMA, FROZEN, MODEL
from instep.checkpoint.reader import StoredTensor
from instep.checkpoint.weights import check_averaged, weights_sha256
from instep.checkpoint.writer import write_synced, write_tensors
from instep.core.errors import CheckpointError, SpecError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Shard = dict[str, StoredTensor]


class ExportSpec(NamedTuple):
    """Where to export weights to, and how."""

    target: Path
    max_shard_bytes: int = 5 * 10**9
    force: bool = False
    format: ExportFormat = FORMATS["weights"]
    files: Path | None = None
    """Where the model's files are, if not in the run directory."""
    ema: bool = False
    """Export the averaged weights."""

    @property
    def single_file(self) -> str:
        """The name of the file, if there is one."""
        return f"{self.format.stem}.safetensors"

    @property
    def index_file(self) -> str:
        """The name of the file that says what is in which."""
        return f"{self.single_file}.index.json"

    def extra_files(self, checkpoint: Path) -> dict[str, Path]:
        """Return the files to copy, by relative name; raise CheckpointError if one is missing."""
        files = self.format.files(self.files or checkpoint.resolve().parent.parent / FILES)
        return {f"{self.target.stem}.{name}": path for name, path in files.items()} if self.is_file else files

    @property
    def is_file(self) -> bool:
        """Whether the target is one file, whatever its size."""
        return self.target.suffix == ".safetensors"

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return self.target.parent if self.is_file else self.target


class ExportResult(NamedTuple):
    """What was written."""

    files: tuple[Path, ...]
    num_tensors: int
    num_bytes: int
    weights_sha256: str
    """Of the whole model, as in a Result; empty if the checkpoint does not hold all of it."""
    replaced: tuple[Path, ...]
    """Files that were there before and are replaced or gone."""
    left_out: tuple[str, ...]
    """Names in the model's state that are not tensors."""
    other_models: tuple[str, ...]
    """Further models of the checkpoint, which were not exported."""


def read_size(text: str) -> int:
    """Parse a number of bytes: 5GB, 500MB, 2GiB, 1000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise SpecError(f"max-shard={text!r} is not a size. Use for instance 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * unit)


def check_target(spec: ExportSpec, source: Path) -> tuple[Path, ...]:
    """Raise if the target is not writable, would overwrite checkpoints or exists; return the files to replace."""
    target, folder = spec.target, spec.folder
    if not spec.is_file and target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file. Export into a folder, or into a name that ends in .safetensors.")
    if spec.is_file and target.is_dir():
        raise CheckpointError(f"{target} is a folder, but its suffix means one file. Export to another name.")
    checkpoint = source.resolve()
    checkpoints = checkpoint.parent if checkpoint.parent.name == "checkpoints" else checkpoint
    if folder.resolve().is_relative_to(checkpoints):
        raise CheckpointError(f"{target} is inside a run's checkpoints, which must not change. Export elsewhere.")
    if spec.is_file:
        taken = [target] if target.exists() or target.is_symlink() else []
    else:
        shard = re.compile(rf"{spec.format.stem}-\d{{5,}}-of-\d{{5,}}\.safetensors")
        paths = sorted(target.iterdir()) if target.is_dir() else []
        taken = [
            path for path in paths if path.name in (spec.single_file, spec.index_file) or shard.fullmatch(path.name)
        ]
    taken += [folder / name for name in spec.extra_files(source) if (folder / name).exists()]
    if taken and not spec.force:
        raise CheckpointError(
            f"{', '.join(map(str, taken))} already exist{'s' * (len(taken) == 1)}. "
            "Give another target, or --force to replace."
        )
    return tuple(taken)


def export(checkpoint: Path, spec: ExportSpec) -> ExportResult:
    """Export the weights of a verified checkpoint."""
    taken, extra = check_target(spec, checkpoint), spec.extra_files(checkpoint)
    state, others, is_whole = _read_model(checkpoint, spec.ema)
    if spec.format.needs_all and not is_whole:
        raise CheckpointError(
            f"{checkpoint} leaves frozen weights out (--no-save-frozen), so it holds no whole model. Export the "
            "adapter with --export peft, or load the model: instep.load_model(task, RUN).save_pretrained(FOLDER)."
        )
    held: Shard = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
    tensors = spec.format.tensors(held, extra)
    if not tensors:
        raise CheckpointError(f"the model in {checkpoint} has no weights, so there is nothing to export.")
    shards = [tensors] if spec.is_file or not spec.format.may_shard else cut(tensors, spec.max_shard_bytes)
    try:
        written = _write(shards, spec, extra, taken)
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{spec.target} cannot be written: {why}. Fix that, then export again.") from error
    return ExportResult(
        files=tuple(written),
        num_tensors=len(tensors),
        num_bytes=_num_bytes(tensors),
        weights_sha256=weights_sha256(held) if is_whole else "",
        replaced=taken,
        left_out=tuple(sorted(state.keys() - held.keys())),
        other_models=others,
    )


def cut(tensors: Mapping[str, StoredTensor], max_bytes: int) -> list[Shard]:
    """Cut tensors into shards, in order; a tensor that is larger than a shard has one to itself."""
    shards: list[Shard] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > max_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _read_model(path: Path, ema: bool) -> tuple[dict[str, Any], tuple[str, ...], bool]:
    """Return the model's state with its tensors unread, the names of further models, and whether it is all of it.

    `ema`: with the averaged weights.
    """
    try:
        checkpoint = Checkpoint(path, is_verified=True)
        others = tuple(sorted(part for part in checkpoint.parts if re.fullmatch(rf"{MODEL}-\d+", part)))
        state = {str(name): value for name, value in checkpoint.stored(MODEL).items()}
        if ema:
            check_averaged(checkpoint)
            state |= checkpoint.stored(EMA)["weights"]
        return state, others, FROZEN not in checkpoint.parts
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"the model in {path} cannot be read: {error!r}.") from error


def _write(shards: list[Shard], spec: ExportSpec, extra: Mapping[str, Path], taken: tuple[Path, ...]) -> list[Path]:
    """Write all files under other names, then rename them; old and new files never look like one model."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    names = _names(shards, spec)
    indexed = [spec.index_file] if len(shards) > 1 else []
    finals = [spec.folder / name for name in [*extra, *names, *indexed]]
    scratch = {final: final.with_name(f".{final.name}.{os.getpid()}") for final in finals}
    try:
        for name, source in extra.items():
            final = spec.folder / name
            final.parent.mkdir(parents=True, exist_ok=True)
            write_synced(scratch[final], [source.read_bytes()])
        for name, shard in zip(names, shards, strict=True):
            write_tensors(scratch[spec.folder / name], shard, {"format": "pt"})  # transformers refuses a file without
        if indexed:
            weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": sum(map(_num_bytes, shards))}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_synced(scratch[finals[-1]], [text.encode()])
            _remove(taken)  # an old index must not refer to new shards
        for final, written in scratch.items():  # the index last: it must not exist before the shards
            os.replace(written, final)
        _remove(set(taken) - set(finals))
        sync_directory(spec.folder)
    finally:
        _remove(scratch.values())
    return finals


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _names(shards: list[Shard], spec: ExportSpec) -> list[str]:
    if spec.is_file:
        return [spec.target.name]
    if len(shards) == 1:
        return [spec.single_file]
    return [f"{spec.format.stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]


def _num_bytes(shard: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())
