"""`full` and `verified` at the cost of a production model, with exits that are calibrated on it."""
