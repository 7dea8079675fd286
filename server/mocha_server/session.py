"""The native protocol without I/O: messages and bytes in, messages and samples out. No sockets, no clock, no torch."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

import numpy as np
from pydantic import ValidationError

from mocha_model.emissions import Emission
from mocha_server.audio import AudioError, RawDecoder, Samples
from mocha_server.messages import End, Error, ErrorCode, Finish, Ready, Segment, Start, Text, client_messages
from mocha_server.transcript import ModelInfo, SpokenText, Transcript

OutMessage = Ready | Text | Segment | End | Error
Message = TypeVar("Message")
MAX_VALUES = 2_000  # of a JSON message, and ten times what the largest that is meant has: a list of phrases
SEPARATORS = ",:[{"  # each value comes after one of them
MAX_EXPLANATION = 300  # characters


class State(Enum):
    """Where a session stands."""

    WAITING = auto()  # for the start message
    STREAMING = auto()
    FINISHING = auto()  # no more audio may come
    CLOSED = auto()


@dataclass(frozen=True)
class Received:
    """What a piece of input leads to: messages to send, samples [N] for the model, whether audio has ended.

    `phrases` are what the stream is to favour, and `pause` is how many frames without a character end a segment, of a
    start message.
    """

    messages: tuple[OutMessage, ...] = ()
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    finished: bool = False
    phrases: tuple[str, ...] = ()
    pause: int = 0


class Session:
    """One stream of the native protocol."""

    def __init__(self, identifier: str, info: ModelInfo, offset_samples: int = 0) -> None:
        """`offset_samples` of the model's rate were heard before by sessions of the same client; times count them."""
        self.identifier, self._info = identifier, info
        self.state = State.WAITING
        self._decoder: RawDecoder | None = None
        self._transcript = Transcript(info, offset_samples)
        self.num_samples = 0  # heard, at the model's rate

    def receive(self, data: str | bytes | Start | Finish) -> Received:
        """Take one message of the client: text, binary, or (see `parsed`, and other protocols) parsed already."""
        if self.state is State.CLOSED:
            return Received()
        if isinstance(data, str):
            return self._receive_text(data)
        if isinstance(data, Start | Finish):
            return self._receive_message(data)
        if self.state is State.WAITING:
            return self._fail(ErrorCode.START_EXPECTED, "the first message must be a start message")
        if self.state is State.FINISHING or self._decoder is None:
            return self._fail(ErrorCode.INVALID_MESSAGE, "audio after finish")
        try:
            samples = self._decoder.push(data)
        except AudioError as error:
            return self._fail(error.code, str(error))
        self.num_samples += len(samples)
        return Received(samples=samples)

    def emitted(self, emissions: list[Emission]) -> list[SpokenText | Segment]:
        """Messages for what the recogniser emitted."""
        return self._transcript.push(emissions, self.num_samples)

    def ended(self) -> End:
        """The closing message, once the recogniser has flushed."""
        self.state = State.CLOSED
        duration = round(self.num_samples / self._info.sample_rate, 3)
        return End(segments=self._transcript.num_segments, duration=duration)

    def failed(self, code: ErrorCode, message: str) -> Error:
        """Close the session for a reason from outside it."""
        self.state = State.CLOSED
        return Error(code=code, message=message)

    def _receive_text(self, data: str) -> Received:
        try:
            message = understood(client_messages.validate_json, data)
        except MessageError as error:
            code = ErrorCode.START_EXPECTED if self.state is State.WAITING else ErrorCode.INVALID_MESSAGE
            return self._fail(code, str(error))
        return self._receive_message(message)

    def _receive_message(self, message: Start | Finish) -> Received:
        if isinstance(message, Start):
            if self.state is not State.WAITING:
                return self._fail(ErrorCode.INVALID_MESSAGE, "the stream has already started")
            rate = self._info.sample_rate
            self._decoder = RawDecoder(message.encoding, message.sample_rate, message.channels, rate)
            self.state = State.STREAMING
            pause = self._info.pause_for(message.pause_ms)
            return Received((self._ready(pause),), phrases=message.phrases, pause=pause)
        if self.state is State.FINISHING:
            return self._fail(ErrorCode.INVALID_MESSAGE, "the stream has already been finished")
        if self.state is not State.STREAMING or self._decoder is None:
            return self._fail(ErrorCode.START_EXPECTED, "finish before start")
        self.state = State.FINISHING
        samples = self._decoder.finish()
        self.num_samples += len(samples)
        warning: tuple[OutMessage, ...] = ()
        if self._decoder.dangling:
            text = f"{self._decoder.dangling} bytes of an incomplete last sample were ignored"
            warning = (Error(code=ErrorCode.INVALID_AUDIO, message=text, fatal=False),)
        return Received(warning, samples, finished=True)

    def _ready(self, pause: int) -> Ready:
        info = self._info
        return Ready(
            session=self.identifier,
            model=info.name,
            sample_rate=info.sample_rate,
            frame_ms=1000 * info.frame_s,
            latency_ms=1000 * info.latency_samples / info.sample_rate,
            look_ahead_ms=1000 * info.look_ahead_samples / info.sample_rate,
            chunk_width=info.chunk_width,
            patience_ms=1000 * info.patience_samples / info.sample_rate,
            pause_ms=1000 * info.frame_s * pause,
        )

    def _fail(self, code: ErrorCode, message: str) -> Received:
        return Received((self.failed(code, message),))


def parsed(data: str | bytes) -> str | bytes | Start | Finish:
    """A message of the client, or `data` itself if it is none, for `Session.receive` to say why."""
    if isinstance(data, str):
        with suppress(MessageError):
            return understood(client_messages.validate_json, data)
    return data


class MessageError(ValueError):
    """A text message that is none of its protocol's; the message says why. `cause` says it to programs."""

    def __init__(self, message: str, cause: ValidationError | None = None) -> None:
        super().__init__(message)
        self.cause = cause


def understood(validate: Callable[[str], Message], text: str) -> Message:
    """What `validate` makes of a client's JSON; raises MessageError.

    Soon, however long it is: what holds far more values than any message has is not looked at, since each may be wrong
    in several ways, and each error costs more than a hundred times what its bytes do.
    """
    if sum(text.count(separator) for separator in SEPARATORS) > MAX_VALUES:
        raise MessageError(f"the message has more than {MAX_VALUES} values")
    try:
        return validate(text)
    except ValidationError as error:
        raise MessageError(explain(error), error) from None


def explain(error: ValidationError) -> str:
    """What is wrong with a message, with little of its content."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where, what = ".".join(str(part) for part in first["loc"]), str(first["msg"]).removeprefix("Value error, ")
    return (f"{where}: {what}" if where else what)[:MAX_EXPLANATION]
