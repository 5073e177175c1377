"""Ways in and out for other programs and formats."""
