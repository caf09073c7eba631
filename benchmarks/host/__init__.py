"""The time of the engine's host code for each row and step."""
