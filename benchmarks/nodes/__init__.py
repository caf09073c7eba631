"""A service on two nodes: a rolling update and the loss of a node."""
