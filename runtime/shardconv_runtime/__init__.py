"""Loads what shardconv converted, on the ranks of a torchrun job."""
