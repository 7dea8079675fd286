"""A recurrent language model of words: what all of a sentence so far says about the next word. Knows no characters.

An LSTM over the words before (Sundermeyer, Schlueter & Ney 2012), whose scores are trained to be log-probabilities as
they are (Devlin et al. 2014, section 2.2): the probability of one word is one product of two vectors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.encoder import next_state

END, OTHER = 0, 1  # numbers of the end of a sentence, and of all words that have none of their own


@dataclass(frozen=True)
class Recalled:
    """What is left of the words before, of R rows.

    Attributes:
        hidden, cell: [R, H] float16, state of the LSTM.
        query: [R, E] float16, whose product with a word's vector is the word's score; made of `hidden`, once.

    """

    hidden: Tensor
    cell: Tensor
    query: Tensor


class WordLSTM(nn.Module):
    """N words, the first of which are `END` and `OTHER`; a word has one vector of E, read and written."""

    def __init__(self, num_words: int, vector_size: int, hidden_size: int, dropout: float = 0.0) -> None:
        """`dropout` is of vectors, hidden states and queries, in training."""
        super().__init__()
        self.vectors = nn.Embedding(num_words, vector_size)
        self.lstm = nn.LSTM(vector_size, hidden_size, batch_first=True)
        self.query = nn.Linear(hidden_size, vector_size)
        self.bias = nn.Parameter(torch.zeros(num_words))
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.vectors.weight, std=0.05)

    def forward(self, words: Tensor) -> Tensor:
        """Queries [R, T, E] after each of `words` [R, T] int64, the first of which is `END`."""
        hidden, _ = self.lstm(self.dropout(self.vectors(words)))
        queries: Tensor = self.dropout(self.query(self.dropout(hidden)))
        return queries

    def init_state(self, batch_size: int) -> Recalled:
        """Before the first word of a sentence."""
        nothing = torch.zeros(batch_size, self.lstm.hidden_size, dtype=torch.float16)
        return self.advance(Recalled(nothing, nothing, nothing), torch.full((batch_size,), END))

    def advance(self, state: Recalled, word: Tensor) -> Recalled:
        """After one more `word` [R] int64."""
        weight_in, weight_hidden, bias_in, bias_hidden = self.lstm.parameters()
        gates = torch.addmm(bias_in + bias_hidden, self.vectors(word), weight_in.t())
        # By plain products: `lstm` would keep kernels for each number of rows.
        after = next_state(torch.addmm(gates, state.hidden.float(), weight_hidden.t()), state.cell.float())
        return Recalled(after.hidden.half(), after.cell.half(), self.query(after.hidden).half())

    def log_probs(self, state: Recalled, word: Tensor) -> Tensor:
        """Of `word` [R] int64 next: [R] float32. They sum to 1 over the words as far as training has made them."""
        scores: Tensor = (state.query.float() * self.vectors(word)).sum(1) + self.bias[word]
        return scores
