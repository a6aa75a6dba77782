"""Inputs for one forward pass: those a user gives, or values made up from names and the config."""
