"""Sizes and choices of a recogniser, frozen; travels inside every checkpoint.

Knows nothing of tensors: only numbers, their meaning and their limits. Presets are typed functions at the end.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SAMPLE_RATE = 16_000  # Hz, what every model of this project listens to


class FeatureConfig(BaseModel):
    """Log-mel analysis of the waveform."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_rate: int = Field(SAMPLE_RATE, gt=0, description="Hz")
    window_samples: int = Field(400, gt=0, description="25 ms at 16 kHz")
    hop_samples: int = Field(160, gt=0, description="10 ms at 16 kHz")
    num_fft: int = Field(512, gt=0)
    num_mels: int = Field(80, gt=0)
    lowest_hz: float = 20.0
    highest_hz: float = 7600.0
    floor: float = Field(1e-5, gt=0, description="added to mel power before the logarithm")
    energy: bool = Field(False, description="append the logarithm of the window's energy to the mel bands")
    deltas: bool = Field(False, description="append first and second differences (causal)")
    tail_samples: int = Field(3200, ge=0, description="silence appended by flush, so that late selections still fire")

    @model_validator(mode="after")
    def _bands_and_window_fit(self) -> Self:
        if not 0 <= self.lowest_hz < self.highest_hz:
            raise ValueError("highest_hz is above lowest_hz, and that not below 0")
        if self.num_fft < self.window_samples:
            raise ValueError("num_fft is at least window_samples")
        return self

    @property
    def num_bands(self) -> int:
        """Values per frame before differences: the mel bands, and the energy if there is one."""
        return self.num_mels + self.energy

    @property
    def num_maps(self) -> int:
        """How many values each band has: itself, or itself and two differences."""
        return 3 if self.deltas else 1

    @property
    def num_features(self) -> int:
        """Values per frame: ``num_bands x num_maps``."""
        return self.num_bands * self.num_maps


class EncoderConfig(BaseModel):
    """Convolutions (each stride 2 x 2), ConvLSTM layers, one 3 x 3 convolution after them, then the LSTM stack.

    Any of the first three may be left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    conv_channels: tuple[int, ...] = (32, 32)
    num_conv_lstm_layers: int = Field(1, ge=0)
    lstm_sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field((256, 256, 256), min_length=1)
    projection_size: int | None = Field(
        256, gt=0, description="dense layer, batch norm and ReLU after each LSTM layer; None for LSTM layers alone"
    )
    time_reduction_after: tuple[int, ...] = Field(
        (), description="LSTM layers, counted from 1, after which every other state is skipped"
    )
    look_ahead: int = Field(
        0, ge=0, description="frames that what comes after each LSTM layer but the last waits for, to hear them too"
    )
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _reductions_follow_layers(self) -> Self:
        after = self.time_reduction_after
        if len(set(after)) != len(after) or not all(1 <= n <= len(self.lstm_sizes) for n in after):
            raise ValueError(f"time_reduction_after names LSTM layers 1 to {len(self.lstm_sizes)}, each once")
        if after and self.look_ahead:
            raise ValueError("look_ahead is of LSTM layers of one frame rate, without time_reduction_after")
        return self

    @property
    def subsampling(self) -> int:
        """Feature frames per encoder frame."""
        return int(2 ** (len(self.conv_channels) + len(self.time_reduction_after)))

    @property
    def look_ahead_frames(self) -> int:
        """How many encoder frames after each have been heard when it is put out."""
        return self.look_ahead * (len(self.lstm_sizes) - 1)

    @property
    def has_layer_below(self) -> bool:
        """Whether the last layer is given what another layer puts out, frame by frame."""
        return len(self.lstm_sizes) > 1 and not {len(self.lstm_sizes) - 1, len(self.lstm_sizes)} & {
            *self.time_reduction_after
        }

    @property
    def size_below(self) -> int:
        """Values of a frame that the last layer is given, where it `has_layer_below`."""
        return self.projection_size or self.lstm_sizes[-2]

    @property
    def output_size(self) -> int:
        """Values of an encoder frame."""
        return self.projection_size or self.lstm_sizes[-1]


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

    @model_validator(mode="after")
    def _alpha_goes_with_beta(self) -> Self:
        if self.mechanism == "matcha" and self.alpha == "simplified":
            raise ValueError("MAtChA's chunks begin where alpha_{i-1} is, which simplified alpha does without")
        return self


class DecoderConfig(BaseModel):
    """Embedding, one LSTM, softmax over symbols; and the limits of the online process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    embedding_size: int = Field(64, gt=0)
    lstm_size: int = Field(256, gt=0)
    output_context: bool = Field(True, description="whether the output layer sees the context beside the LSTM's output")
    dropout: float = Field(0.0, ge=0, lt=1)
    max_emissions_per_frame: int = Field(4, gt=0, le=16, description="then the pointer must move on by one frame")
    max_emissions_at_end: int = Field(8, ge=0, description="symbols emitted from the zero context after the audio ends")
    endpoint_frames: int = Field(
        20, gt=0, description="frames without a character (by CTC) or an emission that end a segment"
    )


