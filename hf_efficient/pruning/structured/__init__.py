"""Structured pruning removes whole neurons, heads, layers and channels of the residual stream: what is left is an
ordinary, smaller model. One file a method, which says what stays; `hf_efficient/compression/structured_pruning` runs
them:

l1          MLP neurons of the smallest weights go
llm_pruner  MLP neurons and heads go whose removal changes the loss least, to first order
slicegpt    directions of the residual stream of the least variance go
shape       reaches a given shape, by activations and weights

`groups` finds what can only go together, `shapes` the config of a smaller model, `basis` what is left of the residual
stream, and `least_squares` the best values of the weights that stay."""

METHODS = ("l1", "llm_pruner", "slicegpt", "shape")
