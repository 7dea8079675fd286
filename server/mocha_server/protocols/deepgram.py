"""`/v1/listen` as Deepgram's clients speak it: the live WebSocket. The pre-recorded POST is in `deepgram_file`.

A closed segment is a final result, and so are the words of an open one that goes on for long; interim results only
grow, since what is emitted is never taken back.
"""

import hashlib
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import orjson
from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, ConfigDict, ValidationError

from mocha_model.confidence import word_confidence
from mocha_server.live_engines import LiveEngines
from mocha_server.messages import Character, End, Error, ErrorCode, Phrases, Segment, Start, Word
from mocha_server.protocols.deepgram_options import LiveOptions, OptionError, live_options
from mocha_server.protocols.deepgram_wire import alternative, metadata, model_info, refusal
from mocha_server.protocols.live import (
    Live,
    Refused,
    Request,
    Said,
    Then,
    WebSocketTransport,
    agreed_subprotocol,
    converse,
    has_left,
)
from mocha_server.session import MessageError, explain, understood
from mocha_server.stream import EngineError
from mocha_server.transcript import ModelInfo, SpokenText

router = APIRouter()
VARIANTS = {ErrorCode.IDLE: "NET-0001", ErrorCode.INVALID_AUDIO: "DATA-0000", ErrorCode.INVALID_MESSAGE: "SchemaError"}
VARIANTS |= dict.fromkeys((ErrorCode.UNSUPPORTED_MEDIA, ErrorCode.EMPTY_AUDIO), "DATA-0000")
REQUESTS = {"KeepAlive": Request[str](), "Finalize": Request[str](then=Then.FLUSH)}
REQUESTS["CloseStream"] = Request(then=Then.FINISH)
LONG_S = 5.0  # of speech without a pause, that is final then
TOO_MUCH = {"too_long", "string_too_long"}  # how pydantic calls too many keyterms, and those with too many characters


