"""Calibration as a Ray job: `python -m deploy.calibrate`."""
