"""Wyoming, Home Assistant's protocol: JSON lines with binary payloads over TCP.

One transcript for each `audio-start` … `audio-stop`; its text also comes in chunks, as it is emitted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mocha_server.engine import Engine
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import End, Error, ErrorCode, Names, Segment, Start, Text, favourable
from mocha_server.protocols.live import SLOW_S, Gone, Live, Request, Said, Then, converse, refused
from mocha_server.session import explain
from mocha_server.settings import Settings
from mocha_server.transcript import ModelInfo

log = logging.getLogger(__name__)
VERSION = "1.5.2"  # of the protocol these messages are written for
MAX_LINE_BYTES, MAX_DATA_BYTES, MAX_PAYLOAD_BYTES = 1 << 16, 1 << 20, 1 << 24
LINGER_S = 2.0  # how long a refused client may go on sending
Data = TypeVar("Data", bound=BaseModel)


class Event(BaseModel):
    """One message; `data` of the header and of the bytes after it are one."""

    model_config = ConfigDict(extra="ignore")

    type: str
    data: dict[str, Any] | None = None
    data_length: int | None = Field(None, ge=0, le=MAX_DATA_BYTES)
    payload_length: int | None = Field(None, ge=0, le=MAX_PAYLOAD_BYTES)
    payload: bytes = Field(b"", exclude=True)


class AudioFormat(BaseModel):
    """What `audio-start` and `audio-chunk` say of their audio."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rate: int = Field(ge=8_000, le=48_000)
    width: Literal[2]  # bytes of a sample
    channels: int = Field(ge=1, le=8)


class Transcribe(BaseModel):
    """What `transcribe` says of the audio to follow; names come first where there are too many phrases."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    transcript_names: Names = None
    transcript_terms: Names = None

    @property
    def phrases(self) -> tuple[str, ...]:
        """As many as the server favours."""
        return favourable([*(self.transcript_names or ()), *(self.transcript_terms or ())])


class WyomingTranslator:
    """One connection; any number of transcripts, one after another."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._format: AudioFormat | None = None  # of the audio under way
        self._phrases: tuple[str, ...] = ()  # of the transcript under way, or the next one
        self._segments: list[str] = []
        self._begun = False  # whether `transcript-start` was sent

    def start(self) -> Start:
        """The format of the audio under way, and the phrases to favour in it."""
        if self._format is None:
            return Start(phrases=self._phrases)
        return Start(sample_rate=self._format.rate, channels=self._format.channels, phrases=self._phrases)

    def received(self, message: Event) -> Request[bytes]:
        """See `Translator`; unknown events are dropped, as the protocol asks."""
        if message.type == "describe":
            return Request((_encode("info", describe(self._info)),))
        if message.type == "ping":
            try:
                return Request((_encode("pong", message.data or {}),))
            except TypeError as error:  # an integer beyond 64 bits
                raise refused(ErrorCode.INVALID_MESSAGE, f"ping: {error}") from None
        if message.type == "transcribe":
            self._phrases = _valid(Transcribe, message).phrases
        if message.type in ("audio-start", "audio-chunk"):
            self._check(message)
            return Request(audio=message.payload if message.type == "audio-chunk" else b"")
        if message.type == "audio-stop":
            return Request(then=Then.FLUSH)
        return Request()

    def _check(self, message: Event) -> None:
        found = _valid(AudioFormat, message)
        if self._format not in (None, found):
            raise refused(ErrorCode.INVALID_AUDIO, "the audio format changed before audio-stop")
        self._format = found

    def said(self, message: Said) -> tuple[bytes, ...]:
        """See `Translator`."""
        if isinstance(message, Text):
            return (*self._begin(), _encode("transcript-chunk", {"text": message.delta}))
        if isinstance(message, Segment):
            self._segments.append(message.text)
        if not isinstance(message, End):
            return ()
        begin, text = self._begin(), " ".join(self._segments)
        self._format, self._phrases, self._segments, self._begun = None, (), [], False
        return (*begin, _encode("transcript", {"text": text, "language": "en"}), _encode("transcript-stop"))

    def _begin(self) -> tuple[bytes, ...]:
        begun, self._begun = self._begun, True
        return () if begun else (_encode("transcript-start", {"language": "en"}),)

    def failed(self, error: Error) -> tuple[bytes, ...]:
        """See `Translator`."""
        return (_encode("error", {"text": error.message, "code": error.code.value}),)


