"""The attention family of Raffel 2017 and Chiu & Raffel 2018. Knows nothing of speech: memories are any sequences."""

from mocha_model.attention.alignment import chunkwise_alignment, monotonic_alignment, moving_sum
from mocha_model.attention.mocha import MochaAttention, MochaKeys

__all__ = ["MochaAttention", "MochaKeys", "chunkwise_alignment", "monotonic_alignment", "moving_sum"]
