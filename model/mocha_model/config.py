"""Sizes and choices of a recogniser, frozen; travels inside every checkpoint.

Knows nothing of tensors: only numbers, their meaning and their limits. Presets are typed functions at the end.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SAMPLE_RATE = 16_000  # Hz, what every model of this project listens to


class FeatureConfig(BaseModel):
    """Log-mel analysis of the waveform."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_rate: int = Field(SAMPLE_RATE, description="Hz")
    window_samples: int = Field(400, gt=0, description="25 ms at 16 kHz")
    hop_samples: int = Field(160, gt=0, description="10 ms at 16 kHz")
    num_fft: int = Field(512, gt=0)
    num_mels: int = Field(80, gt=0)
    lowest_hz: float = 20.0
    highest_hz: float = 7600.0
    floor: float = Field(1e-5, gt=0, description="added to mel power before the logarithm")
    deltas: bool = Field(False, description="append first and second differences (causal)")
    tail_samples: int = Field(3200, ge=0, description="silence appended by flush, so that late selections still fire")

    @property
    def num_features(self) -> int:
        """Values per frame: ``num_mels``, three times that with deltas."""
        return self.num_mels * (3 if self.deltas else 1)


class EncoderConfig(BaseModel):
    """Convolutions (each stride 2 x 2), ConvLSTM layers, one 3 x 3 convolution after them, then the LSTM stack."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    conv_channels: tuple[int, ...] = (32, 32)
    num_conv_lstm_layers: int = Field(1, ge=0)
    lstm_sizes: tuple[int, ...] = (256, 256, 256)
    projection_size: int = Field(256, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)

    @property
    def subsampling(self) -> int:
        """Feature frames per encoder frame."""
        return int(2 ** len(self.conv_channels))


class AttentionConfig(BaseModel):
    """Which attention, its energies and its window."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mechanism: Literal["softmax", "monotonic", "mocha", "matcha"] = Field(
        "mocha", description="softmax is offline; the others have an online process"
    )
    energy: Literal["normalized", "additive", "dot"] = Field(
        "normalized", description="Raffel 2017, eqs. 16, 15 and 17"
    )
    size: int = Field(128, gt=0, description="d, the hidden size of the energy functions")
    chunk_width: int = Field(
        4, gt=0, description="w, in encoder frames; for MAtChA the longest chunk that online decoding looks back over"
    )
    initial_bias: float = Field(-4.0, description="r of the monotonic energy at the start of training")
    alpha: Literal["exact", "simplified"] = Field("exact", description="simplified: alpha without alpha_{i-1} (sMoChA)")


class DecoderConfig(BaseModel):
    """Embedding, one LSTM, softmax over characters; and the limits of the online process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedding_size: int = Field(64, gt=0)
    lstm_size: int = Field(256, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    max_emissions_per_frame: int = Field(4, gt=0, description="then the pointer must move on by one frame")
    max_emissions_at_end: int = Field(8, ge=0, description="symbols emitted from the zero context after the audio ends")
    endpoint_frames: int = Field(
        20, gt=0, description="frames without a character (by CTC) or an emission that end a segment"
    )


class ModelConfig(BaseModel):
    """Everything needed to build a `SpeechModel`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(gt=4)
    features: FeatureConfig = FeatureConfig()
    encoder: EncoderConfig = EncoderConfig()
    attention: AttentionConfig = AttentionConfig()
    decoder: DecoderConfig = DecoderConfig()

    def with_attention(self, **changes: object) -> "ModelConfig":
        """The same network with another attention; raises ValidationError (a ValueError) for what there is not."""
        attention = AttentionConfig.model_validate(self.attention.model_dump() | changes)
        return self.model_copy(update={"attention": attention})

    @property
    def frame_samples(self) -> int:
        """Samples from one encoder frame to the next."""
        return self.features.hop_samples * self.encoder.subsampling


def wsj_mocha(vocab_size: int) -> ModelConfig:
    """The WSJ network of Chiu & Raffel 2018, appendix A.1 (with w = 4 here; pass another by `model_copy`)."""
    return ModelConfig(vocab_size=vocab_size, features=FeatureConfig(deltas=True))


def small(vocab_size: int) -> ModelConfig:
    """The bundled model: no ConvLSTM, three LSTM-320 layers; about 3 M parameters, made to train and run on a CPU."""
    return ModelConfig(
        vocab_size=vocab_size,
        encoder=EncoderConfig(
            num_conv_lstm_layers=0,
            lstm_sizes=(320, 320, 320),
            projection_size=320,
            conv_channels=(32, 32),
            dropout=0.15,
        ),
        decoder=DecoderConfig(dropout=0.1),
    )


def tiny(vocab_size: int) -> ModelConfig:
    """A network of a few thousand parameters with every kind of layer, for tests."""
    return ModelConfig(
        vocab_size=vocab_size,
        features=FeatureConfig(num_mels=16, deltas=True),
        encoder=EncoderConfig(conv_channels=(4, 4), num_conv_lstm_layers=1, lstm_sizes=(16, 16), projection_size=16),
        attention=AttentionConfig(size=12),
        decoder=DecoderConfig(embedding_size=8, lstm_size=16),
    )
