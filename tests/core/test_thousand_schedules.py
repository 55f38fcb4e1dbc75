"""A thousand random schedules: the same request gives the same ids, whatever else happens.

Neighbours that come, go, pause and are cancelled; budgets of one token to sixteen; caches so small that sequences are preempted; prompts
that are found, forked or computed again. The model is a hash of what the cache really holds (`fake_runner`), so a block or a position
that is not the sequence's own changes every id after it.
"""

from __future__ import annotations

import random

from fastllm.core.engine import Engine
from fastllm.core.errors import Cancelled

from .fake_runner import FakeRunner, all_free, alone, ask

SCHEDULES, WAIT_S = 1000, 60


def probe(rng: random.Random):
    """A request whose ids are known: (request, ids of each choice)."""
    prompt = [rng.randrange(40) for _ in range(rng.choice((1, 3, 8, 17)))]
    params = {"max_tokens": rng.randint(1, 9), "temperature": rng.choice((0.0, 0.8)), "seed": rng.randrange(4), "n": rng.choice((1, 1, 3))}
    if rng.random() < 0.3:
        params |= {"logprobs": 0, "prompt_logprobs": True}
    request = ask(prompt, end_ids=(7,), **params)
    return request, [alone(prompt, request.params, params["seed"], i, (7,))[0] for i in range(params["n"])]


def test_a_thousand_schedules_give_equal_ids():
    preempted = paused = cancelled = found = 0
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        sequences = rng.randint(1, 5)
        probes: list = []

        def amid(batch, chance=random.Random(seed), probes=probes):  # noqa: B008
            """While a step runs: somebody's client stalls and reads again, before the step's tokens are handed out."""
            if probes and chance.random() < 0.2:
                handle = chance.choice(probes)[0]
                handle.pause()
                handle.resume()

        runner = FakeRunner(
            block_size=4, num_blocks=rng.choice((8, 8, 12, 40)), max_blocks=8, max_tokens=max(sequences, rng.choice((1, 3, 16))), max_sequences=sequences, before=amid
        )
        with Engine(runner, prefix_cache=rng.random() < 0.5, policy=rng.choice(("fcfs", "shortest-remaining"))) as engine:
            crowd = []
            for _ in range(rng.randint(1, 5)):
                request, ids = probe(rng)
                handle = engine.submit(request)
                probes.append((handle, ids))
                if rng.random() < 0.4:
                    handle.pause()
                    paused += 1
                if rng.random() < 0.5:
                    crowd.append(engine.submit(ask([rng.randrange(40) for _ in range(rng.randint(1, 20))], max_tokens=rng.randint(1, 12), seed=1)))
                if crowd and rng.random() < 0.3:
                    rng.choice(crowd).cancel()
                if rng.random() < 0.3:
                    rng.choice(probes)[0].resume()
            for handle, _ in probes:
                handle.resume()
            for handle, ids in probes:
                result = handle.result(WAIT_S)
                assert [c.token_ids for c in result.choices] == ids, seed
                if handle.params.prompt_logprobs:
                    assert len(result.prompt_logprobs) == len(handle.request.prompt_ids), seed
            for handle in crowd:
                try:
                    handle.result(WAIT_S)
                except Cancelled:
                    cancelled += 1
            stats = engine.stats()
            preempted += stats.preemptions
            found += stats.prefix_hit_tokens
        all_free(engine)
        assert not engine._scheduler.parked
    assert min(preempted, paused, cancelled, found) > 50, (preempted, paused, cancelled, found)
