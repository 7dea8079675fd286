"""`/v1/realtime`: transcription sessions of OpenAI's Realtime API (GA shapes). Text leaves as it is emitted.

An item's `delta` events may precede its `committed`: the recogniser does not wait for the end of a turn. With
`server_vad` a turn is a segment of the recogniser, without it what is appended between two commits.
"""

import base64
import binascii
import math
import uuid
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, WebSocket
from pydantic import ValidationError

from mocha_server.live_engines import LiveEngines
from mocha_server.messages import End, Error, ErrorCode, Segment, Start, Text, bounded_pause
from mocha_server.protocols.live import (
    Live,
    Request,
    Said,
    Then,
    WebSocketTransport,
    agreed_subprotocol,
    converse,
    has_left,
)
from mocha_server.protocols.openai_realtime_messages import (
    MAX_EVENT_ID,
    Append,
    ClientEvent,
    SessionConfig,
    TurnDetection,
    Update,
    client_events,
    merged,
)
from mocha_server.session import MessageError, explain, understood
from mocha_server.transcript import ModelInfo

router = APIRouter()
MIN_COMMIT_MS = 100
MAX_SESSION_BYTES = 1 << 16  # of a session's configuration, which may hold what this server does not know
TRANSCRIPTION = "conversation.item.input_audio_transcription"


