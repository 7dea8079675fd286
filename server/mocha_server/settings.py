"""What an operator can set: options of `serve`, or environment variables with the prefix MOCHA_."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from mocha_model.joint import JointConfig

FILE_BEAM = JointConfig().width
KEY = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)  # what a WebSocket's subprotocol may have: browsers give it as one
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#@*\s]+")


def _sendable(key: SecretStr) -> SecretStr:
    if not KEY.fullmatch(key.get_secret_value()):
        raise ValueError("a key is of letters, digits and any of !#$%&'*+-.^_`|~")
    return key


def _origins(given: object) -> object:
    """`given` apart, where it is text."""
    if not isinstance(given, str):
        return given
    origins = tuple(each.strip().lower().removesuffix("/") for each in given.split(",") if each.strip())
    wrong = [each for each in origins if not ORIGIN.fullmatch(each)]
    if wrong:
        raise ValueError(f"{wrong[0]} is no origin, such as https://example.org, nor *")
    return origins


class Settings(BaseSettings):
    """Settings of a server, checked at the start."""

    model_config = SettingsConfigDict(
        env_prefix="MOCHA_",
        env_ignore_empty=True,
        frozen=True,
        hide_input_in_errors=True,  # a key may be in it
    )

    host: str = Field("127.0.0.1", min_length=1, description="address to listen at; `::` is all, of IPv4 too")
    port: int = Field(8000, ge=0, le=65535, description="TCP port of everything but Wyoming")
    wyoming_port: int | None = Field(None, ge=0, le=65535, description="TCP port for Wyoming clients; off if not given")
    api_key: Annotated[SecretStr, AfterValidator(_sendable)] | None = Field(
        None, description="key that every client has to give, except those of Wyoming; no key if not given"
    )
    allow_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_origins)] | None = Field(
        None, description="origins, with commas between them, whose pages may use the server; `*` is all; see below"
    )
    model: Path | None = Field(None, description="checkpoint; the bundled one if not given")
    max_streams: int = Field(
        512,
        ge=1,
        le=100_000,
        description="live streams at once, in all workers (uploads too if `MOCHA_FILE_BEAM=0`); more are refused",
    )
    file_beam: int = Field(
        FILE_BEAM, ge=0, le=512, description="hypotheses for uploads; 0 reads them greedily, as streams"
    )
    patient: bool = Field(False, description="1: live streams that do not say otherwise are read with patience")
    live_beam: int = Field(
        64, ge=0, le=512, description="hypotheses for live streams read with patience; 0 reads all of them greedily"
    )
    live_patience_ms: float = Field(
        800.0,
        ge=80,
        le=10_000,
        description="in these, the longest time from a character's frame to its emission, look-ahead included",
    )
    final_beam: int = Field(
        0,
        ge=0,
        le=512,
        description="hypotheses of the search that settles a greedy segment when it ends; 0: none",
    )
    language_model: Path | None = Field(
        None, description="of all these searches; else the bundled one, if the model writes the same characters"
    )
    block_ms: int = Field(80, ge=20, le=1000, description="audio that a live stream gathers before a step")
    max_buffer_s: float = Field(
        4.0, gt=0, le=3600, description="most audio waiting per stream (at least a block); beyond it, reading slows"
    )
    max_upload_mb: int = Field(2000, ge=1, description="largest upload, in 10⁶ bytes")
    idle_s: float = Field(60.0, gt=0, description="what sends nothing for so long, or no whole request, is closed")
    max_lag_ms: float = Field(500.0, gt=0, description="no live stream is admitted while others are later than this")
    threads: int = Field(1, ge=1, description="CPU threads of the model in each process")
    workers: int = Field(1, ge=1, le=256, description="processes that share the port, each with a model thread")