class Control(BaseModel):
    """A text message of the client."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["KeepAlive", "Finalize", "CloseStream", "Configure"]


class Configure(BaseModel):
    """What changes in a stream under way. `features` turn formatting on and off, of which there is none."""

    model_config = ConfigDict(extra="ignore")

    keyterms: Phrases | None = None  # instead of those so far, which None keeps


class DeepgramTranslator:
    """One live connection."""

    def __init__(self, options: LiveOptions, info: ModelInfo, live: Live, request_id: str) -> None:
        self._options, self._info, self._live = options, info, live
        self._request_id = request_id
        self._phrases = options.phrases
        self._sha256, self._created = hashlib.sha256(), datetime.now(UTC)
        self._words: list[Word] = []  # of the open segment, after the last final result
        self._characters: list[Character] = []  # of the word after them
        self._num_final = 0  # words of the open segment that were in final results
        self._speaks = False  # since the last segment that was not cut
        self._until_s = 0.0  # end of the last final result
        self._held: Segment | None = None  # while finalizing: the last segment carries `from_finalize`
        self._finalizing = self._closing = False

    def start(self) -> Start:
        """The options' audio format, whether they name a model with patience, and the keyterms as they are now."""
        patient = self._info.models.get(self._options.model)
        return self._options.start().model_copy(update={"patient": patient, "phrases": self._phrases})

    def received(self, message: str | bytes) -> Request[str]:
        """See `Translator`."""
        if isinstance(message, bytes):
            if not message:  # what said so before there was `CloseStream`
                self._closing = True
                return REQUESTS["CloseStream"]
            self._sha256.update(message)
            return Request(audio=message)
        try:
            control = understood(Control.model_validate_json, message)
        except MessageError:
            text = "text messages are KeepAlive, Finalize, CloseStream and Configure"
            raise Refused(Error(code=ErrorCode.INVALID_MESSAGE, message=text)) from None
        if control.type == "Configure":
            return Request((self._configure(message),))
        self._finalizing, self._closing = control.type == "Finalize", control.type == "CloseStream"
        return REQUESTS[control.type]

    def said(self, message: Said) -> tuple[str, ...]:
        """See `Translator`."""
        if isinstance(message, SpokenText):
            held, self._held = self._held, None  # more text follows: that was not the last segment
            return (*(self._final(held) if held else ()), *self._text(message))
        if isinstance(message, Segment):
            rest = self._rest(message)
            if not self._finalizing:
                return self._final(rest)
            held, self._held = self._held, rest
            return self._final(held) if held else ()
        if isinstance(message, End):
            return self._end()
        return ()  # an incomplete last sample: Deepgram says nothing either

    def failed(self, error: Error) -> tuple[str, ...]:
        """See `Translator`."""
        variant = VARIANTS.get(error.code, error.code.value)
        return (_json({"type": "Error", "variant": variant, "description": error.message, "message": error.message}),)

    def _configure(self, message: str) -> str:
        """The answer to `Configure`. New keyterms hold when the recogniser begins anew: see `start`."""
        try:
            keyterms = Configure.model_validate_json(message).keyterms
        except ValidationError as error:
            too_much = {problem["type"] for problem in error.errors()} <= TOO_MUCH
            code = "CONFIGURE_KEYTERM_LIMIT_EXCEEDED" if too_much else "CONFIGURE_INTERNAL_ERROR"  # no other one fits
            return self._answer("ConfigureFailure", code=code, description=explain(error))
        if keyterms is None:
            return self._answer("ConfigureSuccess")
        self._phrases = keyterms
        return self._answer("ConfigureSuccess", keyterms=keyterms)

    def _answer(self, kind: str, **fields: Any) -> str:
        return _json({"type": kind, "request_id": self._request_id, **fields})

    def _text(self, message: SpokenText) -> tuple[str, ...]:
        began, self._speaks = not self._speaks, True
        self._words += message.words
        self._characters += message.characters
        ends = [n for n, character in enumerate(self._characters, 1) if character.text.endswith(" ")]
        self._characters = self._characters[ends[-1] if ends else 0 :]
        out: tuple[str, ...] = ()
        if began and self._options.vad_events:
            timestamp = round(message.characters[0].time, 3)
            out = (_json({"type": "SpeechStarted", "channel": [0, 1], "timestamp": timestamp}),)
        if not self._info.settles and self._words and self._words[-1].end - self._words[0].start >= LONG_S:
            words, self._words = self._words, []
            self._num_final += len(words)
            out = (*out, self._results(words, words[-1].end, is_final=True))
            self._until_s = words[-1].end
        words = [*self._words, *spoken(self._characters, self._info)]
        if not words or not self._options.interim_results:
            return out
        return (*out, self._results(words, words[-1].end, is_final=False))

    def _rest(self, segment: Segment) -> Segment:
        """What no final result has had of a segment that has ended; there is none open now."""
        words = segment.words[self._num_final :]
        self._words, self._characters, self._num_final, self._speaks = [], [], 0, segment.cut
        return segment.model_copy(update={"words": words})

    def _final(self, segment: Segment, from_finalize: bool = False) -> tuple[str, ...]:
        speech_final = (self._options.endpointing is not False and not segment.cut) or from_finalize
        end = {"is_final": True, "speech_final": speech_final, "from_finalize": from_finalize}
        results = self._results(segment.words, segment.end, **end)
        self._until_s = segment.end
        if segment.cut or not self._options.utterance_end_ms:
            return (results,)
        return (results, _json({"type": "UtteranceEnd", "channel": [0, 1], "last_word_end": segment.end}))

    def _end(self) -> tuple[str, ...]:
        if self._closing:
            return (self._metadata(),)
        held, self._held, self._finalizing = self._held, None, False
        if held:
            return self._final(held, from_finalize=True)
        heard_s = round(self._live.heard_s, 3)
        empty = self._results([], heard_s, is_final=True, speech_final=True, from_finalize=True)
        self._until_s = heard_s
        return (empty,)

    def _results(self, words: list[Word], until_s: float, **flags: bool) -> str:
        name, transcript = self._info.name, " ".join(word.word for word in words)
        return _json(
            {
                "type": "Results",
                "channel_index": [0, 1],
                "start": self._until_s,
                "duration": round(max(0.0, until_s - self._until_s), 3),
                "speech_final": False,
                "from_finalize": False,
                **flags,
                "channel": {"alternatives": [alternative(transcript, words)]},
                "metadata": {"request_id": self._request_id, "model_uuid": name, "model_info": model_info(name)},
            }
        )

    def _metadata(self) -> str:
        of_audio = (self._sha256.hexdigest(), self._created, self._live.heard_s, self._options.channels)
        return _json({"type": "Metadata"} | metadata(self._request_id, *of_audio))


def spoken(characters: list[Character], info: ModelInfo) -> list[Word]:
    """The word under way, so far; none where nothing of it was said yet."""
    held = [character for character in characters if character.text.strip()]
    if not held:
        return []
    start = held[0].time - info.latency_samples / info.sample_rate
    end = held[-1].time - info.latency_samples / info.sample_rate + info.frame_s
    confidence = word_confidence([c.p for c in held], [c.q for c in held], info.calibration)
    text = "".join(c.text for c in held).strip()
    return [Word(word=text, start=round(start, 3), end=round(end, 3), confidence=round(confidence, 4))]


@router.websocket("/v1/listen")
async def listen(socket: WebSocket) -> None:
    """One live connection; bad options and a full server are refused in the handshake."""
    engines: LiveEngines = socket.app.state.live
    request_id, live = str(uuid.uuid4()), Live(engines, left=partial(has_left, socket))
    try:
        options = live_options(socket.query_params)
        info = live.open(live.info.models.get(options.model)).engine.info
    except OptionError as error:
        await socket.send_denial_response(refusal(400, "INVALID_QUERY_PARAMETER", str(error), request_id))
        return
    except EngineError as error:
        await socket.send_denial_response(refusal(503, error.code.value, str(error), request_id))
        return
    try:
        await socket.accept(agreed_subprotocol(socket), headers=[(b"dg-request-id", request_id.encode())])
        translator = DeepgramTranslator(options, info, live, request_id)
        await converse(WebSocketTransport(socket), translator, live, socket.app.state.settings.idle_s)
    finally:
        live.close()


def _json(body: dict[str, Any]) -> str:
    return orjson.dumps(body).decode()
