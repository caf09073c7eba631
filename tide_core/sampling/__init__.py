"""From logits to tokens: penalties, filters and the draw, row by row."""
