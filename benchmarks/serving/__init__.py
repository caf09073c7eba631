"""The server against the bare engine."""
