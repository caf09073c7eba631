"""How soon a service answers again after a process of it has died, and whether an update loses a request."""
