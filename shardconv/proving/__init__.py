"""What a module computes, tried by numbers: norms, experts, and the ranks of a simulation."""
