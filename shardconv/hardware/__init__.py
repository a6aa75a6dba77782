"""Devices, links and clusters, and the times of plans on them: predicted, never measured."""
