"""The budget of prompt tokens beside decodes: from what steps took, within bounds."""

from __future__ import annotations

from fastllm.core.pace import FIRST_TOKENS, LEAST_TOKENS, OUTLIER, SHORT_S, STRETCH, Pace


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


def test_steps_too_short_to_be_seen_are_not_cut():
    assert observed((0, 512, 0.001), (7, 0, 1e-4)).prompt_budget() >= int((SHORT_S - 1e-4) / (0.001 / 512)) - 1


def test_one_step_while_somebody_else_had_the_machine_does_not_ruin_the_mean():
    pace = observed(*[(7, 0, 0.02)] * 5, (7, 0, 60.0))
    assert pace.decode_s <= 0.02 * (1 + OUTLIER)
