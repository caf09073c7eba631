"""Every op of the engine against plain Torch and against its floor."""
