"""A state becomes JSON and arrays and comes back as it was, or is refused by the place of what cannot."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from openrlhf_ext.checkpoint.state_tree import Immutable, flatten, unflatten


def through_json(tree: object) -> object:
    flat = flatten(tree)
    return unflatten(json.loads(json.dumps(flat.tree, allow_nan=False)), flat.arrays, flat.immutables)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            False,
            0,
            -1,
            2**53,
            2**53 + 1,
            -(2**127) - 1,
            [2**20_000],
            0.1,
            5e-324,
            -1.5e308,
            "",
            "\udc80 $",
        ),
        *([], {}, [[], {}], {"$": 1}, {"$": ["array", "0"], "b": {"$": {"$": []}}}, {"": [None, {"a b.c": "x"}]}),
    ],
)
def test_plain_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    back = through_json({"value": value})["value"]
    assert back == value and type(back) is type(value)


def test_floats_that_are_not_finite_and_the_sign_of_zero_survive_strict_json() -> None:
    back = through_json([math.inf, -math.inf, math.nan, -0.0])
    assert back[:2] == [math.inf, -math.inf] and math.isnan(back[2]) and math.copysign(1, back[3]) == -1


def test_tuples_become_lists() -> None:
    assert through_json({"a": (1, (2, "b"))}) == {"a": [1, [2, "b"]]}


def test_the_state_of_a_generator_survives() -> None:
    one, again = np.random.default_rng(3), np.random.default_rng(4)
    one.integers(9, dtype=np.int32)  # half of a 64-bit word is kept for the next call
    again.bit_generator.state = through_json(one.bit_generator.state)
    assert (
        again.integers(2**31, size=5, dtype=np.int32).tolist() == one.integers(2**31, size=5, dtype=np.int32).tolist()
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)])
@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "f2", "f4", "f8", "S3"]
)
def test_arrays_keep_type_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = through_json({"a": [array]})["a"][0]
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_parts_of_arrays_come_back_without_what_surrounds_them() -> None:
    grid = np.arange(12).reshape(3, 4)
    text = np.array([b"a", b"bc", b"", b"d\0e"])
    back = through_json([grid[:, ::2], grid.T, text[::2]])
    assert [part.tolist() for part in back] == [grid[:, ::2].tolist(), grid.T.tolist(), [b"a", b""]]


@pytest.mark.parametrize("shape", [(), (0, 2), (4,), (2, 3)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_tensors_come_back_as_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)).reshape(shape) / 3).to(dtype)
    for one in (tensor, tensor.t() if tensor.dim() == 2 else tensor):
        back = through_json(one)
        assert back.dtype == dtype and back.shape == one.shape and torch.equal(back, one)


def test_an_immutable_part_is_referred_to_and_comes_back_as_the_same_object() -> None:
    part = Immutable({"a": np.arange(3)})
    flat = flatten({"x": [part, 1], "y": np.arange(2)})
    assert flat.immutables == [part] and [array.tolist() for array in flat.arrays.values()] == [[0, 1]]
    assert unflatten(flat.tree, flat.arrays, flat.immutables)["x"][0] is part


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "value of type object"),
        (b"raw", "value of type bytes"),
        ({1, 2}, "value of type set"),
        (np.float32(1), "value of type float32"),
        ({1: "a"}, "dict whose keys are not all strings"),
        (np.array(["a"]), "array of <U1"),
        (np.array([None]), "array of object"),
        (np.zeros(1, complex), "array of complex128"),
        (torch.zeros(1, dtype=torch.complex64), "tensor of torch.complex64 on cpu"),
        (torch.zeros(1, device="meta"), "tensor of torch.float32 on meta"),
    ],
)
def test_anything_else_is_refused_with_its_place(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=rf"cannot hold state\.a\[1\]\.b, an? {message}"):
        flatten({"a": [0, {"b": value}]})
