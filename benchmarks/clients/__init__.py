"""What clients that others wrote get from a running service: one check for each client and feature.

`python -m benchmarks.clients` starts the service, runs every check and writes the table in docs/openai.md;
`tests/serve/test_serve_run.py` runs the same checks, so the table claims nothing that no test proves.
"""
