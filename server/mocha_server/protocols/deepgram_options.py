"""Query parameters of Deepgram's `/v1/listen`. What only changes formatting is accepted."""

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.datastructures import QueryParams

from mocha_server.messages import Encoding, Phrases, Start, bounded_pause, phrase_lists
from mocha_server.session import explain

ENCODINGS = {
    "linear16": Encoding.PCM_S16LE,
    "linear32": Encoding.PCM_F32LE,
    "mulaw": Encoding.MULAW,
    "alaw": Encoding.ALAW,
}
CONTAINERS = ("ogg-opus", "flac")  # by the names of what is in them; others are sent without a name
T = TypeVar("T", bound=BaseModel)
UNSUPPORTED = [  # answers would be missing what was asked
    *("multichannel", "diarize", "diarize_model", "redact", "search", "callback"),
    *("summarize", "topics", "intents", "sentiment", "detect_entities"),
]


class OptionError(ValueError):
    """A query parameter that cannot be used."""


class RawOptions(BaseModel):
    """How raw audio is written."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    encoding: Encoding
    sample_rate: int = Field(ge=8_000, le=48_000)
    channels: int = Field(1, ge=1, le=8)

    @field_validator("encoding", mode="before")
    @classmethod
    def _known(cls, value: object) -> object:
        if value not in ENCODINGS:
            raise ValueError(f"one of {', '.join(ENCODINGS)}; audio in a container needs none")
        return ENCODINGS[str(value)]

    def start(self) -> Start:
        """In words of the native protocol."""
        return Start(encoding=self.encoding, sample_rate=self.sample_rate, channels=self.channels)


class LiveOptions(BaseModel):
    """What a live connection may ask for; `model` may ask for patience, and no `raw` audio is audio in a container."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    raw: RawOptions | None = None
    phrases: Phrases = ()
    model: str = ""
    interim_results: bool = False
    vad_events: bool = False
    utterance_end_ms: int | None = Field(None, ge=0)
    endpointing: bool | int = True  # or milliseconds of silence

    @field_validator("endpointing", mode="before")
    @classmethod
    def _duration(cls, value: object) -> object:
        return int(str(value)) if str(value).isdecimal() else value

    @property
    def channels(self) -> int:
        """Of the audio, as far as it is known."""
        return self.raw.channels if self.raw else 1

    def start(self) -> Start:
        """In words of the native protocol."""
        start = self.raw.start() if self.raw else Start(encoding=Encoding.CONTAINER)
        asked = None if isinstance(self.endpointing, bool) else bounded_pause(self.endpointing)
        return start.model_copy(update={"pause_ms": asked})


def live_options(query: QueryParams) -> LiveOptions:
    """The options of a live connection; raises OptionError."""
    check_supported(query)
    raw = None if query.get("encoding") in CONTAINERS else raw_options(query)
    return _parsed(LiveOptions, dict(query) | {"phrases": favoured(query), "raw": raw})


def raw_options(query: QueryParams) -> RawOptions | None:
    """How the raw audio of an upload is written, None for a file that says so itself; raises OptionError."""
    check_supported(query)
    return _parsed(RawOptions, dict(query)) if "encoding" in query else None


def favoured(query: QueryParams) -> tuple[str, ...]:
    """The phrases of `keyterm` and of the older `keywords` ("word:intensity"); raises OptionError."""
    given = query.getlist("keyterm") + [word.partition(":")[0] for word in query.getlist("keywords")]
    try:
        return phrase_lists.validate_python(given)
    except ValidationError as error:
        raise OptionError(f"keyterm: {explain(error)}") from None


def check_supported(query: QueryParams) -> None:
    """Raise OptionError where an answer would lack what was asked for."""
    for name in UNSUPPORTED:
        if query.get(name, "false").lower() != "false":
            raise OptionError(f"`{name}` is not supported by this server")


def _parsed(kind: type[T], values: dict[str, Any]) -> T:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise OptionError(explain(error)) from None
