"""The whole network: features, encoder, CTC head, decoder. Used as it is by training, evaluation and serving."""

from torch import Tensor, nn

from mocha_model.config import ModelConfig
from mocha_model.decoder import AlongPath, Decoder, TeacherForced
from mocha_model.encoder import Encoder
from mocha_model.features import LogMel
from mocha_model.streaming import valid_mask


class SpeechModel(nn.Module):
    """A MoChA recogniser of the sizes in `config`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.features = LogMel(config.features, config.tail_samples)
        self.encoder = Encoder(config.features.num_features, config.features.num_maps, config.encoder)
        self.ctc = nn.Linear(self.encoder.output_size, config.vocab_size)
        self.decoder = Decoder(config)
        self.phones = nn.Linear(config.encoder.size_below, len(config.phones) + 1) if config.phones else None

    def encode(self, frames: Tensor, num_frames: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised features [B, F, num_features] to memory [B, T, D] and its lengths [B]."""
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
