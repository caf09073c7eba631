"""The surface for users of `transformers`: `TIDE`, `TIDEConfig` and `calibrate`, all exported by `tide_core`."""
