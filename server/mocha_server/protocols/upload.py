"""A whole file on its way through the engine, for protocols that take uploads. Knows no wire format."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import IO

from starlette.requests import ClientDisconnect, Request

from mocha_server.audio import AudioError, RawDecoder, Samples
from mocha_server.engine import Engine
from mocha_server.messages import ErrorCode, Segment, Start, Text
from mocha_server.stream import Stream
from mocha_server.transcript import Transcript

READ_BYTES = 1 << 16


class Upload:
    """Blocks of samples in, text and segments out; the blocks are decoded beside the event loop as they are needed."""

    def __init__(self, engine: Engine, blocks: Iterator[Samples], phrases: tuple[str, ...] = ()) -> None:
        self._engine, self._blocks, self._phrases = engine, blocks, phrases
        self._num_samples = 0

    @property
    def seconds(self) -> float:
        """Audio decoded so far."""
        return self._num_samples / self._engine.info.sample_rate

    async def open(self) -> Samples | None:
        """The first block, so that bad files fail before anything is sent; raises AudioError."""
        return await asyncio.to_thread(next, self._blocks, None)

    async def messages(self, block: Samples | None) -> AsyncIterator[Text | Segment]:
        """Text and segments as they come; raises AudioError or EngineError."""
        stream = self._engine.open(live=False)
        feeder = asyncio.create_task(self._feed(stream, block))
        transcript = Transcript(self._engine.info)
        try:
            async for emissions in stream.events():
                for message in transcript.push(emissions):
                    yield message
            await feeder
        finally:
            feeder.cancel()
            stream.close()
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
        first = await self.open()
        return [message async for message in self.messages(first) if isinstance(message, Segment)]

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
