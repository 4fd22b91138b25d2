"""Ctrl-C between two operations, never inside one: what must be done whole on the main thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class uninterrupted:  # noqa: N801 (used like a function, as torch.no_grad is)
    """Context in which Ctrl-C waits for the end of the block, and then does what it would have done.

    Python may raise KeyboardInterrupt after any call, even between the return of an operator and the assignment of its
    handle; a job lost that way would stay open for ever. Signals come to the main thread only, so on others there is
    nothing to hold back. Keep waits out of such blocks.
    """

    __slots__ = ("_frame", "_handler", "_number")

    def __enter__(self) -> None:
        self._handler: Any = None
        self._number: int | None = None
        self._frame: FrameType | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._number, self._frame = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        frame, self._frame = self._frame, None
        if self._number is not None:
            self._handler(self._number, frame)
