"""TIDE on Ray Serve: one deployment that is its own ingress."""
