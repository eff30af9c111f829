"""Structured pruning takes whole neurons, heads, layers and channels of the residual stream, so that what is left is an ordinary
smaller model. One file a method, which says what to keep; `integrations/structured_pruning` drives them:

l1          MLP neurons with the smallest weights
llm_pruner  MLP neurons and heads whose removal changes the loss least, to first order
slicegpt    the directions of the residual stream with the least variance
shape       whatever leads to a shape that is asked for, by activations and weights

`groups` finds what hangs together, `shapes` which config describes what is left, and `least_squares` what the weights that stay
should be."""

METHODS = ("l1", "llm_pruner", "slicegpt", "shape")
