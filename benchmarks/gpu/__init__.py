"""The engine on a GPU: the table of docs/performance.md, and an ablation of its mechanisms."""
