"""Contextual sparsity: feed-forward layers that compute only the neurons that a token needs (Liu et al. 2023, "Deja Vu:
Contextual Sparsity for Efficient LLMs at Inference Time", https://arxiv.org/abs/2310.17157)."""
