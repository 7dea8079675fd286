"""A whole file on its way through the engine, for protocols that take uploads. Knows no wire format."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from mocha_server.audio import AudioError, RawDecoder, Samples
from mocha_server.engine import Engine
from mocha_server.messages import ErrorCode, Segment, Start, Text
from mocha_server.protocols.live import silent
from mocha_server.stream import Stream
from mocha_server.transcript import Transcript

READ_BYTES = 1 << 16
STOPS = "the server stops"
CODES = {408: ErrorCode.IDLE.value, 413: "file_too_large", 503: ErrorCode.INTERNAL.value}  # of what is raised here


class Upload:
    """Blocks of samples in, text and segments out; the blocks are decoded beside the event loop as they are needed."""

    def __init__(self, engine: Engine, blocks: Iterator[Samples], phrases: tuple[str, ...] = ()) -> None:
        self._engine, self._blocks, self._phrases = engine, blocks, phrases
        self._num_samples = 0
        self._first: Samples | None = None
        self._stream: Stream | None = None

    @property
    def seconds(self) -> float:
        """Audio decoded so far."""
        return self._num_samples / self._engine.info.sample_rate

    async def open(self) -> None:
        """Decode the first block and take a row, so that what fails there fails before anything is sent.

        Raises AudioError or EngineError. Then `close` is due.
        """
        self._first = await asyncio.to_thread(next, self._blocks, None)
        self._stream = self._engine.open(live=False)

    def close(self) -> None:
        """Give the row back."""
        if self._stream is not None:
            self._stream.close()

    async def messages(self) -> AsyncIterator[Text | Segment]:
        """Text and segments as they come, once it is open; raises AudioError or EngineError."""
        assert self._stream is not None
        stream = self._stream
        feeder = asyncio.create_task(self._feed(stream, self._first))
        transcript = Transcript(self._engine.info)
        try:
            async for emissions in stream.events():
                for message in transcript.push(emissions, self._num_samples):
                    yield message
            await feeder
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)

    async def segments(self, request: Request) -> list[Segment]:
        """The whole transcript; raises AudioError, EngineError, or ClientDisconnect as soon as the client has gone.

        `request` is that of the client; its body has been read.
        """
        reading, leaving = asyncio.create_task(self._segments()), asyncio.create_task(_gone(request))
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise ClientDisconnect
            return reading.result()
        finally:
            for task in (reading, leaving):
                task.cancel()
            await asyncio.gather(reading, leaving, return_exceptions=True)

    async def _segments(self) -> list[Segment]:
        try:
            await self.open()
            return [message async for message in self.messages() if isinstance(message, Segment)]
        finally:
            self.close()

    async def _feed(self, stream: Stream, block: Samples | None) -> None:
        try:
            if self._phrases:
                await stream.favour(self._phrases)
            while block is not None and not stream.closed:
                self._num_samples += len(block)
                await stream.write(block)
                block = await asyncio.to_thread(next, self._blocks, None)
        finally:
            stream.finish()


@contextmanager
def told_of_the_end() -> Iterator[None]:
    """Of the server, which cancels what answers requests, as nothing else does: HTTPException with status 503."""
    try:
        yield
    except asyncio.CancelledError:
        raise HTTPException(503, STOPS) from None


def discard(file: IO[bytes]) -> None:
    """Close it, beside the event loop: a large file takes 0.1 s. Who waited would be cancelled when the server ends."""
    asyncio.get_running_loop().run_in_executor(None, file.close)


def discard_form(form: FormData) -> None:
    """Close its files."""
    for _, part in form.multi_items():
        if isinstance(part, UploadFile):
            discard(part.file)


def limited(request: Request) -> Request:
    """The same request; reading more of its body than the settings allow raises HTTPException with status 413.

    The rest is read all the same, and forgotten: many clients write all of it before they read an answer. Who sends
    nothing for `Settings.idle_s` before all is sent gets status 408.
    """
    settings, num_bytes = request.app.state.settings, 0

    async def sent() -> Message:
        try:
            async with asyncio.timeout(settings.idle_s):
                return await request.receive()
        except TimeoutError:
            raise HTTPException(408, silent(settings.idle_s)) from None

    async def receive() -> Message:
        nonlocal num_bytes
        message = await sent()
        num_bytes += len(message.get("body", b""))
        if num_bytes > settings.max_upload_mb * 10**6:
            while message.get("more_body"):
                message = await sent()
            raise HTTPException(413, f"more than {settings.max_upload_mb} MB were sent")
        return message

    return Request(request.scope, receive)


async def _gone(request: Request) -> None:
    """Until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def decode_raw(file: IO[bytes], start: Start, to_rate: int) -> Iterator[Samples]:
    """Samples of a file without a header, written as `start` says; raises AudioError."""
    decoder = RawDecoder(start.encoding, start.sample_rate, start.channels, to_rate)
    some = False
    while data := file.read(READ_BYTES):
        some = True
        yield decoder.push(data)
    if not some:
        raise AudioError(ErrorCode.EMPTY_AUDIO, "the file is empty")
    yield decoder.finish()
