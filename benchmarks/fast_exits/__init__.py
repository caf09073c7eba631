"""Exits of mode fast: what variants of them cost in disagreement, and save in layers."""
