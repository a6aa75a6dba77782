"""Pushes of converted directories to repositories of the Hub, with their model card."""
