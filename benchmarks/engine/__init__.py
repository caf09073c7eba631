"""The engine at full depth against `transformers` generate on a CPU."""
