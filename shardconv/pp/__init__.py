"""Pipeline parallelism: where the tape of a model can be cut into stages, and which values cross the cuts."""
