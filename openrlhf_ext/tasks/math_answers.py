"""Mathematics, the task: does a response give the reference answer, in whatever form it is written.

Whether two answers are equal is math-verify's business, which parses LaTeX and plain numbers with sympy. Here is what
it leaves open: which part of a response is its answer, how much of it may be parsed, and what a label looks like.
"""

import re
from dataclasses import dataclass

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

MAX_RESPONSE_CHARS = 10_000
"""Only the end of a response is searched. Reference solutions of MATH have theirs within the last 2,000 characters."""

MAX_ANSWER_CHARS = 500
"""Longer answers are not parsed, and count as wrong; the longest of MATH-500 has 53 characters."""

_TIMEOUT_S = 5
"""Of each parse and comparison, by math-verify's alarm. Wall time: at a load of 26 on 2 cores, right answers that take
0.2 s of CPU ran into 2 s. Code in C does not notice an alarm; that is for a reward pool."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FINAL_LINE = re.compile(r"(?<!#)####[ \t]*([-+$\d.,/ ]*\d)[ \t]*%?[ \t]*$", re.MULTILINE)
"""GSM8K's `#### 42`, at the end of a line. Only with a number: models use `####` for headings."""

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOLD = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(])")
"""Markdown's `**`, which chat models put around answers; not the power in `2**3`."""

_E_NOTATION = re.compile(r"(?<=\d)[eE]([-+]?\d+)")
_AFTER_THE_WORD = (
    LatexExtractionConfig(try_extract_without_anchor=False, boxed_match_priority=-1),
    ExprExtractionConfig(try_extract_without_anchor=False),
)


@dataclass(frozen=True, slots=True)
class Grade:
    accuracy: float
    """1.0 when the answer equals the reference answer, else 0.0."""
    format: float
    """1.0 when the response has an answer that can be read, else 0.0."""


def grade(response: str, label: object) -> Grade:
    """Grade the last answer of a response.

    That is the content of the last `\\boxed{}`; without one, the number after the last `####`; without that, the last
    `<answer>...</answer>`; without that, what follows the word "answer". A number that nothing marks as the answer is
    none (there is no "last number" rule): a response that was cut off would often be right by accident. A last box
    that was cut off is no answer either.

    Args:
        response: any text, of any length.
        label: see `gold_answer`.

    Raises:
        ValueError: the label holds no answer; or not in the main thread, where math-verify's alarm does not work.
    """
    gold = gold_answer(label)
    response = response[-MAX_RESPONSE_CHARS:]
    answer = _marked(response)
    if answer is None:
        found = parse(_BOLD.sub("", response), _AFTER_THE_WORD, parsing_timeout=_TIMEOUT_S)
    else:
        found = _parse(answer)
    if not found:
        return Grade(accuracy=0.0, format=0.0)
    return Grade(accuracy=float(verify(_parse(gold), found, timeout_seconds=_TIMEOUT_S)), format=1.0)


def gold_answer(label: object) -> str:
    """The reference answer in a label, as LaTeX or a plain number.

    Args:
        label: the answer itself (`\\frac12`, `1,-2`, 27.0); a solution that has it in its last `\\boxed{}` or after
            `####`; or a list of answers, all of which a response must give.

    Raises:
        ValueError: there is no answer in it.
    """
    text = ", ".join(map(str, label)) if isinstance(label, list) else str(label)
    marked = _marked(text)
    gold = text.strip() if marked is None else marked
    if label is None or not 0 < len(gold) <= MAX_ANSWER_CHARS:
        raise ValueError(
            f"The label {text[:100]!r} holds no answer: it must be one of at most {MAX_ANSWER_CHARS} characters, or a "
            "solution that gives one in \\boxed{} or after ####. Point the label key at the column of the answers."
        )
    return gold


def _marked(text: str) -> str | None:
    """The content of the last box ("" where it does not end), else after the last `####`, else of the last tag."""
    boxes = list(_BOX.finditer(text))
    if boxes:
        return _up_to_its_brace(text[boxes[-1].end() :])
    found = _FINAL_LINE.findall(text) or _TAG.findall(text)
    return found[-1].strip() if found else None


def _up_to_its_brace(text: str) -> str:
    depth = 1
    for match in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[: match.start()].strip()
    return ""


def _parse(answer: str) -> list[object]:
    """What math-verify reads in an answer; nothing where it is too long."""
    if len(answer) > MAX_ANSWER_CHARS:
        return []
    # math-verify reads LaTeX only in a box or the like, reads no `104.`, and takes the e of 4.5e33 for Euler's number.
    text = _E_NOTATION.sub(r"\\times 10^{\1}", answer.rstrip(" ."))
    return parse(f"\\boxed{{{text}}}", parsing_timeout=_TIMEOUT_S)
