"""Weights in FP8: checkpoints that have them, and linears that are rounded to them at load."""
