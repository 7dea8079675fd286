"""What `mocha-asr stream` shows: characters as they come, and beside a microphone its level."""

import json
import math
import sys
import time
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text as Line

from mocha_client.client import Event
from mocha_client.continuity import Reconnected
from mocha_server.messages import Error, Segment, Text

FLOOR_DB, LOUD_DB, METER_CELLS = -60.0, -6.0, 30


class View(Protocol):
    """Shows a stream; a context manager."""

    def __enter__(self) -> "View":
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End, also after an error."""
        ...

    def heard(self, piece: bytes) -> None:
        """Audio on its way to the server."""
        ...

    def said(self, event: Event) -> None:
        """An event of the stream."""
        ...


class PlainView:
    """Deltas to standard output."""

    _shown = False

    def __enter__(self) -> "PlainView":
        """Nothing to begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the line, if there is one."""
        if self._shown or error is None:
            print(flush=True)

    def heard(self, piece: bytes) -> None:
        """Show nothing."""

    def said(self, event: Event) -> None:
        """Print what is new."""
        if isinstance(event, Text):
            self._shown = True
            print(event.delta, end="", flush=True)


class JsonView(PlainView):
    """One object at the end: text, words, characters each with the seconds after which it was `received`."""

    def __enter__(self) -> "JsonView":
        """Start the clock."""
        self._began = time.monotonic()
        self._texts: list[str] = []
        self._result: dict[str, Any] = {"text": "", "words": [], "characters": []}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Print the object: what there is, if the stream failed."""
        if error is None or self._result["characters"]:
            print(json.dumps(self._result | {"text": " ".join(self._texts)}, ensure_ascii=False), flush=True)

    def said(self, event: Event) -> None:
        """Collect."""
        if isinstance(event, Text):
            received = round(time.monotonic() - self._began, 4)
            self._result["characters"] += [c.model_dump() | {"received": received} for c in event.characters]
        elif isinstance(event, Segment):
            self._texts.append(event.text)
            self._result["words"] += [w.model_dump() for w in event.words]


class MicrophoneView(PlainView):
    """The microphone's level in the last line of a terminal, text above it.

    Where only standard error is a terminal, the level is there and the text goes to standard output as ever.
    """

    def __init__(self, terminal: Console) -> None:
        self._live = Live(console=terminal, refresh_per_second=12, transient=True, redirect_stdout=False)
        self._together = sys.stdout.isatty()
        self._open, self._level = "", FLOOR_DB

    def __enter__(self) -> "MicrophoneView":
        """Take over the last lines of the terminal."""
        self._live.start()
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back."""
        self._live.stop()
        print(self._open if self._together else "", flush=True)

    def heard(self, piece: bytes) -> None:
        """Show how loud it is."""
        self._level = level_db(piece)
        self._show()

    def said(self, event: Event) -> None:
        """Show what is new; closed segments scroll up."""
        if not self._together:
            return super().said(event)
        if isinstance(event, Text):
            self._open += event.delta.lstrip() if not self._open else event.delta
        elif isinstance(event, Segment):
            self._live.console.print(event.text, markup=False, highlight=False)
            self._open = ""
        self._show()

    def _show(self) -> None:
        meter = level_meter(self._level)
        self._live.update(Group(Line(self._open), meter) if self._together else meter)


def warn(warning: Error, console: Console) -> None:
    """Say what the server objects to."""
    console.print(f"warning: {warning.message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def notice(event: Event, console: Console) -> None:
    """Say what happened to the connection, where that is news."""
    if isinstance(event, Reconnected):
        lost = f"; {event.missing:.1f} s before that gave no text and are not heard again" if event.missing else ""
        console.print(f"connected again, listening from {event.time:.1f} s{lost}", style="yellow")


def level_db(piece: bytes) -> float:
    """Root mean square of s16le samples in dB of full scale, from `FLOOR_DB` to 0."""
    samples = np.frombuffer(piece[: len(piece) // 2 * 2], "<i2").astype(np.float64) / 32768
    power = float((samples**2).mean()) if len(samples) else 0.0
    return max(FLOOR_DB, 10 * math.log10(power)) if power else FLOOR_DB


def level_meter(level: float) -> Line:
    """A bar for `level` in dB of full scale."""
    filled = round((1 - level / FLOOR_DB) * METER_CELLS)
    style = "red" if level > LOUD_DB else "green"
    bar = Line("▮" * filled, style=style)
    return Line("level ").append(bar).append("▯" * (METER_CELLS - filled), style="dim").append(f" {level:4.0f} dB")
