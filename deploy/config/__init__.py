"""Settings of the server: application arguments, live policy, and the strict check of a Serve config."""