class TcpTransport:
    """Events over a pair of asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> Event:
        """See `Transport`."""
        try:
            return await self._event()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise Gone from None

    async def _event(self) -> Event:
        try:
            line = await self._reader.readuntil(b"\n")
            event = Event.model_validate_json(line)
            if event.data_length:
                data = orjson.loads(await self._reader.readexactly(event.data_length))
                event = event.model_copy(update={"data": {**(event.data or {}), **data}})
        except asyncio.LimitOverrunError:
            raise refused(ErrorCode.INVALID_MESSAGE, f"a header of more than {MAX_LINE_BYTES} bytes") from None
        except ValidationError as error:
            raise refused(ErrorCode.INVALID_MESSAGE, f"header: {explain(error)}") from None
        except (orjson.JSONDecodeError, TypeError):
            raise refused(ErrorCode.INVALID_MESSAGE, "the data of an event is a JSON object") from None
        if event.payload_length:
            event = event.model_copy(update={"payload": await self._reader.readexactly(event.payload_length)})
        return event

    async def send(self, message: bytes) -> None:
        """See `Transport`."""
        try:
            self._writer.write(message)
            async with asyncio.timeout(SLOW_S):
                await self._writer.drain()
        except (ConnectionError, TimeoutError):
            self._writer.transport.abort()
            raise Gone from None

    async def close(self, error: Error | None) -> None:
        """See `Transport`. What the client is still sending is read for a while: bytes left unread would reset the
        connection, and the last message could be lost with it.
        """
        try:
            async with asyncio.timeout(LINGER_S):
                self._writer.write_eof()
                while await self._reader.read(MAX_LINE_BYTES):
                    pass
        except (OSError, TimeoutError):
            pass
        self._writer.close()


def describe(info: ModelInfo) -> dict[str, Any]:
    """The `info` event's data."""
    made_by = {"attribution": {"name": "mocha-asr", "url": ""}, "installed": True, "version": "1"}
    model = {"name": info.name, "description": "MoChA, streaming", "languages": ["en"], **made_by}
    program = {
        "name": "mocha-asr",
        "description": "Streaming speech recognition",
        "models": [model],
        "supports_transcript_streaming": True,
        **made_by,
    }
    return {"asr": [program], "tts": [], "handle": [], "intent": [], "wake": [], "mic": [], "snd": []}


@asynccontextmanager
async def listening(engine: Engine, settings: Settings) -> AsyncIterator[int | None]:
    """Serve Wyoming while the context lasts, if a port is set; gives the port."""
    if settings.wyoming_port is None:
        yield None
        return
    clients: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, stopping = asyncio.current_task(), False
        assert task is not None
        clients.add(task)
        try:
            transport, live = TcpTransport(reader, writer), Live(LiveEngines(engine), lazy=True)
            await converse(transport, WyomingTranslator(engine.info), live, settings.idle_s)
        except asyncio.CancelledError:
            stopping = True  # as the server does
        finally:
            writer.close()
            if not stopping:
                await _closed(writer)
            clients.discard(task)

    together = settings.workers > 1 or None
    server = await asyncio.start_server(
        serve,
        None if settings.host == "::" else settings.host,
        settings.wyoming_port,
        limit=MAX_LINE_BYTES,
        reuse_port=together,
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Until a closing connection is closed; what its client has not read after a while is lost."""
    try:
        async with asyncio.timeout(SLOW_S):
            await writer.wait_closed()
    except TimeoutError:
        writer.transport.abort()
    except OSError:
        pass


def _valid(kind: type[Data], message: Event) -> Data:
    """The data of an event; raises Refused."""
    try:
        return kind.model_validate(message.data or {})
    except ValidationError as error:
        raise refused(ErrorCode.INVALID_MESSAGE, f"{message.type}: {explain(error)}") from None


def _encode(kind: str, data: dict[str, Any] | None = None) -> bytes:
    body = orjson.dumps(data) if data else b""
    header: dict[str, Any] = {"type": kind, "version": VERSION}
    if body:
        header["data_length"] = len(body)
    return orjson.dumps(header) + b"\n" + body
