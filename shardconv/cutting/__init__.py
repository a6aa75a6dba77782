"""Pipeline stages: where the tape of a model can be cut, and what crosses the cuts."""
