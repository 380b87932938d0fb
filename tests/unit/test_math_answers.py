import pytest

pytest.importorskip("math_verify", reason="needs the math-verify package")

from openrlhf_ext.tasks.math_answers import MAX_ANSWER_CHARS, MAX_RESPONSE_CHARS, Grade, gold_answer, grade

RIGHT, WRONG, NO_ANSWER = Grade(1.0, 1.0), Grade(0.0, 1.0), Grade(0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("42", "42"),
        ("42", 42),
        ("27", 27.0),
        ("1234", "1,234"),
        ("104.", "104"),
        (r"\frac{1}{2}", r"\frac12"),
        ("0.5", "1/2"),
        (r"50\%", "0.5"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"$5$", "5"),
        (r"\$18", "18"),
        (r"x = 5", "5"),
        (r"(x+1)^2", "x^2+2x+1"),
        (r"\{-2, 1\}", "1,-2"),
        (r"\left( 3, \dfrac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"4.5 \times 10^{33}", "4.5e33"),
        ("1.6e-19", r"1.6\times10^{-19}"),
    ],
)
def test_an_equal_answer_is_right_however_it_is_written(answer: str, gold: object) -> None:
    assert grade(f"so $\\boxed{{{answer}}}$.", gold) == RIGHT


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("43", "42"), ("-42", "42"), (r"\frac{1}{3}", "0.33"), ("1", "1,-2"), ("1,2,3", "3"), ("x+1", "x-1"), ("y", "x")],
)
def test_another_answer_is_wrong(answer: str, gold: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold) == WRONG


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{1}, no, \boxed{2}", RIGHT),
        (r"\boxed{2}, no, \boxed{1}", WRONG),
        (r"\boxed{2}, no, \boxed{1", NO_ANSWER),  # cut off
        (r"\boxed{}", NO_ANSWER),
        (r"\boxed{1} #### 2", WRONG),
        (r"\fbox{2}", RIGHT),
        (r"\boxed{\left\{ 2 \right.}", RIGHT),  # an escaped brace is none
        ("1 + 1 = 2\n#### 2", RIGHT),
        ("#### 1\n#### 2", RIGHT),
        ("#### Step 1\nThe answer is 2", RIGHT),
        ("Answer: $2$", RIGHT),
        ("1 + 1 = 2. #### 2", RIGHT),  # on one line, as the prompts of few-shot evaluations have it
        ("##### 2", NO_ANSWER),  # a heading
        ("The answer is **2**.", RIGHT),
        ("**Answer: 2**", RIGHT),
        ("**Answer:** 2 apples", RIGHT),
        ("The answer is 2**1.", RIGHT),
        ("The answer is $2.", RIGHT),
        ("The answer is 1. Wait, the answer is 2.", RIGHT),
        ("<think>1 or 3</think> <answer>2</answer>", RIGHT),
        ("<answer>2</answer> no, <answer> 1 </answer>", WRONG),
        ("<answer>2</answer> so the answer is 1", RIGHT),
        ("<answer>2", NO_ANSWER),  # cut off
        ("<answer></answer>", NO_ANSWER),
        ("Therefore she has 2 left.", NO_ANSWER),
        ("the answer is 1", WRONG),
        ("1 + 1 = 2", NO_ANSWER),
        ("2", NO_ANSWER),
        ("", NO_ANSWER),
    ],
)
def test_the_last_answer_that_is_marked_as_one_counts(response: str, expected: Grade) -> None:
    assert grade(response, "2") == expected


def test_only_the_end_of_a_response_is_searched() -> None:
    assert grade(r"\boxed{2}" + " " * (MAX_RESPONSE_CHARS - 9), "2") == RIGHT
    assert grade(r"\boxed{2}" + " " * MAX_RESPONSE_CHARS, "2") == NO_ANSWER


def test_an_answer_beyond_the_cap_is_not_parsed() -> None:
    ones = "+".join("1" * 250)
    assert len(ones) == MAX_ANSWER_CHARS - 1
    assert grade(f"\\boxed{{{ones}}}", "250") == RIGHT
    assert grade(f"\\boxed{{{ones}+0}}", "250") == NO_ANSWER


@pytest.mark.parametrize(
    "response",
    [
        "{" * 1_000_000,
        r"\boxed{" * 150_000,
        r"\boxed{" + "(" * 400 + "}",
        r"\boxed{\frac{1}{0}}",
        r"\boxed{\frac}",
        r"\boxed{$$}",
        "answer: $" * 1_000,
        "\\boxed{\ud800\u202e\x00\N{PILE OF POO}\u0661}",
    ],
    ids=lambda response: response[:12].encode("ascii", "replace").decode(),
)
def test_any_text_is_graded_as_wrong_without_an_error(response: str) -> None:
    assert grade(response, "2").accuracy == 0.0


@pytest.mark.parametrize(
    ("label", "gold"),
    [
        (" 42 ", "42"),
        (27.0, "27.0"),
        ("2 + 3 = 5\n#### 1,080", "1,080"),
        (r"Then \boxed{\frac{1}{2}} follows.", r"\frac{1}{2}"),
        (["1", -2], "1, -2"),
    ],
)
def test_a_label_is_the_answer_or_holds_it(label: object, gold: str) -> None:
    assert gold_answer(label) == gold


@pytest.mark.parametrize("label", ["", " ", None, [], r"\boxed{}", "a solution " * 50])
def test_a_label_without_an_answer_is_an_error(label: object) -> None:
    with pytest.raises(ValueError, match="holds no answer"):
        grade(r"\boxed{2}", label)
