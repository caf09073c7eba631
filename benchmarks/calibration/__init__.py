"""The calibration job against `tide calibrate`, and its memory."""
