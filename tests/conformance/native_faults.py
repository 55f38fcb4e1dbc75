"""Faults that `test_native_mutants.py` plants into the C of `cpu_avx`; `make_docs.py` writes the table of the page on conformance from here."""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("baseline", "avx2", "avx512")
"""Those that are planted as machine code; `amx` in emulation of its instructions."""


@dataclass(frozen=True)
class Fault:
    """variants: that it is planted into, those whose machine code differs there; file: below `native`; text, instead: what becomes what;
    cases: that must fail, by the rule `bound`."""

    name: str
    what: str
    variants: tuple[str, ...]
    file: str
    text: str
    instead: str
    cases: tuple[str, ...]


FAULTS = (
    Fault(
        "wrong_tail", "the last element of a row is not scaled where 8 do not divide it", ALL, "kernels/rows.c",
        "for (; k < C; k++) {\n                float v = p[k] * scale;", "for (; k + 1 < C; k++) {\n                float v = p[k] * scale;",
        ("rms_norm/f32/row/m3-n33/*#bound",),
    ),
    Fault(
        "unread_last_block", "a last block of keys that is not full is not read", ALL, "kernels/attention.c",
        "if (v.hi < v.lo) v.hi = v.lo;\n    return v;", "if (v.hi > 16) v.hi -= v.hi % 16;\n    if (v.hi < v.lo) v.hi = v.lo;\n    return v;",
        ("attention/f32/row/l17-b16/needle#bound",),
    ),
    Fault(
        "lost_tail_of_channels", "channels behind the last whole vector are left out", ALL, "kernels/recurrent.c",
        "for (int v = 0; v < VECTORS && 8 * v < n; v++) {", "for (int v = 0; v < VECTORS && 8 * v + 7 < n; v++) {",
        ("short_conv/f32/gap/l5_3-c33-k3/gap#bound",),
    ),
    Fault(
        "state_that_has_not_faded", "what is read of the state has not faded", ALL, "kernels/recurrent.c",
        "(wide_value(even[j]) + wide_value(odd[j])) * decay) * share;", "(wide_value(even[j]) + wide_value(odd[j]))) * share;",
        ("delta_rule/f32/row/l17-j1-h2-d16_16/forgets#bound",),
    ),
    Fault(
        "stale_scale", "activations take the scale of the group before", ("baseline",), "kernels/linear.c",
        "g->scale = amax / 127.0f;", "static _Thread_local float before = 1.0f; g->scale = before; before = amax / 127.0f;",
        ("linear/f32*q8_0/row/m17-*#bound",),
    ),
    # no instruction waits for the one before it, and thread 1 begins only when thread 0 is through: the race is lost with certainty
    Fault(
        "missing_barrier", "no instruction waits for the one before it", ("baseline",), "program.c",
        "if (ins->barrier & mask) fl_pool_barrier(pool);\n        double start = timed ? now() : 0.0;\n        execute(p, ins, thread, threads, scratch);",
        """static _Atomic long ahead;
        static long behind;
        if (thread == 1 && ins == p->code)
            for (behind += p->n_code; ahead < behind;) nanosleep(&(struct timespec){0, 1000000}, NULL);
        (void)mask, (void)pool;
        double start = timed ? now() : 0.0;
        execute(p, ins, thread, threads, scratch);
        if (thread == 0) ahead++;""",
        ("linear/f32*q8_0/row/m8-n127-*#bound",),
    ),
    Fault(
        "stale_scale_of_panels", "rows of a panel take the scale of the group before", ALL, "kernels/linear_rows.c",
        "memcpy(to, &g->scale, 4);", "memcpy(to, &g[-(t > 0)].scale, 4);",
        ("linear/f32*q4_0/row/m64-*#bound",),
    ),
    Fault(
        "odd_k_of_bf16", "the last of an odd number of bf16 products is left out", ("avx512",), "kernels/linear_bf16.c",
        "const int end = w->K - k0 < BLOCK ? w->K : k0 + BLOCK;", "const int end = w->K - k0 < BLOCK ? w->K & ~1 : k0 + BLOCK;",
        ("linear/f32*bf16/row/m3-n4096-k33/sparse*#bound",),
    ),
    Fault(
        "odd_token_of_bf16", "the last of an odd number of tokens is left out", ("avx512",), "kernels/attention_pairs.c",
        "for (int32_t j = from, end; j < to; j = end) {", "for (int32_t j = from, end; j < to / 2 * 2; j = end) {",
        ("attention/f32/row/l17-b16/needle#bound",),
    ),
    Fault(
        "first_lanes_of_up", "sixteen lanes of silu take the first sixteen elements of the other operand", ("avx512",), "kernels/elementwise.c",
        "y + c, gated_wide(kind, loadw(g + c), u ? u + c : NULL)", "y + c, gated_wide(kind, loadw(g + c), u ? u + c0 : NULL)",
        ("act_mul/f32/row/m2-n1000/silu.gated#bound",),
    ),
    Fault(
        "stale_scale_of_keys", "int8 keys take the scale of the group of channels before", ("avx512",), "kernels/attention_pairs.c",
        "_mm512_loadu_ps(scale + group * SROW + column + 16 * v)", "_mm512_loadu_ps(scale + (group - (group > 0)) * SROW + column + 16 * v)",
        ("attention/int8/row/l70-h4_2-d128_96-b32/wide#bound",),
    ),
    Fault(
        "unseen_half_of_a_pair", "of a pair of tokens the one that is not there is read, too", ("avx512",), "kernels/attention_pairs.c",
        "const int32_t mask = !alone ? ALL : odd ? (int32_t)0xffff0000 : 0xffff;", "const int32_t mask = ALL;",
        ("attention/f32/row/*/gqa8#bound",),
    ),
    Fault(
        "last_channels_of_values", "channels of values behind the last 32 are left out", ("avx512",), "kernels/attention_pairs.c",
        "for (; c < c1; c += 16) values_n(Q, 1,", "for (; c + 16 < c1; c += 16) values_n(Q, 1,",
        ("attention/f32/row/*/gqa5#bound",),
    ),
    Fault(
        "stale_scale_of_tiles", "outputs of a tile take the scale of the group before", ("amx",), "kernels/linear_tiles.c",
        ".sw = c->sw[g],", ".sw = c->sw[g ? g - 1 : 0],",
        ("linear/f32*q4_0/row/m64-*#bound",),
    ),
    Fault(
        "last_k_of_bf16_tiles", "the last of an even number of bf16 products is left out", ("amx",), "kernels/linear_tiles.c",
        "2 * i + 1 < depth ? p + 128 * i + 64 : none", "2 * i + 2 < depth ? p + 128 * i + 64 : none",
        ("linear/f32*bf16/row/m17-n31-k256/sparse*#bound",),
    ),
)  # fmt: skip