class RealtimeTranslator:
    """One Realtime connection."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self.config = SessionConfig()
        self._session_id = _identifier("sess")
        self._previous_item: str | None = None
        self._item = _identifier("item")
        self._has_text, self._segments = False, list[str]()  # of the item: whether any, and what is closed of it
        self._appended_ms = self._committed_ms = 0.0  # since the connection began: in all, and as far as is committed
        self._turn_ms = 0.0  # of the committed item
        self._heard = False  # audio since the recogniser began anew: its format is fixed
        self._committing = self._clearing = False

    def start(self) -> Start:
        """The configured input format."""
        asked = self.config.audio.input
        phrases = asked.transcription.keywords if asked.transcription else ()
        patient = self._info.models.get(self._model)
        if patient is None and asked.transcription and asked.transcription.delay:
            patient = asked.transcription.delay != "minimal"
        silence_ms = asked.turn_detection.silence_duration_ms if asked.turn_detection else None
        pause_ms = None if silence_ms is None else bounded_pause(silence_ms)
        said = {"phrases": phrases, "patient": patient, "pause_ms": pause_ms}
        return asked.format.start().model_copy(update=said)

    @property
    def _model(self) -> str:
        """The name that was asked for, if it is one of this server's."""
        asked = self.config.audio.input.transcription
        named = asked.model if asked and asked.model else ""
        return named if named in self._info.models else self._info.name

    def greeting(self) -> str:
        """The first event."""
        return _event("session.created", session=self._session())

    def received(self, message: str | bytes) -> Request[str]:
        """See `Translator`. Mistakes are `error` events; the connection goes on."""
        if isinstance(message, bytes):
            return _mistake("events are JSON text messages, not binary ones")
        try:
            event = understood(client_events.validate_json, message)
        except MessageError as error:
            return _mistake(str(error), event_id=_event_id(message) if error.cause else None)
        return self._dispatch(event)

    def _dispatch(self, event: ClientEvent) -> Request[str]:
        if isinstance(event, Update):
            return self._update(event)
        if isinstance(event, Append):
            return self._append(event)
        if event.type == "input_audio_buffer.clear":
            self._clearing = True
            self._committed_ms = self._appended_ms
            return Request(then=Then.FLUSH)
        buffered_ms = self._appended_ms - self._committed_ms
        if buffered_ms < MIN_COMMIT_MS:
            message = f"buffer too small: {buffered_ms:.0f} ms of audio, {MIN_COMMIT_MS} ms are needed"
            return _mistake(message, "input_audio_buffer_commit_empty", event.event_id)
        self._committing = True
        return Request(self._committed(self._appended_ms), then=Then.FLUSH)

    def _update(self, event: Update) -> Request[str]:
        try:
            config = merged(self.config, event.session)
            num_bytes = len(orjson.dumps(config.model_dump(mode="json")))
        except ValidationError as error:
            return _mistake(f"session.{explain(error)}", event_id=event.event_id, param="session")
        except TypeError as error:  # an integer beyond 64 bits
            return _mistake(f"session: {error}", event_id=event.event_id, param="session")
        if num_bytes > MAX_SESSION_BYTES:
            message = f"session: {num_bytes} bytes, at most {MAX_SESSION_BYTES} are kept"
            return _mistake(message, event_id=event.event_id, param="session")
        if self._heard and config.audio.input.format != self.config.audio.input.format:
            message = "the audio format cannot change after audio was appended: commit or clear it first"
            return _mistake(message, event_id=event.event_id, param="session.audio.input.format")
        self.config = config
        return Request((_event("session.updated", session=self._session()),))

    def _append(self, event: Append) -> Request[str]:
        try:
            audio = base64.b64decode(event.audio, validate=True)
        except (binascii.Error, ValueError):
            return _mistake("`audio` is not base64", "invalid_base64", event.event_id, "audio")
        start = self.config.audio.input.format.start()
        self._appended_ms += 1000 * len(audio) / (start.encoding.sample_bytes * start.sample_rate)
        self._heard = self._heard or bool(audio)
        return Request(audio=audio)

    def said(self, message: Said) -> tuple[str, ...]:
        """See `Translator`."""
        if isinstance(message, Error):
            return (_error(message.message, message.code.value),)
        if isinstance(message, End):
            self._heard = False
        if self._clearing:
            return self._cleared() if isinstance(message, End) else ()
        if isinstance(message, Text):
            return self._delta(message)
        if isinstance(message, Segment):
            self._segments.append(message.text)
            return self._turn_over(message) if self._vad and not self._committing else ()
        return self._complete()

    def failed(self, error: Error) -> tuple[str, ...]:
        """See `Translator`. Where trying again may help, the close code says so: agents take events for final."""
        if error.code in (ErrorCode.IDLE, ErrorCode.SERVER_FULL):
            return ()
        server_side = error.code is ErrorCode.INTERNAL
        return (_error(error.message, error.code.value, "server_error" if server_side else "invalid_request_error"),)

    @property
    def _vad(self) -> TurnDetection | None:
        return self.config.audio.input.turn_detection

    def _delta(self, message: Text) -> tuple[str, ...]:
        delta = message.delta if self._has_text else message.delta.lstrip()
        if not delta:
            return ()
        events: tuple[str, ...] = ()
        if not self._has_text and self._vad and not self._committing:
            start_ms = max(0, round(1000 * message.characters[0].time) - self._vad.prefix_padding_ms)
            events = (_event("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=self._item),)
        self._has_text = True
        return (*events, _event(f"{TRANSCRIPTION}.delta", item_id=self._item, content_index=0, delta=delta))

    def _turn_over(self, segment: Segment) -> tuple[str, ...]:
        stopped = {"audio_end_ms": round(1000 * segment.end), "item_id": self._item}
        committed = self._committed(1000 * segment.end)  # what was appended after that is of the next turn
        return (_event("input_audio_buffer.speech_stopped", **stopped), *committed, *self._complete())

    def _committed(self, until_ms: float) -> tuple[str, ...]:
        """The item's place in the conversation; what is emitted later still belongs to it until `_complete`."""
        content = [{"type": "input_audio", "transcript": None}]
        item = {"id": self._item, "object": "realtime.item", "type": "message", "status": "completed", "role": "user"}
        place = {"previous_item_id": self._previous_item}
        self._turn_ms, self._committed_ms = until_ms - self._committed_ms, until_ms
        return (
            _event("input_audio_buffer.committed", item_id=self._item, **place),
            _event("conversation.item.created", item=item | {"content": content}, **place),
        )

    def _complete(self) -> tuple[str, ...]:
        item, transcript, seconds = self._item, " ".join(self._segments), self._turn_ms / 1000
        self._previous_item, self._item = item, _identifier("item")
        self._has_text, self._segments, self._committing = False, [], False
        usage = {"type": "duration", "seconds": math.ceil(seconds)}
        done = {"item_id": item, "content_index": 0, "transcript": transcript, "usage": usage}
        return (_event(f"{TRANSCRIPTION}.completed", **done),)

    def _cleared(self) -> tuple[str, ...]:
        self._item, self._has_text, self._segments = _identifier("item"), False, []
        self._clearing = False
        return (_event("input_audio_buffer.cleared"),)

    def _session(self) -> dict[str, Any]:
        body = self.config.model_dump(mode="json")
        transcription = body["audio"]["input"].get("transcription") or {}
        body["audio"]["input"]["transcription"] = {**transcription, "model": self._model}
        body["include"] = None  # there are no log-probabilities
        return {"id": self._session_id, "object": "realtime.transcription_session", **body}


@router.websocket("/v1/realtime")
async def realtime(socket: WebSocket) -> None:
    """One Realtime connection."""
    engines: LiveEngines = socket.app.state.live
    protocols = socket.scope.get("subprotocols") or []
    await socket.accept("realtime" if "realtime" in protocols else agreed_subprotocol(socket))
    transport, translator = WebSocketTransport(socket), RealtimeTranslator(engines.greedy.info)
    idle_s: float = socket.app.state.settings.idle_s
    live = Live(engines, left=partial(has_left, socket))
    await converse(transport, translator, live, idle_s, greeting=(translator.greeting(),))


def _identifier(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:20]}"


def _event(kind: str, **fields: Any) -> str:
    return orjson.dumps({"type": kind, "event_id": _identifier("event"), **fields}).decode()


def _error(
    message: str,
    code: str,
    kind: str = "invalid_request_error",
    event_id: str | None = None,
    param: str | None = None,
) -> str:
    body = {"type": kind, "code": code, "message": message, "param": param, "event_id": event_id}
    return _event("error", error=body)


def _mistake(
    message: str, code: str = "invalid_event", event_id: str | None = None, param: str | None = None
) -> Request[str]:
    return Request((_error(message, code, event_id=event_id, param=param),))


def _event_id(message: str) -> str | None:
    """The client's name for an event that could not be understood."""
    try:
        event = orjson.loads(message)
    except orjson.JSONDecodeError:
        return None
    found = event.get("event_id") if isinstance(event, dict) else None
    return found if isinstance(found, str) and len(found) <= MAX_EVENT_ID else None
