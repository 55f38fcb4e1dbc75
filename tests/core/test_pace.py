"""The budget of prompt tokens beside decodes: from what steps took, within bounds."""

from __future__ import annotations

from fastllm.core.pace import FIRST_TOKENS, LEAST_TOKENS, OUTLIER, STRETCH, Pace


def observed(*steps):
    pace = Pace()
    for step in steps:
        pace.observe(*step)
    return pace


def test_without_decodes_a_prompt_takes_all_the_room():
    assert Pace().prompt_budget() is None
    assert observed((0, 512, 1.0)).prompt_budget() is None


def test_the_first_chunk_is_small_while_the_cost_of_a_prompt_token_is_unknown():
    assert observed((7, 0, 0.02)).prompt_budget() == FIRST_TOKENS


def test_a_mixed_step_stays_below_three_steps_of_decodes():
    decode_s, prompt_s = 0.020, 0.0005
    pace = observed((0, 500, 500 * prompt_s), *[(7, 0, decode_s)] * 20)
    tokens = pace.prompt_budget()
    assert decode_s + tokens * prompt_s <= STRETCH * decode_s < 3 * decode_s
    assert tokens > 0.9 * (STRETCH - 1) * decode_s / prompt_s


def test_the_cost_of_a_token_is_learnt_from_mixed_steps():
    pace = observed((7, 0, 0.02), *[(7, 50, 0.02 + 50 * 0.0001)] * 40)
    cheap = pace.prompt_budget()
    for _ in range(40):
        pace.observe(7, 50, 0.02 + 50 * 0.0004)
    assert 3.5 < cheap / pace.prompt_budget() < 4.5


def test_prompts_go_on_on_any_machine():
    assert observed((0, 512, 5000.0), (7, 0, 0.02)).prompt_budget() == LEAST_TOKENS


def test_short_steps_are_paced_as_long_ones_are():
    short, long = observed((0, 512, 0.15), (7, 0, 0.003)), observed((0, 512, 15.0), (7, 0, 0.3))
    assert short.prompt_budget() == long.prompt_budget() == int((STRETCH - 1) * 0.3 / (15.0 / 512))


def test_a_token_that_costs_more_than_before_is_believed_at_once():
    pace = observed((0, 512, 512 * 0.0001), *[(7, 0, 0.02)] * 3)
    tokens = pace.prompt_budget()
    pace.observe(7, tokens, 0.02 + tokens * 0.0003)  # a chunk costs three times as much a token as whole prompts do
    again = pace.prompt_budget()
    assert 0.02 + again * 0.0003 <= 3 * 0.02


def test_a_long_prompt_beside_streams_never_holds_them_for_three_steps():
    """Steps of a machine whose tokens cost more in small chunks and at long contexts; only the first mixed step may surprise."""

    def seconds(decodes, tokens, context):
        return (0.02 if decodes else 0.015) + tokens * (0.0012 + 0.008 / max(tokens, 1) + context * 4e-7)

    pace, done, gaps = Pace(), 0, []
    pace.observe(0, 112, seconds(0, 112, 0))
    for _ in range(30):
        pace.observe(7, 0, seconds(7, 0, 0))
    while done < 2000:
        tokens = min(pace.prompt_budget(), 2000 - done)
        gaps.append(seconds(7, tokens, done))
        pace.observe(7, tokens, gaps[-1])
        done += tokens
    assert max(gaps) < 3 * 0.02
    assert sum(gaps) < 4 * seconds(0, 2000, 1000)


def test_one_step_while_somebody_else_had_the_machine_does_not_ruin_the_mean():
    pace = observed(*[(7, 0, 0.02)] * 5, (7, 0, 60.0))
    assert pace.decode_s <= 0.02 * (1 + OUTLIER)
