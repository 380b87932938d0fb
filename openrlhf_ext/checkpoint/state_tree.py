"""What a state is made of, and how it becomes JSON and arrays.

A state is a tree of dict, list, None, bool, int, float and str, with NumPy arrays and CPU tensors as leaves. In its
JSON form everything that JSON cannot say exactly is an object of the one key ``$``: ``{"$": ["array", "3"]}`` is the
array of name 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_TAG = "$"
_MAX_JSON_INT = 2**53
"""Beyond it, other readers of JSON round."""

_ARRAY_TYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
)
_TENSOR_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


@dataclass(slots=True, eq=False)
class Immutable:
    """A part of a state that never changes once it is made. Checkpoints share one file of it."""

    tree: object
    digest: str = ""
    """SHA-256 of that file, in hexadecimal; empty before it was written or read."""
    num_bytes: int = 0
    """Of that file."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as JSON and arrays."""

    tree: object
    """What `json.dumps` takes, strict JSON."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    immutables: list[Immutable] = field(default_factory=list)
    """Their trees are not part of ``tree``, which refers to them by position."""


def flatten(tree: object) -> FlatState:
    """A state as JSON and arrays. The arrays are the state's own where they can be; tuples become lists.

    Raises TypeError, with the place in the tree, for anything that a state cannot hold.
    """
    arrays: dict[str, np.ndarray] = {}
    immutables: list[Immutable] = []

    def add(array: np.ndarray) -> str:
        arrays[str(len(arrays))] = array
        return str(len(arrays) - 1)

    def encode(value: object, path: str) -> object:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return value if abs(value) <= _MAX_JSON_INT else {_TAG: ["int", hex(value)]}
        if isinstance(value, float):
            return value if math.isfinite(value) else {_TAG: ["float", repr(float(value))]}
        if isinstance(value, list | tuple):
            return [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            encoded = {key: encode(item, f"{path}.{key}") for key, item in value.items()}
            return {_TAG: ["dict", encoded]} if _TAG in encoded else encoded
        if isinstance(value, Immutable):
            immutables.append(value)
            return {_TAG: ["immutable", len(immutables) - 1]}
        if isinstance(value, np.ndarray) and value.dtype.name in _ARRAY_TYPES:
            return {_TAG: ["array", add(np.asarray(value, order="C"))]}
        if isinstance(value, np.ndarray) and value.dtype.kind == "S":
            raw = np.frombuffer(value.tobytes(), np.uint8)
            return {_TAG: ["bytes", add(raw), value.dtype.itemsize, list(value.shape)]}
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            name = str(value.dtype).removeprefix("torch.")
            if name in _TENSOR_TYPES:
                tensor = value.detach().contiguous()
                # NumPy has no bfloat16.
                bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
                return {_TAG: ["tensor", add(bits.numpy()), name]}
        raise TypeError(f"a checkpoint cannot hold {path}, {_description(value)}")

    return FlatState(encode(tree, "state"), arrays, immutables)


def _description(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} on {value.device}"
    if isinstance(value, Mapping):
        return "a dict whose keys are not all strings"
    return f"a value of type {type(value).__name__}"


def unflatten(tree: object, arrays: Mapping[str, np.ndarray], immutables: Sequence[Immutable] = ()) -> object:
    """The state that `flatten` took apart. Its arrays are those given.

    Raises ValueError, KeyError, IndexError or TypeError for what `flatten` did not make.
    """

    def decode(node: object) -> object:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _TAG not in node:
            return {key: decode(item) for key, item in node.items()}
        kind, value, *rest = node[_TAG]
        if kind == "int":
            return int(value, 16)
        if kind == "float":
            return float(value)
        if kind == "dict":
            return {key: decode(item) for key, item in value.items()}
        if kind == "immutable":
            return immutables[value]
        array = arrays[value]
        if kind == "array":
            return array
        if kind == "bytes":
            itemsize, shape = rest
            return array.view(f"S{itemsize}").reshape(shape)
        if kind == "tensor":
            return torch.from_numpy(array).view(_TENSOR_TYPES[rest[0]])
        raise ValueError(f"unknown kind of value {kind!r}")

    return decode(tree)
