"""`PromptCompressor`: drops the words of a prompt that carry least information for a small model."""

from dataclasses import dataclass, field

import torch

from hf_efficient.prompts import checks, small_model
from hf_efficient.prompts import prompt as prompts
from hf_efficient.prompts.classifier import kept_by_classifier
from hf_efficient.prompts.groups import Group, forced_words, grouped, order_of
from hf_efficient.prompts.perplexity import PerplexityRanker
from hf_efficient.prompts.tokens import Word, shortest, special_ids, tokenize


@dataclass(frozen=True)
class CompressedPrompt:
    """What is left of a prompt.

    Attributes:
        text: the kept characters of the prompt, in its order and spelling.
        token_ids: the kept tokens, of the small model's tokenizer.
        positions: their indices among the prompt's tokens; ascending, unless documents were reordered.
        prompt_tokens: how many tokens the prompt had.
        messages: the messages of a chat, with shorter contents; else empty.
    """

    text: str
    token_ids: list[int]
    positions: list[int]
    prompt_tokens: int
    messages: list[dict] = field(default_factory=list)


class PromptCompressor:
    """Shortens prompts for any large model, by the probabilities that a small model gives to their tokens.

    A causal language model drops words that it could have guessed from the kept words before them, segment by segment
    (LLMLingua, https://arxiv.org/abs/2310.05736). With a question, the budget goes to the passages after which the
    question is most probable, and in them to the words that the question makes more probable (LongLLMLingua,
    https://arxiv.org/abs/2310.06839). A token classifier with two labels, such as the published checkpoints of
    LLMLingua-2 (https://arxiv.org/abs/2403.12968), needs one forward and drops the words least likely to be kept.

    Words are dropped whole. Scripts without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese, Tibetan) are dropped
    token by token; combining marks stay with their letter. At least the shortest word stays.

    Args:
        model: a causal language model or a token classifier, or the folder or name of one.
        tokenizer: of the model; not needed if `model` is a folder or a name.
        hub_options: revision, token, ... as in `from_pretrained`, for a folder or a name.

    Raises:
        TypeError: `model` is neither, or another option is given.
        ValueError: an encoder-decoder, another kind of model, a classifier without two labels, or a model without a
            tokenizer.
    """

    def __init__(self, model, tokenizer=None, **hub_options):
        self.model, self.tokenizer = small_model.load(model, tokenizer, hub_options)
        self.is_classifier = small_model.is_classifier(self.model)

    def compress(
        self,
        prompt: str | dict | list,
        keep: float | None = None,
        tokens: int | None = None,
        question: str | list[str] | None = None,
        keep_words: list[str] | tuple[str, ...] = (),
        reorder: bool = False,
    ) -> CompressedPrompt | list[CompressedPrompt]:
        """Drops words of a prompt. One of `keep` and `tokens` says how many stay.

        Args:
            prompt: a text; or a dict of its segments: "instruction" and "question" (texts), "demonstrations" and
                "documents" (lists of texts), which are joined by blank lines; or the messages of a chat. A list of
                these gives a list of results, each as if it were alone. In a chat only what users and assistants say
                gets shorter: system messages and the chat template stay. Special tokens always stay.
            keep: share of the droppable tokens that stay, above 0 and at most 1. `keep_words` stay even if they are
                more.
            tokens: the most tokens of the result, in the small model's tokenizer, including those that always stay.
            question: what the answer must be about; a list has one for each prompt. It stays where the prompt contains
                it, and is not added.
            keep_words: words, in this spelling, and other strings that always stay.
            reorder: sort the documents of a dict by their relevance to the question, best first.

        Raises:
            TypeError: for an argument of another type.
            ValueError: for a value out of range, an empty prompt or question or one with half of a character, fewer
                `tokens` than must stay or than the shortest word has, more `tokens` than the prompt has, a question
                longer than the model's positions, a question for a classifier that the prompt does not contain, or
                `reorder` without documents and a question.
        """
        checks.check_budget(keep, tokens)
        checks.check_words(keep_words)
        if not isinstance(prompt, list) or checks.is_chat(prompt):
            return self._compress(prompt, keep, tokens, question, keep_words, reorder)
        questions = checks.check_batch(prompt, question)
        pairs = zip(prompt, questions)
        return [self._compress(each, keep, tokens, asked, keep_words, reorder) for each, asked in pairs]

    def _compress(self, prompt, keep, tokens, question, keep_words, reorder) -> CompressedPrompt:
        """As `compress`, for one prompt."""
        read = prompts.read(prompt, question, self.tokenizer)
        cuts = [place for part in read.parts for place in (part.start, part.end)]
        ids, words = tokenize(self.tokenizer, read.text, cuts)
        special = special_ids(self.tokenizer, read.text)
        fixed = {index for index, word in enumerate(words) if special.intersection(ids[word.first : word.stop])}
        steered = read.question is not None and not self.is_classifier
        groups = grouped(read, words, fixed, steered)
        checks.check_question(read, reorder, groups, self.is_classifier)
        forced = forced_words(read, words, keep_words)
        least = shortest(words, read.text)
        budget = checks.budget_of(groups, words, forced, len(ids), keep, tokens, len(words[least]))
        with torch.no_grad(), small_model.evaluating(self.model):
            if self.is_classifier:
                kept = kept_by_classifier(self.model, self.tokenizer, read.text, ids, words, groups, forced, budget)
            else:
                ranker = PerplexityRanker(self.model, self.tokenizer, read.question, ids, words)
                worth = ranker.worth(groups)
                if reorder:
                    order = order_of(groups, worth)
                    groups, worth = [groups[index] for index in order], [worth[index] for index in order]
                kept = ranker.kept(groups, worth, forced, budget)
        return _result(read, ids, words, groups, kept or {least})


def _result(read: prompts.Prompt, ids: list[int], words: list[Word], groups: list[Group], kept: set[int]):
    order = [index for group in groups for index in group.words if index in kept]
    positions = [token for index in order for token in range(words[index].first, words[index].stop)]
    messages = []
    for message, (start, end) in zip(read.messages, read.contents):
        inside = [words[index] for index in order if words[index].start < end and words[index].end > start]
        content = "".join(read.text[max(word.start, start) : min(word.end, end)] for word in inside)
        messages.append({**message, "content": content})
    text = "".join(read.text[words[index].start : words[index].end] for index in order)
    return CompressedPrompt(text, [ids[token] for token in positions], positions, len(ids), messages)
