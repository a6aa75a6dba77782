"""Adapters of the ``peft`` library on models whose parameters are sharded: trained ones, and new ones."""
