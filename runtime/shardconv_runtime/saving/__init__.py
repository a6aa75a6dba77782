"""Writing what training made: converted directories, and optimizer states through torch's checkpoints."""
