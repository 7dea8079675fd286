"""Messages of the native protocol `/v1/stream`, both ways. Imports no torch: clients use it too."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

MAX_PHRASES, MAX_PHRASE_CHARACTERS = 200, 60
LEAST_PAUSE_MS, LONGEST_PAUSE_MS = 200, 10_000
Phrases = Annotated[tuple[Annotated[str, Field(max_length=MAX_PHRASE_CHARACTERS)], ...], Field(max_length=MAX_PHRASES)]
Names = Annotated[list[str] | None, Field(fail_fast=True)]  # thousands may come, all of them wrong


class ErrorCode(StrEnum):
    """What went wrong, for programs; docs/protocol.md says what each means for the stream."""

    START_EXPECTED = "start_expected"
    INVALID_MESSAGE = "invalid_message"
    INVALID_AUDIO = "invalid_audio"
    UNSUPPORTED_MEDIA = "unsupported_media"
    EMPTY_AUDIO = "empty_audio"
    SERVER_FULL = "server_full"
    TOO_SLOW = "too_slow"
    IDLE = "idle"
    INTERNAL = "internal"


class Encoding(StrEnum):
    """How samples are written; 16- and 32-bit ones are little-endian. A container says so itself."""

    PCM_S16LE = "pcm_s16le"
    PCM_F32LE = "pcm_f32le"
    MULAW = "mulaw"
    ALAW = "alaw"
    CONTAINER = "container"  # WebM, Ogg, FLAC, MP3, …

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of one channel, if it is not in a container."""
        return {"pcm_s16le": 2, "pcm_f32le": 4}.get(self.value, 1)


def favourable(names: Iterable[str]) -> tuple[str, ...]:
    """Phrases for `Start` out of `names`: each once, as many as may be, without those that are too long.

    For protocols that know no such limits.
    """
    given = dict.fromkeys(names)
    return tuple(name for name in given if len(name) <= MAX_PHRASE_CHARACTERS)[:MAX_PHRASES]


def bounded_pause(pause_ms: int) -> int:
    """The nearest for `Start` to the pause of a protocol that knows no such bounds."""
    return min(max(pause_ms, LEAST_PAUSE_MS), LONGEST_PAUSE_MS)


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Start(_Message):
    """The first message of a stream: what its audio is like."""

    type: Literal["start"] = "start"
    sample_rate: int = Field(16_000, ge=8_000, le=48_000, description="Hz")
    encoding: Encoding = Encoding.PCM_S16LE
    channels: int = Field(1, ge=1, le=8, description="interleaved; they are averaged")
    phrases: Phrases = Field((), description="words and phrases to expect, such as names")
    patient: bool | None = Field(
        None, description="whether to search for a while before a character is emitted; as the server is set if null"
    )
    pause_ms: int | None = Field(
        None, ge=LEAST_PAUSE_MS, le=LONGEST_PAUSE_MS, description="silence that ends a segment; the model's own if null"
    )


class Finish(_Message):
    """No more audio: the rest is emitted, then `end`."""

    type: Literal["finish"] = "finish"


ClientMessage = Annotated[Start | Finish, Field(discriminator="type")]


class Ready(_Message):
    """The stream is admitted; audio may come."""

    type: Literal["ready"] = "ready"
    session: str
    model: str
    sample_rate: int = Field(description="Hz the model listens at")
    frame_ms: float
    latency_ms: float = Field(description="how far a frame's audio reaches beyond its start")
    look_ahead_ms: float = Field(
        0.0, description="of the model: a character is emitted so long after its frame's audio, at the earliest"
    )
    chunk_width: int
    patience_ms: float = Field(0.0, description="after its frame, a character is emitted at the latest; 0 if greedily")
    pause_ms: float = Field(0.0, description="silence that ends a segment")


class Character(_Message):
    """One emitted character."""

    text: str
    frame: int = Field(description="encoder frame it was emitted at, from the start of the stream")
    time: float = Field(description="seconds from the start of the stream at which that frame's audio was complete")
    p: float = Field(
        description="selection probability (in a live beam, the CTC branch's); 0 where the end of the audio forced it"
    )
    q: float = Field(description="probability of the character once the frame was selected")
    chunk: list[float] = Field(description="attention over the frames up to and including `frame`")


class Word(_Message):
    """A finished word."""

    word: str
    start: float = Field(description="seconds")
    end: float = Field(description="seconds")
    confidence: float = Field(ge=0, le=1)


class Text(_Message):
    """New characters. Deltas are only ever appended: joined, they are the transcript, unless segments are settled."""

    type: Literal["text"] = "text"
    segment: int
    delta: str
    characters: list[Character]


class Segment(_Message):
    """A segment is closed: text and words are final; the text is that of its deltas, unless segments are settled."""

    type: Literal["segment"] = "segment"
    segment: int
    text: str
    start: float
    end: float
    words: list[Word]
    cut: bool = Field(False, description="what is said goes on: it has become too long, or its connection was lost")


class End(_Message):
    """The last message of a finished stream. The text is in the segments."""

    type: Literal["end"] = "end"
    segments: int
    duration: float = Field(description="seconds of audio heard")


class Error(_Message):
    """Something was wrong; `fatal` errors close the stream."""

    type: Literal["error"] = "error"
    code: ErrorCode
    message: str
    fatal: bool = True


ServerMessage = Annotated[Ready | Text | Segment | End | Error, Field(discriminator="type")]
client_messages: TypeAdapter[Start | Finish] = TypeAdapter(ClientMessage)
phrase_lists: TypeAdapter[tuple[str, ...]] = TypeAdapter(Phrases)
server_messages: TypeAdapter[Ready | Text | Segment | End | Error] = TypeAdapter(ServerMessage)
