"""Prompts whose answers repeat their text: edits of code, answers from a text."""
