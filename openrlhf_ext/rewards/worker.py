"""The process of a `RewardPool` that runs a reward file, one call at a time.

Standard library only, so that a worker costs what the reward file costs and nothing more. The main thread runs the
reward function: graders that use `signal.alarm` (math-verify) work here, which they do not in OpenRLHF's threads.
"""

import ctypes
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

PlainValue = None | bool | int | float | str | list["PlainValue"] | dict[str, "PlainValue"]
_PR_SET_PDEATHSIG = 1


def plain(value: object) -> PlainValue:
    """`value` in Python's own types, so that sending it needs no torch and no numpy on either side.

    A tensor or array with one element becomes its number, a longer one nested lists. Other numbers (Fraction, Decimal,
    sympy) become floats; anything else becomes a text that names its type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        entries = value.tolist()
        while isinstance(entries, list) and len(entries) == 1:
            entries = entries[0]
        return entries if isinstance(entries, (bool, int, float, list)) else str(entries)
    if hasattr(value, "__float__"):
        return float(value)
    return f"an object of type {type(value).__name__}"


def load_reward_func(path: str) -> Callable[..., object]:
    """The `reward_func` of the file at `path`, loaded as OpenRLHF loads it."""
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward_func


def main(descriptor: int, parent: int, path: str) -> None:
    """Load the reward file, say how that went, then answer calls until the pool closes the pipe.

    Every message to the pool is ("ok", result) or ("exception", description).
    """
    _die_with(parent)
    connection = Connection(descriptor)
    try:
        reward_func = load_reward_func(path)
    except (Exception, SystemExit) as error:
        connection.send(("exception", describe(error)))
        return
    connection.send(("ok", None))
    try:
        while True:
            connection.send(_answer(reward_func, connection.recv()))
    except (EOFError, ConnectionError):
        return  # the pool is gone


def _answer(reward_func: Callable[..., object], arguments: tuple[list[str], ...]) -> tuple[str, PlainValue]:
    try:
        return "ok", plain(reward_func(*arguments))
    except (Exception, SystemExit) as error:
        return "exception", describe(error)


def _die_with(parent: int) -> None:
    """Be killed when the starting thread ends (Linux): a worker inside a hanging call would not see the pipe close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


def describe(error: BaseException) -> str:
    """Type, message and the innermost line, e.g. `ZeroDivisionError: division by zero (reward.py:7)`."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text
