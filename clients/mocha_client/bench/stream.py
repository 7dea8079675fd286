"""One paced stream of a clip over a real WebSocket, made so cheap that hundreds fit beside the server they measure.

The audio messages are masked and framed once per clip, the handshake and everything received are websockets' own
sans-I/O protocol. A stream owns no task: the event loop's timers pace it.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import orjson
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import State
from websockets.uri import parse_uri

from mocha_client.bench.measurements import Measured
from mocha_client.bench.speech import BYTES_PER_MS
from mocha_client.connection import KeyRefused, authorization
from mocha_client.sources import DECODED
from mocha_server.messages import Finish

Characters = list[tuple[str, int]]
START = DECODED.model_dump_json().encode()
FINISH = Frame(Opcode.TEXT, Finish().model_dump_json().encode()).serialize(mask=True)


@dataclass(frozen=True)
class Clip:
    """Audio cut into messages ready for the wire, and the characters the server gives for it alone, once known."""

    messages: tuple[bytes, ...]
    piece_ms: int
    audio_s: float
    expected: Characters | None = None


def make_clip(audio: bytes, piece_ms: int, expected: Characters | None = None) -> Clip:
    """Cut and frame 16 kHz s16le `audio`."""
    size = piece_ms * BYTES_PER_MS
    pieces = [audio[start : start + size] for start in range(0, len(audio), size)]
    messages = tuple(Frame(Opcode.BINARY, piece).serialize(mask=True) for piece in pieces)
    return Clip(messages, piece_ms, len(audio) / (1000 * BYTES_PER_MS), expected)


class LoadStream(asyncio.Protocol):
    """Connect, wait for `ready`, `begin`, and await `done`."""

    def __init__(self, index: int, url: str, api_key: str | None, clip: Clip) -> None:
        self.measured, self.characters = Measured(index), Characters()
        self._clip, self._loop = clip, asyncio.get_running_loop()
        self._url, self._headers = url, authorization(api_key)
        self._protocol = ClientProtocol(parse_uri(url), max_size=2**24)
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._sent_at: list[float] = []
        self._due, self._paced = 0.0, True
        self._finished_at: float | None = None
        self._connected, self._ahead_s = False, 0.0

    async def connect(self, timeout_s: float) -> bool:
        """Open the stream; whether the server admitted it (if not, `measured` says why)."""
        uri = self._protocol.uri
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.create_connection(lambda: self, uri.host, uri.port, ssl=True if uri.secure else None)
                await asyncio.wait({self.ready, self.done}, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, TimeoutError) as error:
            self._end(error=f"no connection: {error or 'timed out'}")
        return self.ready.done()

    def begin(self, at: float, paced: bool = True) -> None:
        """Send the audio: its first piece when `at` (monotonic clock) and the length of a piece have passed."""
        self._due, self._paced = at + self._clip.piece_ms / 1000, paced
        if self.done.done():
            return
        if paced:
            self._loop.call_at(self._due, self._send)
            return
        for _ in self._clip.messages:
            self._send()
        self._finish()

    def close(self) -> None:
        """Close the connection; counts the stream as dropped if it has not ended."""
        self._end(dropped=True)
        if self._connected:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._connected = transport, True
        request = self._protocol.connect()
        request.headers.update(self._headers)
        self._protocol.send_request(request)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Before `end` or an error, that is a dropped stream."""
        self._end(dropped=True)

    def data_received(self, data: bytes) -> None:
        """Handshake, messages, pings, close."""
        now = self._loop.time()
        self._protocol.receive_data(data)
        for event in self._protocol.events_received():
            if isinstance(event, Response):
                self._answered()
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                self._heard(bytes(event.data), now)
        self._flush()

    def _answered(self) -> None:
        error = self._protocol.handshake_exc
        if error is not None:
            text = str(error) if isinstance(error, InvalidHandshake) else "the handshake failed"
            if isinstance(error, InvalidStatus) and error.response.status_code == HTTPStatus.UNAUTHORIZED:
                text = str(KeyRefused(self._url, given=bool(self._headers)))
            self._end(error=text)
        elif self._protocol.state is State.OPEN:  # a server that is full may have closed in the same breath
            self._protocol.send_text(START)

    def _heard(self, data: bytes, now: float) -> None:
        message = orjson.loads(data)
        kind = message.get("type")
        if kind == "text":
            self._text(message["characters"], now)
        elif kind == "ready":
            self._ahead_s = message.get("look_ahead_ms", 0.0) / 1000
            self.ready.set_result(None)
        elif kind == "end":
            assert self._finished_at is not None
            self.measured.final_s = now - self._finished_at
            expected = self._clip.expected
            self.measured.mismatch = expected is not None and self.characters != expected
            self._end()
        elif kind == "error" and "fatal" in message:
            if message["fatal"]:
                self._end(error=f"{message['code']}: {message['message']}")
        elif kind != "segment":
            self._end(error="this is not /v1/stream of a mocha-asr server")

    def _text(self, characters: Sequence[dict[str, object]], now: float) -> None:
        measured, piece_s = self.measured, self._clip.piece_ms / 1000
        if measured.first_s is None and self._sent_at:
            measured.first_s = now - self._sent_at[0]
        for character in characters:
            heard_s = float(character["time"]) + self._ahead_s  # type: ignore[arg-type]
            piece = int(heard_s / piece_s - 1e-6)  # the piece with the last sample that the frame needs
            known = piece < len(self._sent_at)
            if known or self._finished_at is not None:  # frames after the last piece were completed by finish
                measured.lags_s.append(now - (self._sent_at[piece] if known else self._finished_at or now))
            self.characters.append((str(character["text"]), int(character["frame"])))  # type: ignore[call-overload]

    def _send(self) -> None:
        if self.done.done():
            return
        now, place = self._loop.time(), len(self._sent_at)
        self._transport.write(self._clip.messages[place])
        self._sent_at.append(now)
        if not self._paced:
            return
        self.measured.late_s.append(now - self._due)
        if place + 1 == len(self._clip.messages):
            self._finish()
            return
        self._due += self._clip.piece_ms / 1000
        self._loop.call_at(self._due, self._send)

    def _finish(self) -> None:
        self._finished_at = self._loop.time()
        self.measured.audio_s = self._clip.audio_s
        self._transport.write(FINISH)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()

    def _end(self, error: str | None = None, dropped: bool = False) -> None:
        if self.done.done():
            return
        self.measured.error, self.measured.dropped = error, dropped
        self.measured.ended_at = time.monotonic()
        self.done.set_result(None)


async def alone(url: str, api_key: str | None, clip: Clip, timeout_s: float) -> Characters:
    """The characters of a clip sent by itself, as fast as the server takes it.

    Raises:
        ConnectionError: the server did not transcribe it.

    """
    stream = LoadStream(0, url, api_key, clip)
    if await stream.connect(timeout_s):
        stream.begin(asyncio.get_running_loop().time(), paced=False)
        await asyncio.wait({stream.done}, timeout=timeout_s)
    stream.close()
    if stream.measured.final_s is None:
        raise ConnectionError(stream.measured.error or f"{url} broke off")
    return stream.characters
