"""Communication: process groups over mesh axes, collectives with their backward, control messages."""
