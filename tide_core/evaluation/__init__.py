"""What exits cost and what they give, measured on a running engine: `tide eval` and `tide verdict`."""
