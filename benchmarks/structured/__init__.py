"""Structured output against free text."""
