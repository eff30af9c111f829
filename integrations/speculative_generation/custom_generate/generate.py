"""transformers loads this file for `model.generate(custom_generate=<repository or folder>, trust_remote_code=True)`."""

from hf_efficient import speculative_generate


def generate(model, input_ids=None, draft_model=None, assistant_model=None, streamer=None, **kwargs):
    """Plain `model.generate(input_ids, **kwargs)`, speculated: the same tokens when greedy, the same distribution when
    sampled, at any batch size.

    Args:
        input_ids: int64 [batch, length], padded on the left; generate()'s first argument (`inputs`) serves too.
        draft_model: what drafts, as `hf_efficient.speculative_generate` takes it: a smaller causal LM with the same
            tokenizer, a drafter, or a `Speculation` around one; None with `prompt_lookup_num_tokens=n`, or to decode
            token by token. `assistant_model` is another name for it.
        streamer: gets the tokens as they come.

    Returns int64 [batch, length], or `SpeculativeOutput` under `return_dict_in_generate=True`. Raises ValueError,
    before any forward, for what speculation cannot do.
    """
    if draft_model is not None and assistant_model is not None:
        raise ValueError("draft_model and assistant_model were both given: they are two names for one thing, pass one")
    if input_ids is not None:
        kwargs["input_ids"] = input_ids
    return model.generate(
        custom_generate=speculative_generate,
        draft_model=assistant_model if draft_model is None else draft_model,
        token_streamer=streamer,
        **kwargs,
    )
