"""Cost and quality of exits, measured on a running engine: `tide eval`, `tide verdict` and the stage `measure`."""
