"""The recogniser: features, encoder, attention, decoder and online search. Knows no sockets and no training loop."""
