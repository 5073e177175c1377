"""Floor 4: what users hold. The operations of the draft, and the two stores that offer them."""
