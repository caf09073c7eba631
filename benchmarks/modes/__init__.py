"""The four modes of one engine: speed, identity, disagreement."""
