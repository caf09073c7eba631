"""Strict readers of input from outside: JSON bodies, YAML files, pydantic schemas of other packages."""
