"""Logits processors by what they read, so that several positions can be processed in one call."""

from transformers.generation import logits_process as processors_of


# Processors that read one row of scores and nothing else: one call takes all sequences and positions.
POINTWISE = (
    processors_of.TemperatureLogitsWarper,
    processors_of.TopKLogitsWarper,
    processors_of.TopPLogitsWarper,
    processors_of.TopHLogitsWarper,
    processors_of.MinPLogitsWarper,
    processors_of.TypicalLogitsWarper,
    processors_of.EpsilonLogitsWarper,
    processors_of.EtaLogitsWarper,
    processors_of.InfNanRemoveLogitsProcessor,
    processors_of.LogitNormalization,
    processors_of.SuppressTokensLogitsProcessor,
)
# Processors that forbid the end-of-sequence tokens below a length; the value is that length.
MIN_LENGTH = {
    processors_of.MinLengthLogitsProcessor: lambda own: own.min_length,
    processors_of.MinNewTokensLengthLogitsProcessor: lambda own: own.prompt_length_to_skip + own.min_new_tokens,
}
# Processors that remember their last call, so that a rejected draft cannot be taken back from them; the value is the
# option of `generate()` that makes them.
OPTION_OF_STATEFUL = {
    processors_of.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    processors_of.SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}
STATEFUL = tuple(OPTION_OF_STATEFUL)


def kind_of(processor) -> str:
    """What it reads: "pointwise", "min length", "constraint", or "by length": reads the ids before each token."""
    if type(processor) is processors_of.PrefixConstrainedLogitsProcessor:
        return "constraint"
    if type(processor) in MIN_LENGTH:
        return "min length"
    return "pointwise" if type(processor) in POINTWISE else "by length"
