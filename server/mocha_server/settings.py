"""What an operator can set: options of `serve`, or environment variables with the prefix MOCHA_."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from mocha_model.joint import JointConfig

FILE_BEAM = JointConfig().width


class Settings(BaseSettings):
    """Limits and places; every limit is enforced."""

    model_config = SettingsConfigDict(env_prefix="MOCHA_", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen at")
    port: int = Field(8000, ge=0, le=65535, description="TCP port of everything but Wyoming")
    wyoming_port: int | None = Field(None, ge=0, le=65535, description="TCP port for Wyoming clients; off if not given")
    model: Path | None = Field(None, description="checkpoint; the bundled one if not given")
    max_streams: int = Field(
        512, ge=1, description="live streams at once, in all workers (with file_beam 0 uploads too); more are refused"
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
        description="of these: a character is emitted at most so long after its frame, look-ahead included",
    )
    final_beam: int = Field(
        0,
        ge=0,
        le=512,
        description="hypotheses that settle the text of a segment read greedily when it ends; 0 leaves it as it is",
    )
    language_model: Path | None = Field(None, description="for all of them; the bundled one if it has the vocabulary")
    block_ms: int = Field(80, ge=20, le=1000, description="audio that a live stream gathers before a step")
    max_buffer_s: float = Field(
        4.0, gt=0, description="audio waiting per stream, a block at least; then the sender is paced"
    )
    max_upload_mb: int = Field(2000, ge=1, description="of a file that is sent to be transcribed, 10⁶ bytes")
    idle_s: float = Field(60.0, gt=0, description="a stream, or an upload, that sends nothing for so long is closed")
    max_lag_ms: float = Field(500.0, gt=0, description="no live stream is admitted while others are later than this")
    threads: int = Field(1, ge=1, description="CPU threads of the model in each process")
    workers: int = Field(1, ge=1, le=256, description="processes that share the port, each with a model thread")