class SearchConfig(BaseModel):
    """What joint search weighs, which depends on what the CTC head was trained for; these are for one of CTC alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prior_weight: float = Field(
        0.5, description="power of the frequencies of characters that posteriors are divided by"
    )
    length_bonus: float = Field(1.2, description="added per symbol, natural logarithm")
    language_weight: float = Field(1.0, description="of the language model; more may be left to it beside phones")
    phone_weight: float = Field(0.4, gt=0, description="of what a head of phones says of each word, if there is one")
    phone_bonus: float = Field(0.4, description="added per phone of a word, natural logarithm")


class ModelConfig(BaseModel):
    """Everything needed to build a `SpeechModel`, and to search with it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab_size: int = Field(gt=4)
    features: FeatureConfig = FeatureConfig()
    encoder: EncoderConfig = EncoderConfig()
    attention: AttentionConfig = AttentionConfig()
    decoder: DecoderConfig = DecoderConfig()
    search: SearchConfig = SearchConfig()
    phones: tuple[str, ...] = Field(
        (), description="what a second CTC head, below the last layer, reads: label n is the n-th, from 1 on"
    )

    @model_validator(mode="after")
    def _phones_have_a_layer(self) -> Self:
        if self.phones and not self.encoder.has_layer_below:
            raise ValueError("a head of phones is below the last of at least two LSTM layers of one frame rate")
        return self

    def with_dropout(self, dropout: float) -> "ModelConfig":
        """The same network with another dropout in its encoder, which no weight depends on."""
        return self.model_copy(update={"encoder": self.encoder.model_copy(update={"dropout": dropout})})

    def with_hop(self, hop_samples: int) -> "ModelConfig":
        """The same network with its features so many samples apart, which no weight depends on."""
        return self.model_copy(update={"features": self.features.model_copy(update={"hop_samples": hop_samples})})

    def with_look_ahead(self, frames: int) -> "ModelConfig":
        """The same network with another look-ahead; raises ValidationError (a ValueError) where there can be none."""
        encoder = EncoderConfig.model_validate(self.encoder.model_dump() | {"look_ahead": frames})
        return self.model_copy(update={"encoder": encoder})

    def network(self) -> "ModelConfig":
        """Without a head of phones and what no weight depends on, so that networks can be compared."""
        bare = self.with_dropout(0.0).with_hop(FeatureConfig().hop_samples)
        return bare.model_copy(update={"search": SearchConfig(), "phones": ()})

    def with_attention(self, **changes: object) -> "ModelConfig":
        """The same network with another attention; raises ValidationError (a ValueError) for what there is not."""
        attention = AttentionConfig.model_validate(self.attention.model_dump() | changes)
        return self.model_copy(update={"attention": attention})

    @property
    def frame_samples(self) -> int:
        """Samples from one encoder frame to the next."""
        return self.features.hop_samples * self.encoder.subsampling

    @property
    def tail_samples(self) -> int:
        """Silence that ends a stream, so that its last frames come out and late selections still fire."""
        return self.features.tail_samples + self.encoder.look_ahead_frames * self.frame_samples


def wsj_mocha(vocab_size: int) -> ModelConfig:
    """The WSJ network of Chiu & Raffel 2018, appendix A.1, with w = 2 (section 3)."""
    return ModelConfig(
        vocab_size=vocab_size, features=FeatureConfig(deltas=True), attention=AttentionConfig(chunk_width=2)
    )


def wsj_monotonic(vocab_size: int) -> ModelConfig:
    """The WSJ network of Raffel 2017, appendix D.1.2.

    Chiu & Raffel 2018 describe it again "for posterity", with a 3 x 3 convolution after the ConvLSTM that the first
    description leaves out; it is kept here.
    """
    return wsj_mocha(vocab_size).with_attention(mechanism="monotonic")


def timit(vocab_size: int) -> ModelConfig:
    """The TIMIT network of Raffel 2017, appendix D.1.1: no convolutions, an encoder frame every 40 ms."""
    return ModelConfig(
        vocab_size=vocab_size,
        features=FeatureConfig(num_mels=40, energy=True, deltas=True),
        encoder=EncoderConfig(
            conv_channels=(),
            num_conv_lstm_layers=0,
            lstm_sizes=(512, 512, 512),
            projection_size=None,
            time_reduction_after=(1, 2),
        ),
        attention=AttentionConfig(mechanism="monotonic", size=512, initial_bias=-1.0),
        decoder=DecoderConfig(embedding_size=30, lstm_size=256, output_context=False),
    )


def small(vocab_size: int) -> ModelConfig:
    """No ConvLSTM, three LSTM-320 layers; about 4 M parameters, made to train and run on a CPU."""
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


def medium(vocab_size: int) -> ModelConfig:
    """As `small`, with LSTM-448 layers; about 6.8 M parameters."""
    return _with_lstm_size(small(vocab_size), 448)


def wide(vocab_size: int) -> ModelConfig:
    """As `small`, with LSTM-640 layers; about 12.3 M parameters."""
    return _with_lstm_size(small(vocab_size), 640)


def _with_lstm_size(config: ModelConfig, size: int) -> ModelConfig:
    encoder = {"lstm_sizes": (size,) * len(config.encoder.lstm_sizes), "projection_size": size}
    return config.model_copy(update={"encoder": config.encoder.model_copy(update=encoder)})


def large(vocab_size: int) -> ModelConfig:
    """As `small` with five LSTM-640 layers; about 22 M parameters, for hundreds of hours of speech and a GPU."""
    return ModelConfig(
        vocab_size=vocab_size,
        encoder=EncoderConfig(num_conv_lstm_layers=0, lstm_sizes=(640,) * 5, projection_size=640, dropout=0.2),
        attention=AttentionConfig(size=256),
        decoder=DecoderConfig(lstm_size=512, dropout=0.2),
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
