"""A whole file on its way through the engine, for protocols that take uploads. Knows no wire format."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import IO, TypeVar

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from mocha_server.audio import AudioError, RawDecoder, Samples
from mocha_server.engine import Engine
from mocha_server.messages import ErrorCode, Segment, Start
from mocha_server.protocols.live import silent
from mocha_server.stream import Stream
from mocha_server.transcript import SpokenText, Transcript

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
UPLOADS_AT_ONCE = 64  # whose bodies a process reads; each may fill `Settings.max_upload_mb` of the disk
STOPS = "the server stops"
RETRY = {503: {"Retry-After": "5"}}  # headers of answers, by status
T = TypeVar("T")


class UploadError(HTTPException):
    """An upload that cannot be read to its end: HTTP status, code and what the client is told."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message)
        self.code = code


class Upload:
    """Blocks of samples in, text and segments out; the blocks are decoded as they are needed."""

    def __init__(self, engine: Engine, blocks: AsyncGenerator[Samples, None], phrases: tuple[str, ...] = ()) -> None:
        self._engine, self._blocks, self._phrases = engine, blocks, phrases
        self._num_samples = 0
        self._first: Samples | None = None
        self._stream: Stream | None = None

    @property
    def seconds(self) -> float:
        """Audio decoded so far."""
        return self._num_samples / self._engine.info.sample_rate

    async def open(self) -> None:
        """Take a row and decode the first block, so that what fails there fails before anything is sent.

        Raises AudioError or EngineError; else `close` is due.
        """
        self._stream = self._engine.open(live=False)
        try:
            self._first = await anext(self._blocks, None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the row back."""
        if self._stream is not None:
            self._stream.close()

    async def messages(self) -> AsyncIterator[SpokenText | Segment]:
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
                block = await anext(self._blocks, None)
        finally:
            stream.finish()
            await self._blocks.aclose()


async def never_silent(items: AsyncIterator[T], silent_s: float) -> AsyncIterator[T | None]:
    """The same, and None whenever nothing came for `silent_s`."""
    coming: asyncio.Future[T] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items))
            done, _ = await asyncio.wait({coming}, timeout=silent_s)
            if not done:
                yield None
                continue
            item, coming = coming, None
            try:
                yield item.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)


@contextmanager
def told_of_the_end() -> Iterator[None]:
    """Of the server, which cancels what answers requests, as nothing else does: UploadError with status 503."""
    try:
        yield
    except asyncio.CancelledError:
        raise UploadError(503, ErrorCode.INTERNAL, STOPS) from None


def discard(file: IO[bytes]) -> None:
    """Close it, beside the event loop: a large file takes 0.1 s. Who waited would be cancelled when the server ends."""
    asyncio.get_running_loop().run_in_executor(None, _close, file)


def _close(file: IO[bytes]) -> None:
    with suppress(OSError):  # what the disk had no room for
        file.close()


def discard_form(form: FormData) -> None:
    """Close its files."""
    for _, part in form.multi_items():
        if isinstance(part, UploadFile):
            discard(part.file)


class _Body:
    """What a client sends, as an ASGI application receives it, within the limits of the settings."""

    def __init__(self, request: Request) -> None:
        self._request, self._settings = request, request.app.state.settings
        self._num_bytes = 0
        self._more = True

    async def receive(self) -> Message:
        """The next piece; raises UploadError where nothing comes, or too much did, once all of it is sent."""
        message = await self._sent()
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._settings.max_upload_mb * 10**6:
            await self.forget()
            raise UploadError(413, "file_too_large", f"more than {self._settings.max_upload_mb} MB were sent")
        return message

    async def forget(self) -> None:
        """Read the rest all the same: many clients write all of it before they read an answer."""
        while self._more:
            await self._sent()

    async def _sent(self) -> Message:
        idle_s = self._settings.idle_s
        try:
            async with asyncio.timeout(idle_s):
                message = await self._request.receive()
        except TimeoutError:
            raise UploadError(408, ErrorCode.IDLE, silent(idle_s)) from None
        self._more = message.get("more_body", False)
        return message


def limited(request: Request) -> Request:
    """The same request; reading more of its body than the settings allow raises UploadError with status 413.

    The rest is read first, and forgotten. Who sends nothing for `Settings.idle_s` before all is sent gets status 408.
    """
    return Request(request.scope, _Body(request).receive)


async def forget(request: Request) -> None:
    """Read its body, which nobody wants; raises UploadError where it does not come to its end."""
    await _Body(request).forget()


@asynccontextmanager
async def reading(request: Request) -> AsyncIterator[Request]:
    """The same request, limited, while its body is written to a file.

    Raises UploadError with status 503 where the disk has no room, or too many bodies are being read: once all is sent.
    """
    body, state = _Body(request), request.app.state
    num_read = getattr(state, "num_uploads_read", 0)
    if num_read >= UPLOADS_AT_ONCE:
        await body.forget()
        raise UploadError(503, ErrorCode.SERVER_FULL, "too many files are being sent: try again later")
    state.num_uploads_read = num_read + 1
    try:
        yield Request(request.scope, body.receive)
    except OSError as error:
        log.error("an upload could not be kept in a temporary file: %s", error)
        await body.forget()
        raise UploadError(503, ErrorCode.INTERNAL, "the server has no room for the file: try again later") from None
    finally:
        state.num_uploads_read -= 1


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
