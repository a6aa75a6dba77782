"""From a directory to the model of this rank: files are checked, then read."""
