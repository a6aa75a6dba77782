"""What a module computes, tried by numbers: norms, and sums over experts."""
