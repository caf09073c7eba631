"""Convert a llama-architecture GGUF file to a Hugging Face folder."""
