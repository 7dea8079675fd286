"""`/` as vosk-server speaks it: WebSocket in lockstep, exactly one reply to each binary message.

A reply is a closed segment (`text`) or everything of the open one (`partial`). The page on `GET /` is elsewhere.
"""

from collections import deque
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ConfigDict, Field

from mocha_server.messages import End, Error, ErrorCode, Names, Segment, Start, Text, favourable
from mocha_server.protocols.live import (
    Gone,
    Live,
    Refused,
    Said,
    WebSocketTransport,
    agreed_subprotocol,
    has_left,
    receive_within,
    refused,
)
from mocha_server.session import MessageError, understood
from mocha_server.stream import EngineError
from mocha_server.transcript import ModelInfo

router = APIRouter()


class Config(BaseModel):
    """What a client may configure; `phrase_list` is favoured, and `model` may ask for patience."""

    model_config = ConfigDict(extra="ignore")

    sample_rate: float = Field(8_000, ge=8_000, le=48_000)
    words: bool = True
    model: str = ""
    max_alternatives: int = Field(0, ge=0)
    phrase_list: Names = None


class Control(BaseModel):
    """A text message."""

    model_config = ConfigDict(extra="ignore")

    config: Config | None = None
    eof: int = 0
    reset: int = 0


class VoskTranslator:
    """What is said, until a reply is due."""

    def __init__(self, info: ModelInfo) -> None:
        self._info, self.config = info, Config()
        self._closed: deque[Segment] = deque()
        self._open = ""

    def start(self) -> Start:
        """16-bit mono, at the configured rate."""
        patient = self._info.models.get(self.config.model)
        phrases = favourable(self.config.phrase_list or ())
        return Start(sample_rate=round(self.config.sample_rate), phrases=phrases, patient=patient)

    def said(self, message: Said) -> None:
        """Remember it for a reply."""
        if isinstance(message, Text):
            self._open += message.delta
        elif isinstance(message, Segment):
            self._closed.append(message)
            self._open = ""
        elif isinstance(message, End):
            self._open = ""

    def reply(self) -> str:
        """The oldest closed segment not yet sent, else the open one so far."""
        if self._closed:
            return self._result([self._closed.popleft()])
        return _json({"partial": self._open.strip()})

    def final(self) -> str:
        """All that was not sent, in one result: clients read one message after `eof`."""
        segments = list(self._closed)
        self._closed.clear()
        return self._result(segments)

    def _result(self, segments: list[Segment]) -> str:
        words = [word for segment in segments for word in segment.words]
        text = " ".join(segment.text for segment in segments)
        found = [{"conf": w.confidence, "start": w.start, "end": w.end, "word": w.word} for w in words]
        if self.config.max_alternatives:
            confidence = sum(w.confidence for w in words) / len(words) if words else 1.0
            timed = [{"start": w.start, "end": w.end, "word": w.word} for w in words]
            best = {"confidence": confidence, "text": text} | ({"result": timed} if timed and self.config.words else {})
            return _json({"alternatives": [best]})
        return _json(({"result": found} if found and self.config.words else {}) | {"text": text})


def parse(text: str) -> Control:
    """A text message; raises Refused."""
    try:
        control = understood(Control.model_validate_json, text)
    except MessageError as error:
        raise refused(ErrorCode.INVALID_MESSAGE, str(error)) from None
    if not control.model_fields_set:
        other = "text messages have config, eof or reset; the native protocol is at /v1/stream"
        raise refused(ErrorCode.INVALID_MESSAGE, other)
    return control


@router.websocket("/")
async def vosk(socket: WebSocket) -> None:
    """One vosk-server connection."""
    live = Live(socket.app.state.live, left=partial(has_left, socket))
    await socket.accept(agreed_subprotocol(socket))
    transport = WebSocketTransport(socket)
    try:
        live.open()
        await _serve(transport, live, socket.app.state.settings.idle_s)
        await transport.close(None)
    except Gone:
        return
    except (Refused, EngineError) as problem:
        error = problem.error if isinstance(problem, Refused) else Error(code=problem.code, message=str(problem))
        await _fail(transport, error)
    finally:
        live.close()


async def _serve(transport: WebSocketTransport, live: Live, idle_s: float) -> None:
    translator, heard = VoskTranslator(live.info), False
    while True:
        message = await receive_within(transport, idle_s)
        if isinstance(message, bytes):
            heard = True
            await live.hear(message, translator.start)
            for said in await live.settled():
                translator.said(said)
            await transport.send(translator.reply())
            continue
        control = parse(message)
        if control.config is not None:
            given = {name: getattr(control.config, name) for name in control.config.model_fields_set}
            config = translator.config.model_copy(update=given)  # what is not given stays, as in vosk-server
            if heard and config.sample_rate != translator.config.sample_rate:
                raise refused(ErrorCode.INVALID_MESSAGE, "the sample rate cannot change after audio was sent")
            translator.config = config
        if control.eof or control.reset:
            await live.end(translator.start)
            async for last in live.utterance():
                translator.said(last)
            heard = False
            await transport.send(translator.final())
        if control.eof:
            return


async def _fail(transport: WebSocketTransport, error: Error) -> None:
    """Vosk has no error message: a JSON object like its others, and the reason of the close frame."""
    try:
        await transport.send(_json({"error": error.message, "code": error.code.value}))
        await transport.close(error)
    except Gone:
        return


def _json(body: dict[str, Any]) -> str:
    return orjson.dumps(body).decode()
