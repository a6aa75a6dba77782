"""What only training needs: gates of gradients, the loss from shards, random draws, data parallelism."""
