"""Ways in for programs that know nothing of this package."""
