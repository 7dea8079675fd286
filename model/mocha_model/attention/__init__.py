"""The attention family of Raffel 2017 and Chiu & Raffel 2018. Knows nothing of speech: memories are any sequences."""

from mocha_model.attention.alignment import (
    adaptive_chunkwise_alignment,
    all_partial_products,
    chunkwise_alignment,
    log_partial_sums,
    monotonic_alignment,
    monotonic_alignments,
    moving_sum,
    simplified_alignment,
)
from mocha_model.attention.layer import Attention, Memory

__all__ = [
    "Attention",
    "Memory",
    "adaptive_chunkwise_alignment",
    "all_partial_products",
    "chunkwise_alignment",
    "log_partial_sums",
    "monotonic_alignment",
    "monotonic_alignments",
    "moving_sum",
    "simplified_alignment",
]
