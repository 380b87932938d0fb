"""A request to stop is noted, has a deadline, and leaves the process' signals as they were."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator

import pytest

from openrlhf_ext.stopping import StopRequest

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list]:
    """Those of a supervised driver; every test must leave them as they are, and no timer."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    own = [signal.getsignal(number) for number in NUMBERS]
    yield own
    left = [signal.getsignal(number) for number in NUMBERS], signal.getitimer(signal.ITIMER_REAL)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == (own, (0.0, 0.0))


def test_nothing_is_requested_before_a_signal_comes() -> None:
    with StopRequest(1000) as stop:
        assert not stop.requested
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("number", "saved", "code"),
    [
        (signal.SIGUSR1, True, 85),
        (signal.SIGUSR1, False, 143),
        (signal.SIGTERM, True, 143),
        (signal.SIGTERM, False, 143),
    ],
)
def test_only_a_saved_step_after_sigusr1_asks_to_be_started_again(number: int, saved: bool, code: int) -> None:
    with StopRequest(1000) as stop:
        signal.raise_signal(number)
        assert stop.requested
        assert stop.exit_code(saved=saved) == code


def test_the_deadline_runs_from_the_first_request() -> None:
    with StopRequest(1000):
        signal.raise_signal(signal.SIGUSR1)
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000
        signal.setitimer(signal.ITIMER_REAL, 500)  # as if time had passed
        signal.raise_signal(signal.SIGTERM)
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 500


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_at_the_deadline_the_earlier_handler_of_sigterm_ends_the_process(number: int) -> None:
    with pytest.raises(SystemExit) as ended, StopRequest(1000):
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGALRM)
    assert ended.value.code == 143


def test_a_deadline_of_zero_abandons_the_step_at_once() -> None:
    with pytest.raises(SystemExit), StopRequest(0):
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(60)  # ends with the exception


def test_after_the_block_sigterm_ends_the_process_as_before() -> None:
    with StopRequest(1000):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
