"""A short reference beam search that runs all steps. The gateway's search must equal it."""

from collections.abc import Callable, Collection, Sequence

# Returns the log-probabilities of all tokens that may follow these tokens.
Model = Callable[[Sequence[int]], Sequence[float]]


def reference_beams(
    model: Model,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    end_ids: Collection[int],
    length_penalty: float = 1.0,
) -> list[tuple[list[int], float]]:
    """Returns the best answers in descending order, each with its summed log-probabilities."""
    running: list[tuple[list[int], float]] = [([], 0.0)]
    done: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        extended = []
        for tokens, total in running:
            after = model([*prompt, *tokens])
            likeliest = sorted(range(len(after)), key=lambda i: -after[i])[: 2 * width]
            extended += [([*tokens, token], total + after[token]) for token in likeliest]
        done += [each for each in extended if each[0][-1] in end_ids]
        going_on = [each for each in extended if each[0][-1] not in end_ids]
        running = sorted(going_on, key=lambda each: -each[1])[:width]

    def rank(answer: tuple[list[int], float]) -> float:
        tokens, total = answer
        length = len(prompt) + len(tokens) - (tokens[-1] in end_ids)
        return total / length**length_penalty

    return sorted([*done, *running], key=rank, reverse=True)[:width]
