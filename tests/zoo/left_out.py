"""Model types of which no model can be built or run here."""

from __future__ import annotations

LEFT_OUT: dict[str, str] = {
    "gemma3n": "ImportError: its vision tower is a timm model, and timm is not installed",
    "gemma4_assistant": (
        "ValueError: a draft head all of whose layers reuse the keys and values of another model; "
        "transformers' own config refuses layers that are all shared when the text model is built"
    ),
    "gemma4_unified_assistant": (
        "ValueError: a draft head that is called with the hidden states, keys and values of another model; "
        "transformers' own config refuses layers that are all shared when the text model is built"
    ),
}
"""Model type, or family:type -> the reason: the name of an error, and why it is raised."""
