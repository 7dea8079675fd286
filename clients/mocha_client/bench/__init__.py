"""The load generator: many paced streams of speech, and what they measured."""
