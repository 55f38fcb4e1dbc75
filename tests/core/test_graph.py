"""The graph builder and its shape rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastllm.core.errors import ShapeError
from fastllm.core.graph import GraphBuilder
from fastllm.core.ops import CATALOGUE, CORE_OPS


def builder() -> tuple[GraphBuilder, object]:
    g = GraphBuilder("t")
    return g, g.embed(g.input("ids"), g.weight("embed", (32, 8)))


def test_every_op_of_opset_1_is_in_the_catalogue_and_documented():
    assert set(CORE_OPS) == set(
        "embed linear matmul rms_norm layer_norm rope kv_write attention act_mul add mul softmax quantize dequantize sample".split()
    )
    assert all(len(spec.doc.strip()) > 20 for spec in CATALOGUE.values())


def test_a_wrong_operand_is_refused_where_it_is_written():
    g, x = builder()
    with pytest.raises(ShapeError, match=r"'linear' needs x \[n, K\]"):
        g.linear(x, g.weight("w", (4, 9)))
    with pytest.raises(ShapeError, match="needs the attribute 'eps'"):
        g.op("rms_norm", x)
    with pytest.raises(ShapeError, match="has no attribute epsilon; it has eps"):
        g.op("rms_norm", x, epsilon=1.0)
    with pytest.raises(ShapeError, match="kind='swish' is not one of silu"):
        g.act_mul(x, kind="swish")
    with pytest.raises(ShapeError, match="no op 'conv'"):
        g.op("conv", x)
    with pytest.raises(ShapeError, match="declared twice"):
        g.weight("embed", (32, 9))
    assert [n.op for n in g.graph.nodes] == ["embed"]


def test_views_keep_the_base_and_slices_keep_the_row_stride():
    g, x = builder()
    heads = g.view(x, ("T", 2, 4))
    tail = g.slice(heads, 2, 4)
    assert heads.view.strides == (8, 4, 1)
    assert tail.shape == ("T", 2, 2)
    assert (tail.view.base, tail.view.offset, tail.view.strides) == (x.name, 2, (8, 4, 1))
    assert g.graph.base(tail.name).name == x.name
    with pytest.raises(ShapeError, match="strided slice"):
        g.view(tail, ("T", 4))
    with pytest.raises(ShapeError, match="cannot be viewed"):
        g.view(x, ("T", 3, 3))
    with pytest.raises(ShapeError, match="slice 2:9"):
        g.slice(x, 2, 9)


def test_verify_finds_a_value_that_is_used_before_it_is_made():
    g, x = builder()
    y = g.add(x, x)
    g.mul(y, x)
    graph = g.build(y)
    graph.nodes.reverse()
    with pytest.raises(ShapeError, match=r"node 0 \(mul\): input .* is used before it is made"):
        graph.verify()


def test_attention_checks_heads_slopes_and_value_width():
    g, x = builder()
    cache = g.kv_cache("kv.0", 2, 4, 4)
    latent = g.kv_cache("kv.1", 1, 4, 0)
    q = g.view(x, ("T", 2, 4))
    assert g.attention(q, cache, scale=0.5).shape == ("T", 2, 4)
    assert g.attention(q, latent, scale=0.5, value_dim=3).shape == ("T", 2, 3)
    with pytest.raises(ShapeError, match="value_dim"):
        g.attention(q, latent, scale=0.5)
    with pytest.raises(ShapeError, match="sinks and slopes"):
        g.attention(q, cache, scale=0.5, sinks=g.const("s", np.zeros(3, np.float32)))
    with pytest.raises(ShapeError, match="chunk > 0"):
        g.attention(q, cache, scale=0.5, mask="chunk")


def test_tags_nest_and_constants_must_agree():
    g, x = builder()
    with g.tag(layer=3):
        with g.tag(role="attn"):
            g.add(x, x)
        g.add(x, x)
    assert [n.tags for n in g.graph.nodes[1:]] == [{"layer": 3, "role": "attn"}, {"layer": 3}]
    g.const("c", np.ones(2))
    with pytest.raises(ShapeError, match="different contents"):
        g.const("c", np.zeros(2))


def test_attention_and_kv_write_need_a_cache_and_only_the_values_that_it_holds():
    g, x = builder()
    heads = g.view(x, ("T", 2, 4))
    cache, latent = g.kv_cache("kv.0", 2, 4, 4), g.kv_cache("kv.1", 2, 4, 0)
    with pytest.raises(ShapeError, match="'attention' needs a key/value cache"):
        g.attention(heads, x, scale=0.5)
    with pytest.raises(ShapeError, match="'kv_write' needs a key/value cache"):
        g.kv_write(g.slot_state("s", (4,)), heads, heads)
    with pytest.raises(ShapeError, match="'kv_write' needs key and value"):
        g.kv_write(latent, heads, heads)
    with pytest.raises(ShapeError, match="only where the cache holds no values"):
        g.attention(heads, cache, scale=0.5, value_dim=4)
    g.kv_write(latent, heads, None)
    step = [g.input(n) for n in ("positions", "query_start", "context_len", "block_table")]
    with pytest.raises(ShapeError, match="prefix_len with mask 'prefix'"):
        g.op("attention", heads, cache, *step, scale=0.5, mask="prefix")


def test_outputs_are_made_by_nodes_and_weights_have_no_views():
    g, x = builder()
    with pytest.raises(ShapeError, match="'embed' \\(weight\\) has no views"):
        g.slice(g.weight("embed", (32, 8)), 0, 4)
    for wrong in (g.slice(x, 0, 4), g.input("ids")):
        with pytest.raises(ShapeError, match="is not made by a node"):
            g.build(wrong)
    graph = g.build(g.add(x, x))
    graph.nodes.append(graph.nodes[-1])
    with pytest.raises(ShapeError, match="exists already"):
        graph.verify()


def test_verify_names_a_node_with_operands_or_results_that_do_not_exist():
    g, x = builder()
    graph = g.build(g.add(x, x))
    node = graph.nodes[1]
    for broken, message in (
        (replace(node, inputs=("nothing", x.name)), "input 'nothing' is used before"),
        (replace(node, inputs=(x.name,)), "1 inputs; the op has x, y"),
        (replace(node, outputs=(*node.outputs, "more")), "the op gives 1 of the graph's values"),
        (replace(node, outputs=("nothing",)), "the op gives 1 of the graph's values"),
    ):
        graph.nodes[1] = broken
        with pytest.raises(ShapeError, match=message):
            graph.verify()
