"""The HTTP API: OpenAI-compatible routes, request checks, the playground page."""
