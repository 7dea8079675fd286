"""The whole network: features, encoder, CTC heads, decoder. Used as it is by training, evaluation and serving."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mocha_model.config import ModelConfig
from mocha_model.decoder import AlongPath, Decoder, TeacherForced
from mocha_model.encoder import Encoder
from mocha_model.features import LogMel
from mocha_model.posteriorgram import PosteriorgramEncoder, posteriorgram
from mocha_model.streaming import valid_mask


@dataclass(frozen=True)
class Encoded:
    """What searches are given of some frames.

    Attributes:
        memory: [B, T, D] what the decoder attends to.
        labels: [B, T, V] scores of the CTC head.
        phones: [B, T, P] float32, log-probabilities of the head of phones; None without one.
        num_frames: [B] int64, how many of the T are real.

    """

    memory: Tensor
    labels: Tensor
    phones: Tensor | None
    num_frames: Tensor


class SpeechModel(nn.Module):
    """A MoChA recogniser of the sizes in `config`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.features = LogMel(config.features)
        self.encoder = Encoder(config.features.num_features, config.features.num_maps, config.encoder)
        self.ctc = nn.Linear(self.encoder.output_size, config.vocab_size)
        self.decoder = Decoder(config)
        num_phones = len(config.phones) + 1 if config.phones else 0
        self.phones = nn.Linear(config.encoder.size_below, num_phones) if num_phones else None
        self.posteriorgram: PosteriorgramEncoder | None = None
        if config.posteriorgram:
            delay = config.decoder.delay_frames
            self.posteriorgram = PosteriorgramEncoder(config.vocab_size, num_phones, delay, config.posteriorgram)

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        """The state of streams whose first frame is yet to come."""
        above = self.posteriorgram.init_state(batch_size) if self.posteriorgram else ()
        return self.encoder.init_state(batch_size), above

    def step(self, frames: Tensor, num_frames: Tensor, state: tuple[Any, ...]) -> tuple[Encoded, tuple[Any, ...]]:
        """Normalised features [B, F, num_features], `num_frames` [B] of them real, to all that searches are given."""
        encoder, above = state
        memory, below, num_memory, encoder = self.encoder.step_both(frames, num_frames, encoder)
        labels, phones = self.ctc(memory), self.phone_log_probs(below)
        if self.posteriorgram:
            memory, _, above = self.posteriorgram.step(posteriorgram(labels, phones), num_memory, above)
        return Encoded(memory, labels, phones, num_memory), (encoder, above)

    def hear(self, frames: Tensor, num_frames: Tensor) -> Encoded:
        """`step` for whole utterances, with padding cleared."""
        heard, _ = self.step(frames, num_frames, self.init_state(len(frames)))
        real = valid_mask(heard.num_frames, heard.memory.shape[1])
        return Encoded(heard.memory * real[..., None], heard.labels, heard.phones, heard.num_frames)

    def encode(self, frames: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised features [B, F, num_features] to the encoder's output [B, T, D] and its lengths [B]."""
        memory, num_memory = self.encoder(frames, num_frames)
        return memory, num_memory

    def ctc_log_probs(self, memory: Tensor) -> Tensor:
        """Log-probabilities [B, T, V] float32 of the CTC head; blank is id 0."""
        logits: Tensor = self.ctc(memory).float()
        return logits.log_softmax(dim=-1)

    def give_phones(self, phones: tuple[str, ...], head: nn.Linear | None) -> None:
        """Take `head` as the head of `phones`; none for no phones."""
        self.config = self.config.model_copy(update={"phones": phones})
        self.phones = head

    def phone_log_probs(self, below: Tensor) -> Tensor | None:
        """Log-probabilities [B, T, P] float32 of the head of phones, given what the last layer is; None without one."""
        return None if self.phones is None else self.phones(below).float().log_softmax(dim=-1)

    def teacher_forced(
        self, memory: Tensor, num_memory: Tensor, tokens: Tensor, num_tokens: Tensor, noise_std: float = 0.0
    ) -> TeacherForced:
        """Run the decoder over reference `tokens` [B, U] (eos at the end, 0 padding; `num_tokens` [B] counts eos)."""
        keys = self.decoder.attention.prepare(memory, valid_mask(num_memory, memory.shape[1]))
        return self.decoder.teacher_forced(keys, tokens[:, : int(num_tokens.max())], noise_std)

    def along_path(
        self, memory: Tensor, num_memory: Tensor, tokens: Tensor, num_tokens: Tensor, frames: Tensor
    ) -> AlongPath:
        """Run the decoder along a known path: token i is selected at `frames` [B, U] int64, -1 for never."""
        keys = self.decoder.attention.prepare(memory, valid_mask(num_memory, memory.shape[1]))
        steps = slice(0, int(num_tokens.max()))
        return self.decoder.along_path(keys, tokens[:, steps], num_tokens, frames[:, steps])

    @property
    def num_parameters(self) -> int:
        """Trainable numbers."""
        return sum(p.numel() for p in self.parameters())
