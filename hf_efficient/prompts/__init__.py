"""Makes prompts shorter: a small model says which tokens a large one needs least."""
