"""How ranks talk: process groups over mesh axes, collectives with their adjoints, control messages."""
