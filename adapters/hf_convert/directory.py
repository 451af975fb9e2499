"""Reads a Hugging Face model directory: its config, and its tensors one by one or slice by slice.

Only headers are read on opening, so a directory of any size opens at once and every rank can read just its part.
Weights must be safetensors, in one file or sharded with an index; pickled weights are refused, because loading them
runs code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from adapters.hf_convert.dtypes import DTYPES, name_from_safetensors
from adapters.hf_convert.names import listing, name_problems, raise_problems, value_problems

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor, as the header of its file describes it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """ "float32", "bfloat16", "float16", or another name, or the raw safetensors code of an unusual one."""
    file: str
    """File name within the directory."""


class HFDirectory:
    """A model directory, opened.

    Attributes:
        path: the directory.
        config: the parsed config.json.
        tensors: TensorInfo by name, in the order of the files.

    Raises:
        ValueError: the directory, config.json or the weights are missing, malformed, truncated or contradict the index.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: no such directory, expected a Hugging Face model directory")
        self.config = read_json(self.path / CONFIG)
        self._files: dict[str, Any] = {}
        self._places: dict[str, dict[str, tuple[int, int]]] = {}
        self.tensors = self._indexed() if (self.path / INDEX).exists() else self._headers(SINGLE)

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU. Backed by the mapped file: clone it to keep it after the file may be gone."""
        return self._opened(self._info(name).file).get_tensor(name)

    def read_copy(self, name: str) -> torch.Tensor:
        """One whole tensor on the CPU, in memory of its own.

        Pages of a mapped file count as this process's memory until something else needs them: whoever reads a model
        of any size tensor by tensor would seem to hold all of it.
        """
        info = self._info(name)
        dtype = DTYPES.get(info.dtype)
        if dtype is None:
            return self.read(name).clone()
        tensor = torch.empty(info.shape, dtype=dtype)
        first, end = self._places_in(info.file)[name]
        assert end - first == tensor.nbytes, f"{self.path / info.file}: header of {name!r}"
        with (self.path / info.file).open("rb") as file:
            file.seek(first)
            got = file.readinto(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else 0
        if got != tensor.nbytes:
            raise ValueError(f"{self.path / info.file}: ends within {name!r}; it is truncated, copy it again")
        return tensor

    def read_shard(self, name: str, *, dim: int, rank: int, size: int) -> torch.Tensor:
        """The `rank`-th of `size` equal slices along `dim`, contiguous. Reads that slice only.

        Raises:
            ValueError: the dimension does not exist or does not divide into `size`, or `rank` is not in [0, size).
        """
        info = self._info(name)
        if not 0 <= dim < len(info.shape) or info.shape[dim] % size or not 0 <= rank < size:
            raise ValueError(
                f"{self.path / info.file}: {name!r} of shape {info.shape} has no slice {rank} of {size} along "
                f"dimension {dim}; choose a parallel size that divides it"
            )
        length = info.shape[dim] // size
        place = tuple(slice(None) for _ in range(dim)) + (slice(rank * length, (rank + 1) * length),)
        return self._opened(info.file).get_slice(name)[place].contiguous()

    def check(self, expected: Mapping[str, Sequence[int]], *, dtype: str | None = None) -> None:
        """Compares names, shapes and, if given, the dtype of every tensor with what a model needs.

        Raises:
            ValueError: names every difference, all kinds in one message.
        """
        problems = name_problems(self.tensors.keys(), expected.keys())
        shapes = {name: info.shape for name, info in self.tensors.items()}
        problems += value_problems("shape", shapes, {name: tuple(shape) for name, shape in expected.items()})
        if dtype is not None:
            dtypes = {name: info.dtype for name, info in self.tensors.items()}
            problems += value_problems("dtype", dtypes, dict.fromkeys(expected, dtype))
        raise_problems(self.path, problems, advice="The tensors must be exactly those that config.json describes")

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ValueError(f"{self.path}: no tensor {name!r} among its {len(self.tensors)}")
        return self.tensors[name]

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self.path / file}: not a whole safetensors file ({error}); it is truncated or corrupt, "
                    "copy it again"
                ) from error
        return self._files[file]

    def _places_in(self, file: str) -> dict[str, tuple[int, int]]:
        """Of each tensor of a file, where its bytes begin and end. The header is parsed once: it lists all of them."""
        if file not in self._places:
            with (self.path / file).open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            begins_and_ends = {name: entry["data_offsets"] for name, entry in header.items()}
            self._places[file] = {name: (8 + size + a, 8 + size + b) for name, (a, b) in begins_and_ends.items()}
        return self._places[file]

    def _headers(self, file: str) -> dict[str, TensorInfo]:
        if not (self.path / file).is_file():
            raise ValueError(f"{self.path}: no {SINGLE} and no {INDEX}; expected weights in safetensors format")
        opened = self._opened(file)
        return {name: _info_of(name, opened.get_slice(name), file) for name in opened.keys()}  # noqa: SIM118

    def _indexed(self) -> dict[str, TensorInfo]:
        """All shards that the index names, which together must hold exactly the tensors that it lists."""
        where = self.path / INDEX
        index = read_json(where).get("weight_map")
        if not isinstance(index, dict) or not index or not all(_is_file_name(file) for file in index.values()):
            raise ValueError(f"{where}: weight_map must be an object of tensor names to names of files beside it")
        files = sorted(set(index.values()))
        if absent := [file for file in files if not (self.path / file).is_file()]:
            raise ValueError(f"{where}: names {len(absent)} files that do not exist: {listing(absent)}; copy them too")
        held = [info for file in files for info in self._headers(file).values()]
        problems = name_problems([_place(info.name, info.file) for info in held], [_place(*i) for i in index.items()])
        raise_problems(
            where, problems, advice="Index and shards belong to different versions: copy the whole directory"
        )
        return {info.name: info for info in held}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: got {type(value).__name__}, expected a JSON object")
    return value


def _info_of(name: str, header: Any, file: str) -> TensorInfo:
    return TensorInfo(
        name=name, shape=tuple(header.get_shape()), dtype=name_from_safetensors(header.get_dtype()), file=file
    )


def _place(name: str, file: str) -> str:
    return f"{name} in {file}"


def _is_file_name(file: object) -> bool:
    return isinstance(file, str) and Path(file).name == file
