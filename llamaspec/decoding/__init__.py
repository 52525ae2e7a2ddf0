"""Draft and verify: the loop, the rules of acceptance, how far to draft, and what it all added up to."""
