"""Pipeline stages: where the tape of a model can be cut, and which values cross the cuts."""
