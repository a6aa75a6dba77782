"""Solving, stage by stage: build, trace, fold, analyze, solve, localize, annotate, check."""
