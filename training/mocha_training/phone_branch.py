"""A branch of the encoder that learns to hear how words are said: English spelling tells little of its sounds.

A second CTC branch reads phones below the last layer (Sanabria & Metze 2018; Krishna et al. 2018), so that words which
were never heard have something to be recognised by. It stays with the model as the head of phones that searches ask how
words sound, for which it is best trained once more, alone.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mocha_model.encoder import LookAhead, LSTMLayer
from mocha_model.model import SpeechModel
from mocha_model.pronunciation import pronounce
from mocha_model.tokenizer import Tokenizer
from mocha_training.denominator import log_total_of_pairs, phone_bigrams
from mocha_training.losses import ctc, has_ctc_path

RATE = 10.0  # times the learning rate: one layer that begins with nothing learns as much in a tenth of the steps
ALONE_STEPS = 100  # what it asks of the encoder before that is noise, and more of it than of all else


class PhoneBranch:
    """CTC over phones of what the encoder's last layer is given.

    Attributes:
        phones: what label n + 1 stands for: those of the texts, and those of the head that the model had.
        output: the model's head of phones.
        begins_alone: whether its weights were 0 at first; then the encoder does not learn from it for `ALONE_STEPS`.
        heard: [B, T, D] float32 and frames [B] of the encoder's last batch, until `loss` has read them.

    """

    def __init__(self, model: SpeechModel, tokenizer: Tokenizer, texts: list[str]) -> None:
        """`texts` have all words that will be learned from.

        The branch begins with the model's head, if there is one, else with weights of 0, and is its head from then on.

        Raises PronunciationError, or ValueError for a network.
        """
        layers = [layer for layer in model.encoder.layers if isinstance(layer, LSTMLayer | LookAhead)]
        if len(layers) < 2:
            raise ValueError("a branch of phones is below the last of at least two layers")
        self.tokenizer = tokenizer
        said = pronounce(word for text in texts for word in text.split())
        self.phones = sorted({phone for phones in said.values() for phone in phones} | {*model.config.phones})
        number = {phone: n for n, phone in enumerate(self.phones, 1)}  # 0 is the blank
        self.numbers = {word: [number[phone] for phone in phones] for word, phones in said.items() if phones}
        rows = ([n for word in text.split() for n in self.numbers.get(word, [])] for text in texts)
        self.bigrams = phone_bigrams(rows, len(self.phones))
        self.output = nn.Linear(model.config.encoder.size_below, len(self.phones) + 1)
        self.output.to(model.ctc.weight.device)
        nn.init.zeros_(self.output.weight)
        self.begins_alone = model.phones is None
        if model.phones is not None:
            self._begin_with(model.phones, model.config.phones)
        model.give_phones(tuple(self.phones), self.output)
        self.heard: tuple[Tensor, Tensor] | None = None
        layers[-2].register_forward_hook(self._listen)

    @torch.no_grad()
    def _begin_with(self, head: nn.Linear, phones: tuple[str, ...]) -> None:
        """Take what `head` knows of each of its `phones`; those that it does not know are as unlikely as its rarest."""
        self.output.bias.fill_(float(head.bias.min()))
        known = {"": 0} | {phone: n for n, phone in enumerate(phones, 1)}
        for n, phone in enumerate(["", *self.phones]):
            if phone in known:
                self.output.weight[n], self.output.bias[n] = head.weight[known[phone]], head.bias[known[phone]]

    def _listen(self, layer: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        self.heard = output if layer.training else None

    def teaches(self, step: int) -> bool:
        """Whether the encoder learns from it in step `step` of a run, from 0."""
        return step >= ALONE_STEPS or not self.begins_alone

    def loss(self, tokens: Tensor, num_tokens: Tensor, denominator_weight: float = 0.0, teaches: bool = True) -> Tensor:
        """CTC per phone of the texts `tokens` [B, U] that the encoder has just heard; `num_tokens` [B] with eos.

        With `denominator_weight`, and so much of what all texts together score, by pairs of phones (`denominator`).
        Its gradient stops before the encoder unless it `teaches`.

        Texts with words whose phones are not known, or that `tokens` cannot spell, count for nothing.
        """
        assert self.heard is not None, "the encoder has heard nothing yet"
        (x, num_frames), self.heard = self.heard, None
        x = x if teaches else x.detach()
        lengths = num_tokens.tolist()
        texts = [self.tokenizer.decode(row[: n - 1]) for row, n in zip(tokens.tolist(), lengths, strict=True)]
        spelled = (tokens != Tokenizer.unk_id).all(1).tolist()
        known = [k for k, text in enumerate(texts) if spelled[k] and self.numbers.keys() >= set(text.split())]
        if not known:
            nothing: Tensor = self.output(x).sum() * 0.0
            return nothing
        rows = [[n for word in texts[k].split() for n in self.numbers[word]] for k in known]
        targets = pad_sequence([torch.tensor([*row, 0]) for row in rows], batch_first=True).to(x.device)
        num_targets = torch.tensor([len(row) + 1 for row in rows], device=x.device)
        log_probs, frames = self.output(x[known]).float().log_softmax(2), num_frames[known]
        loss = ctc(log_probs, frames, targets, num_targets)
        if denominator_weight:
            after, first, last = (share.to(x.device) for share in self.bigrams)
            total = log_total_of_pairs(log_probs, frames, (after, first, last))
            total = torch.where(has_ctc_path(frames, targets, num_targets), total, 0.0)
            loss = loss + denominator_weight * total.sum() / (num_targets - 1).sum().clamp(min=1)
        return loss
