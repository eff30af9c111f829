"""How much to draft, and which drafted tokens stay."""
