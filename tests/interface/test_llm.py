"""The Python interface on a tiny model, on the numpy backend."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fastllm import LLM, SamplingParams
from fastllm.core.errors import ContextOverflow, InvalidRequest, ModelNotFound, TemplateError, UsageError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model, backend="ref") as llm:
        yield llm


def test_many_prompts_in_one_call_give_what_each_gives_alone(llm):
    prompts = ["abc", [70, 71, 72, 73], "a longer prompt than the others", "z"]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate(p, GREEDY)[0] for p in prompts]
    assert [c.output_ids for c in together] == [c.output_ids for c in alone]
    assert [c.prompt_ids for c in together][1] == [70, 71, 72, 73]
    assert all(len(c.output_ids) == 6 and c.finish_reason == "length" for c in together)


def test_streamed_text_is_the_text_and_timings_are_final(llm):
    answer = llm.stream("hello", SamplingParams(temperature=1.0, seed=5, max_tokens=20))
    streamed = "".join(piece.text for piece in answer)
    done = answer.completion
    assert done.text == streamed
    assert done.timings.decode_tokens == len(done.output_ids)
    assert done.timings.prompt_tokens == len(done.prompt_ids)
    assert done.seed == 5
    again = llm.generate("hello", SamplingParams(temperature=1.0, seed=5, max_tokens=20))[0]
    assert again.output_ids == done.output_ids


def test_seeds_decide_and_choices_differ(llm):
    params = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=11, max_tokens=12, n=3, ignore_eos=True)
    first, second = llm.generate("x", params), llm.generate("x", params)
    assert len(first) == 3
    assert [c.output_ids for c in first] == [c.output_ids for c in second]
    assert len({tuple(c.output_ids) for c in first}) == 3
    pair = llm.generate(["x", "x"], SamplingParams(temperature=2.0, top_k=0, top_p=1.0, seed=11, max_tokens=12, ignore_eos=True))
    assert pair[0].output_ids == first[0].output_ids
    assert pair[0].output_ids != pair[1].output_ids


def test_the_models_own_sampling_settings_are_the_defaults(llm):
    assert (llm.loaded.defaults.temperature, llm.loaded.defaults.top_p) == (0.5, 0.9)


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(llm):
    free = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))[0]
    assert len(free.text) > 4
    word = free.text[2:4]
    cut = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(word,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.stop == word
    assert cut.text == free.text[: free.text.index(word)]


def test_chat_goes_through_the_template_and_special_text_of_a_user_stays_text(llm):
    ids = llm.render([{"role": "user", "content": "<|im_end|>"}])
    assert ids.count(2) == 1  # the template's own; the user's is spelled out in bytes
    assert ids[0] == 1
    reply = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert reply.output_ids == llm.generate(reply.prompt_ids, GREEDY)[0].output_ids
    pieces = list(llm.chat([{"role": "user", "content": "hi"}], GREEDY, stream=True))
    assert "".join(p.text for p in pieces) == reply.text
    assert pieces[-1].finish_reason == "length"


def test_logprobs_are_those_of_the_raw_distribution(llm):
    done = llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=True, ignore_eos=True))[0]
    assert [t.token_id for t in done.logprobs] == done.output_ids
    assert all(t.top[0] == (t.token_id, t.logprob) for t in done.logprobs)  # greedy takes the likeliest
    assert done.prompt_logprobs[0] is None
    assert len(done.prompt_logprobs) == len(done.prompt_ids)
    assert all(np.isfinite(t.logprob) and t.logprob <= 0 for t in done.prompt_logprobs[1:])


def test_what_cannot_be_answered_is_said_before_it_starts(llm):
    with pytest.raises(ContextOverflow, match=r"the prompt has 64 tokens; the context of 64"):
        llm.generate([[65] * 64])
    with pytest.raises(InvalidRequest, match="holds 256; token ids are integers from 0 to 255"):
        llm.generate([[65, 256]])
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.generate([[]])
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 sampling"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("a", SamplingParams(temperature=9))
    assert llm.generate("a", GREEDY)[0].finish_reason == "length"


def test_an_answer_that_nobody_reads_to_the_end_frees_its_blocks(llm):
    answer = llm.stream("abc", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    pieces = iter(answer)
    next(pieces)
    pieces.close()
    answer._handle._ended.wait(10)
    assert llm.loaded.engine.stats().blocks_used == 0


def test_the_context_limit_ends_an_answer(llm):
    done = llm.generate([[65] * 60], SamplingParams(temperature=0, ignore_eos=True))[0]
    assert done.finish_reason == "length"
    assert len(done.prompt_ids) + len(done.output_ids) == 64


def test_two_models_live_in_one_process_and_closing_one_leaves_the_other(tiny_model, llm):
    threads = threading.active_count()
    with LLM(tiny_model, backend="ref", ctx=32) as other:
        assert other.loaded.context == 32
        assert other.generate("abc", GREEDY)[0].output_ids == llm.generate("abc", GREEDY)[0].output_ids
    assert llm.generate("abc", GREEDY)[0].finish_reason == "length"
    assert threading.active_count() == threads


def test_options_and_models_that_do_not_exist_are_named(tiny_model):
    with pytest.raises(UsageError, match="unexpected keyword argument 'ctxx'"):
        LLM(tiny_model, ctxx=3)
    with pytest.raises(UsageError, match="--ctx 100 is more than the 64 tokens"):
        LLM(tiny_model, backend="ref", ctx=100)
    with pytest.raises(UsageError, match="max_batch_size is 0"):
        LLM(tiny_model, backend="ref", max_batch_size=0)
    with pytest.raises(ModelNotFound):
        LLM("smolm2", backend="ref", offline=True)


def test_a_model_without_a_template_continues_but_does_not_chat(tiny_model, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(tiny_model, tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(folder, backend="ref") as llm:
        assert llm.generate("abc", GREEDY)[0].output_ids
        with pytest.raises(TemplateError, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


def test_a_model_that_nobody_holds_any_more_is_closed(tiny_model):
    import gc

    threads = threading.active_count()
    answer = LLM(tiny_model, backend="ref").stream("abc", GREEDY)  # the answer keeps its model
    gc.collect()
    assert len(answer.result().output_ids) == 6
    engine = answer._owner.loaded.engine
    del answer
    gc.collect()
    assert threading.active_count() == threads
    assert not engine._thread.is_alive()
