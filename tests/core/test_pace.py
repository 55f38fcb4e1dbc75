"""The budget of prompt tokens beside decodes: from what steps took, within bounds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastllm.core.pace import FIRST_TOKENS, LEAST_TOKENS, STRETCH, Pace


def observed(*steps):
    pace = Pace()
    for step in steps:
        pace.observe(*step)
    return pace


def test_what_decodes_cost_is_measured_before_the_first_prompt_beside_them():
    pace = observed((0, 512, 1.0))
    assert pace.prompt_budget(1) == 0
    pace.observe(1, 0, 0.02)
    assert pace.prompt_budget(1) > 0


def test_the_first_chunk_is_small_while_the_cost_of_a_prompt_token_is_unknown():
    assert observed((7, 0, 0.02)).prompt_budget(7) == FIRST_TOKENS
    assert observed((0, 1, 0.02), (7, 0, 0.02)).prompt_budget(7) == FIRST_TOKENS  # one token says nothing of many


def test_a_mixed_step_stays_below_three_steps_of_decodes():
    decode_s, prompt_s = 0.020, 0.0005
    pace = observed((0, 500, 500 * prompt_s), *[(7, 0, decode_s)] * 20)
    tokens = pace.prompt_budget(7)
    assert decode_s + tokens * prompt_s <= STRETCH * decode_s < 3 * decode_s
    assert tokens > 0.9 * (STRETCH - 1) * decode_s / prompt_s


def test_the_cost_of_a_token_is_learnt_from_mixed_steps():
    pace = observed((7, 0, 0.02), *[(7, 250, 0.02 + 250 * 0.0001), (7, 0, 0.02)] * 40)
    cheap = pace.prompt_budget(7)
    for _ in range(40):
        pace.observe(7, 100, 0.02 + 100 * 0.0004)
        pace.observe(7, 0, 0.02)
    assert 3.5 < cheap / pace.prompt_budget(7) < 4.5


def test_prompts_go_on_on_any_machine():
    assert observed((0, 512, 5000.0), (7, 0, 0.02)).prompt_budget(7) == LEAST_TOKENS


def test_short_steps_are_paced_as_long_ones_are():
    short, long = observed((0, 512, 0.15), (7, 0, 0.003)), observed((0, 512, 15.0), (7, 0, 0.3))
    assert short.prompt_budget(7) == long.prompt_budget(7) == int((STRETCH - 1) * 0.3 / (15.0 / 512))


def test_a_token_that_costs_more_than_before_is_believed_at_once():
    pace = observed((0, 512, 512 * 0.0001), *[(7, 0, 0.02)] * 3)
    tokens = pace.prompt_budget(7)
    pace.observe(7, tokens, 0.02 + tokens * 0.0003)  # a chunk costs three times as much a token as whole prompts do
    again = pace.prompt_budget(7)
    assert 0.02 + again * 0.0003 <= 3 * 0.02


def run(pace, seconds, prompts, decodes, *, room=512, leaves_every=None):
    """(total seconds, the longest gap in steps of decodes alone, numbers of prompt tokens): the prompts' lengths in order, each of
    them a stream when it is done, beside streams that have decoded for a while. The clock is the machine's model, seconds(decodes,
    tokens, context of the prompt)."""
    for _ in range(30):
        pace.observe(decodes, 0, seconds(decodes, 0, 0))
    left, total, gap, taken = list(prompts), 0.0, 0.0, []
    while left:
        budget, tokens, done, context = min(pace.prompt_budget(decodes), room - decodes), 0, 0, prompts[-1] - left[-1]
        while left and tokens < budget:
            tokens += (part := min(left[0], budget - tokens))
            left[0] -= part
            if left[0] == 0:
                del left[0]
                done += 1
        took = seconds(decodes, tokens, context)
        total, gap = total + took, max(gap, took / seconds(decodes, 0, 0))
        taken.append(tokens)
        pace.observe(decodes, tokens, took)
        decodes += done - (leaves_every is not None and len(taken) % leaves_every == 0 and decodes > 1)
    return total, gap, taken


class Oracle:
    """Knows what the machine costs."""

    def __init__(self, seconds):
        self.seconds = seconds

    def observe(self, *step):
        pass

    def prompt_budget(self, num_decodes):
        alone, most = self.seconds(num_decodes, 0, 0), 1
        while self.seconds(num_decodes, most + 1, 0) <= STRETCH * alone and most < 512:
            most += 1
        return most


def linear(step_s, decode_s, prompt_s):
    return lambda decodes, tokens, context: step_s + decode_s * decodes + prompt_s * tokens


MACHINES = [linear(0.036, 0.006, 0.005), linear(0.004, 0.02, 0.005), linear(0.005, 0.0001, 0.00002), linear(0.02, 0.004, 0.0012)]


@pytest.mark.parametrize("seconds", MACHINES)
@pytest.mark.parametrize(("prompts", "decodes", "leaves_every"), [([300] * 16, 1, None), ([2000] * 20, 1, None), ([300] * 16, 16, 10), ([2000], 7, None)])
def test_prompts_beside_a_changing_number_of_decodes_take_little_longer_than_with_known_costs(seconds, prompts, decodes, leaves_every):
    """Decodes join while prompts wait, so that there is never a step of decodes alone but those that are asked for."""
    pace = observed((0, 112, seconds(0, 112, 0)))
    total, gap, taken = run(pace, seconds, prompts, decodes, leaves_every=leaves_every)
    best, _, _ = run(Oracle(seconds), seconds, prompts, decodes, leaves_every=leaves_every)
    assert total < 1.3 * best
    assert gap <= 3
    assert all(a + b > 0 for a, b in pairwise(taken)), "two steps in a row without prompts"


def test_many_short_prompts_become_streams_without_holding_each_other_up():
    seconds = MACHINES[0]
    total, _, taken = run(observed((0, 112, seconds(0, 112, 0))), seconds, [12] * 60, 1)
    assert total < 1.5 * run(Oracle(seconds), seconds, [12] * 60, 1)[0]
    assert min(tokens for tokens in taken[:-1] if tokens) > LEAST_TOKENS  # the last step has what is left


def test_a_noisy_machine_does_not_drive_the_budget_to_the_floor():
    rng, seconds = random.Random(1), MACHINES[0]

    def noisy(decodes, tokens, context):
        return seconds(decodes, tokens, context) * (1 + 0.1 * abs(rng.gauss(0, 1))) * (3 if rng.random() < 0.02 else 1)

    total = run(observed((0, 112, seconds(0, 112, 0))), noisy, [300] * 16, 1)[0]
    assert total < 1.5 * run(Oracle(seconds), noisy, [300] * 16, 1)[0]


def test_the_rest_of_a_prompt_says_nothing_about_the_cost_of_a_token():
    pace = observed((0, 500, 0.25), *[(7, 0, 0.02)] * 20)
    known = pace.prompt_s
    pace.observe(7, 2, 0.03)  # half a step longer than without: 5 ms a token, if it were for the two tokens
    assert pace.prompt_s == known


def test_a_long_prompt_beside_streams_never_holds_them_for_three_steps():
    """Steps of a machine whose tokens cost more in small chunks and at long contexts; only the first mixed step may surprise."""

    def seconds(decodes, tokens, context):
        return (0.02 if decodes else 0.015) + tokens * (0.0012 + context * 4e-7) + (0.008 if tokens else 0.0)

    total, gap, _ = run(observed((0, 112, seconds(0, 112, 0))), seconds, [2000], 7)
    assert gap < 3
    assert total < 5 * seconds(0, 2000, 1000)


def test_one_step_while_somebody_else_had_the_machine_does_not_count():
    pace = observed(*[(7, 0, 0.02)] * 5, (7, 0, 60.0))
    assert pace.decode_s == pytest.approx(0.02)


def test_a_machine_that_stays_slower_is_believed():
    pace = observed(*[(7, 0, 0.02)] * 5, *[(7, 0, 0.04)] * 8)
    assert pace.decode_s > 0.035
