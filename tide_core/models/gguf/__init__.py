"""Convert a GGUF file to a Hugging Face folder."""
