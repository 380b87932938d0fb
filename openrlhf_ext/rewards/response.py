"""Finding the response in what a reward function is given."""

_DEEPSEEK = "<\uff5cend\u2581of\u2581sentence\uff5c>"
_END_TOKENS = ("<eos>", "<pad>", "</s>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", _DEEPSEEK)


def extract_response(query: str, prompt: str) -> str:
    """The response text: `query` without its prompt, up to the first end-of-text token.

    OpenRLHF decodes prompt and response together, special tokens included.

    Raises:
        ValueError: the query does not start with the prompt.
    """
    if not query.startswith(prompt):
        raise ValueError(
            f"The decoded query {query[: len(prompt) + 20]!r} does not start with its prompt {prompt[:200]!r}: "
            "the prompt was cut (raise data.max_len) or the tokenizer does not give a text back unchanged."
        )
    response = query[len(prompt) :]
    ends = [position for token in _END_TOKENS if (position := response.find(token)) >= 0]
    return response[: min(ends, default=len(response))]
