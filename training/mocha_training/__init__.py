"""Makes checkpoints: corpora, augmentation, losses, the training loop and evaluation. Never meets the server."""
