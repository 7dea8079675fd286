"""Client events and session configuration of OpenAI's Realtime API, as far as transcription goes. Imports no torch.

Fields that change nothing here (prompt, language, noise reduction, ...) are accepted and echoed.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from mocha_server.messages import Encoding, Phrases, Start

G711_RATE = 8_000
MAX_EVENT_ID = 512  # characters, as with OpenAI


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Pcm(_Lenient):
    """16-bit little-endian mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: int = Field(24_000, ge=8_000, le=48_000)

    def start(self) -> Start:
        """In words of the native protocol."""
        return Start(sample_rate=self.rate)


class G711(_Lenient):
    """8-bit telephony at 8 kHz: `audio/pcmu` (mu-law) or `audio/pcma` (A-law)."""

    type: Literal["audio/pcmu", "audio/pcma"]

    def start(self) -> Start:
        """In words of the native protocol."""
        encoding = Encoding.MULAW if self.type == "audio/pcmu" else Encoding.ALAW
        return Start(sample_rate=G711_RATE, encoding=encoding)


class TurnDetection(_Lenient):
    """The recogniser ends turns itself, after a silence that may be asked for; the threshold changes nothing."""

    type: Literal["server_vad", "semantic_vad"] = "server_vad"
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(300, ge=0)
    silence_duration_ms: int | None = Field(None, ge=0)  # the model's own


class Transcription(_Lenient):
    """`session.audio.input.transcription`; `keywords` are favoured, `model` or a `delay` may ask for patience."""

    keywords: Phrases = ()
    model: str | None = None
    delay: Literal["minimal", "low", "medium", "high", "xhigh"] | None = None


class Input(_Lenient):
    """`session.audio.input`."""

    format: Annotated[Pcm | G711, Field(discriminator="type")] = Pcm()
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = TurnDetection()
    noise_reduction: dict[str, Any] | None = None


class Audio(_Lenient):
    """`session.audio`."""

    input: Input = Input()


class SessionConfig(_Lenient):
    """`session`."""

    type: Literal["transcription"] = "transcription"
    audio: Audio = Audio()
    input_audio_format: Literal["pcm16"] = Field("pcm16", exclude=True)  # of before `audio`: others are not heard
    include: list[str] | None = None


class _Event(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    event_id: str | None = Field(None, max_length=MAX_EVENT_ID)


class Update(_Event):
    """Change the configuration; fields not given keep their value."""

    type: Literal["session.update"]
    session: dict[str, Any]


class Append(_Event):
    """Audio, base64."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class Buffer(_Event):
    """End the turn, or forget what was appended."""

    type: Literal["input_audio_buffer.commit", "input_audio_buffer.clear"]


ClientEvent = Update | Append | Buffer
client_events: TypeAdapter[ClientEvent] = TypeAdapter(Annotated[ClientEvent, Field(discriminator="type")])


def merged(config: SessionConfig, changes: dict[str, Any]) -> SessionConfig:
    """`config` with `changes`; raises ValidationError.

    A format that changes its type starts from that type's defaults, so that no rate is inherited from another.
    """
    base = config.model_dump()
    new_format, old_type = _at(changes, "audio", "input", "format"), _at(base, "audio", "input", "format", "type")
    if isinstance(new_format, dict) and new_format.get("type", old_type) != old_type:
        base["audio"]["input"]["format"] = {}
    return SessionConfig.model_validate(_deep(base, changes))


def _at(tree: Any, *path: str) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _deep(base: Any, changes: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(changes, dict)):
        return changes
    return base | {name: _deep(base.get(name), value) for name, value in changes.items()}
