"""Floor 2, pure: what to ask a base store for, and what its replies mean."""
