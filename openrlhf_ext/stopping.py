"""Stopping on request: SIGTERM and SIGUSR1 let the train step end and its checkpoint be written, within a deadline.

Exit codes: 85 after SIGUSR1 where a checkpoint was written, or no step had begun, which tells a job script to start
the run again; 128 + 15 after SIGTERM, and after either where the deadline came first: the last checkpoint is then an
earlier one. A run whose last step is trained and evaluated writes its model and ends with 0.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType

logger = logging.getLogger(__name__)

EXIT_REQUEUE = 85
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_AT_ONCE_S = 1e-6
"""Zero would switch the timer off."""


class StopRequest:
    """Notes the request while the ``with`` block runs; the loop asks ``requested`` between steps.

    Args:
        deadline_s: seconds from the request until the step is abandoned. Then the handler of SIGTERM that was there
            before runs, which must raise SystemExit.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._number: int | None = None

    @property
    def requested(self) -> bool:
        return self._number is not None

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.getsignal(number) for number in (*_SIGNALS, signal.SIGALRM)}
        for number in _SIGNALS:
            signal.signal(number, self._note)
        signal.signal(signal.SIGALRM, self._abandon)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def exit_code(self, *, saved: bool) -> int:
        return EXIT_REQUEUE if self._number == signal.SIGUSR1 and saved else 128 + signal.SIGTERM

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._number is None:
            name = signal.Signals(number).name
            logger.warning("%s: stopping after this train step, or in %g s without it", name, self._deadline_s)
            signal.setitimer(signal.ITIMER_REAL, max(self._deadline_s, _AT_ONCE_S))
        self._number = number

    def _abandon(self, _number: int, frame: FrameType | None) -> None:
        logger.warning("the train step did not end within %g s and is abandoned", self._deadline_s)
        self._previous[signal.SIGTERM](signal.SIGTERM, frame)  # type: ignore[operator]
