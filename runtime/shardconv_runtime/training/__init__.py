"""Training only: gates of gradients, the loss of sharded logits, random streams, data parallelism."""
