"""What this package refuses, by the messages of its errors: a test that fails with one of these found no difference."""

import re


DOCUMENTED = (
    r"asks for transformers' default attention",  # the runner's own: see `upstream_plugin`
    r"attn_implementation='flash_paged': \w+ does not support flash attention",
    r"output_attentions=True: flash_paged never holds the attention weights",
    r"output_(attentions|hidden_states)=True is not available under speculation",
    r"attention dropout [\d.]+: flash_paged has none",
    r"flash_paged attention over pages has no backward",
    r"attention_mask with \d dimensions: flash_paged takes 2-D masks",
    r"the model asks for a mask pattern \(.*\) that flash_paged cannot express",
    r"num_beams=\d+: speculation is greedy or sampled decoding",
    r"cache_implementation='\w+': speculation runs on a PagedCache",
    r"use_cache=False: speculation rewinds a cache",
    r"input_ids of shape .*: speculation drafts from token ids",
    r"past_key_values=\w+: speculation runs on a PagedCache",
    r"its forward takes no position_ids; speculation needs",
    r"its ALiBi needs a 2-D mask; speculation needs",
    r"is an encoder-decoder of a kind that speculation does not know",
    r"past_key_values=\w+: speculation runs on an EncoderDecoderPagedCache",
    r"decoder_attention_mask: the decoder's prompts are padded",
    r"speculation does not pass this on to the decoder of",
    r"PagedCache holds decoder-only models, not encoder-decoder ones",
    r"attention_mask: .* which the pages of a PagedCache do not hold",
    r"it overrides a step of transformers' decoding loop",
    r"tokens the rotary embedding of \w+ follows from the longest row of a forward",
    r"has .*(chunked|local).* layers: speculation on a batch",
    r"puts its sliding window into masks alone",
    r"of its config took no part in the prompt's forward",
    r"num_return_sequences has to be 1 when doing assisted generate",  # transformers' own
)


def documented(message: str) -> str:
    """The pattern that `message` matches, "" when there is none."""
    return next((pattern for pattern in DOCUMENTED if re.search(pattern, message)), "")
