"""All that words begin with, as a tree of symbols: where each symbol leads, and to which of the sorted words."""

import numpy as np
import torch
from torch import Tensor


def prefix_tree(words: list[list[int]], vocab_size: int) -> tuple[Tensor, Tensor]:
    """The prefixes of `words` (sorted ids) as nodes, 0 the empty one, the last one what no word begins with.

    Returns the node after each symbol, [N, S] int32, and the range of words that each symbol leads to, as the numbers
    [N, S + 1] int32 where ranges begin; the blank leads to the word that is complete.
    """
    lengths = np.array([len(word) for word in words])
    place = np.arange(lengths.max())
    letters = np.zeros((len(words), len(place)), dtype=np.int32)  # 0, the blank, is in no word
    letters[place < lengths[:, None]] = np.concatenate(words)
    same = (letters[1:] == letters[:-1]) & (letters[1:] != 0)
    # How many letters each word begins with that the one before begins with too.
    shared = np.concatenate([[0], same.cumprod(1, dtype=bool).sum(1)])
    new = (place >= shared[:, None]) & (place < lengths[:, None])
    number, depth = new.nonzero()  # of each node's first word, of its last letter
    num_nodes = len(number) + 1
    nodes = np.zeros(letters.shape, dtype=np.int32)
    nodes[new] = np.arange(1, num_nodes)
    nodes = np.maximum.accumulate(nodes)
    parent = np.where(depth > 0, nodes[number, depth - 1], 0)

    children = np.full((num_nodes + 1, vocab_size), num_nodes, dtype=np.int32)
    children[parent, letters[number, depth]] = np.arange(1, num_nodes)
    nothing = np.iinfo(np.int32).max
    bounds = np.full((num_nodes + 1, vocab_size + 1), nothing, dtype=np.int32)
    bounds[parent, letters[number, depth]] = number
    bounds[1:-1, 0] = number
    bounds[0, [0, -1]] = 0, len(words)
    for d in place:  # where the words end that begin like the first of a node
        at = depth == d
        others = np.append((shared <= d).nonzero()[0], len(words))
        bounds[1:-1][at, -1] = others[np.searchsorted(others, number[at], side="right")]
    bounds[-1] = 0
    bounds = np.minimum.accumulate(bounds[:, ::-1], axis=1)[:, ::-1]
    return torch.from_numpy(children), torch.from_numpy(np.ascontiguousarray(bounds))
