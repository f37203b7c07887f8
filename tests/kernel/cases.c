/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks of kernel tables against the reference and against themselves.
 */
#include "cases.h"

#include "rule.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

/* Random and nasty shapes. Small ones, since the reference is slow; sizes cross the tiles of every implementation. */
static const struct problem_options cases[] = {
    {.experts = 1, .hidden = 8, .inter = 8, .rows = 1, .k = 1},
    {.experts = 4, .hidden = 24, .inter = 100, .rows = 1, .k = 4, .bias = true, .activation = KERNEL_ACT_GPT_OSS},
    {.experts = 8, .hidden = 64, .inter = 96, .rows = 7, .k = 2, .adapters = 3, .rank = 16},
    {.experts = 8,
     .hidden = 100,
     .inter = 24,
     .rows = 33,
     .k = 3,
     .adapters = 2,
     .subset = true,
     .skipped = 4,
     .mixed_dtypes = true,
     .misaligned = true},
    {.experts = 5,
     .hidden = 33,
     .inter = 17,
     .rows = 19,
     .k = 0,
     .adapters = 4,
     .subset = true,
     .share_a = true,
     .skipped = 7,
     .bias = true,
     .activation = KERNEL_ACT_GELU,
     .mixed_dtypes = true,
     .misaligned = true,
     .filler = true},
    {.experts = 16,
     .hidden = 128,
     .inter = 64,
     .rows = 70,
     .k = 4,
     .spread = SPREAD_ONE,
     .adapters = 5,
     .activation = KERNEL_ACT_GELU_TANH},
    {.experts = 16, .hidden = 64, .inter = 40, .rows = 50, .k = 2, .spread = SPREAD_ENDS, .adapters = 2, .subset = true, .rank = 3},
    {.experts = 6,
     .hidden = 72,
     .inter = 56,
     .rows = 40,
     .k = 6,
     .spread = SPREAD_REPEATED,
     .adapters = 3,
     .share_a = true,
     .bias = true,
     .weight_on_input = true},
    {.experts = 3, .hidden = 48, .inter = 8, .rows = 12, .k = 2, .weight_on_input = true, .skipped = 2, .mixed_dtypes = true},
    {.experts = 64, .hidden = 160, .inter = 32, .rows = 9, .k = 8, .adapters = 4, .rank = 16},
    {.experts = 64, .hidden = 160, .inter = 32, .rows = 8, .k = 8, .adapters = 4, .rank = 16, .skipped = 2},
    {.experts = 2, .hidden = 320, .inter = 288, .rows = 64, .k = 1, .spread = SPREAD_ONE, .bias = true, .activation = KERNEL_ACT_GPT_OSS},
    {.experts = 7, .hidden = 40, .inter = 72, .rows = 11, .k = 1, .skipped = 1}, /* no slot is valid */
    /* So wide that one expert's rows don't fit a thread's scratch, and that they are too wide for tiles. */
    {.experts = 1, .hidden = 12000, .inter = 8, .rows = 37, .k = 1},
    {.experts = 2, .hidden = 20000, .inter = 8, .rows = 15, .k = 1, .spread = SPREAD_ONE, .adapters = 1, .rank = 1},
    /* As wide as models with few experts are: decode shares out a sum of that length among warps, beside adapters, too. */
    {.experts = 3, .hidden = 4160, .inter = 24, .rows = 11, .k = 2, .adapters = 3, .subset = true, .share_a = true, .skipped = 5},
    {.experts = 2, .hidden = 40, .inter = 4200, .rows = 21, .k = 2, .adapters = 3, .rank = 16, .bias = true},
    /* Few rows whose sums warps share out in teams, without adapters and with. */
    {.experts = 5, .hidden = 1040, .inter = 424, .rows = 5, .k = 2},
    {.experts = 5, .hidden = 424, .inter = 1040, .rows = 3, .k = 3, .adapters = 2, .rank = 24, .skipped = 2},
    {.experts = 2, .hidden = 1040, .inter = 16, .rows = 2, .k = 1, .adapters = 2, .rank = 24},
    /* The same, with some pairs for every warp and, on a small device, some left over. */
    {.experts = 3, .hidden = 1552, .inter = 168, .rows = 6, .k = 2, .adapters = 4, .rank = 40},
    /* More tiles than a small device takes at once, each longer than a ring of stages, with several stages of adapters. */
    {.experts = 6, .hidden = 448, .inter = 416, .rows = 60, .k = 2, .adapters = 9, .rank = 40, .subset = true},
    /* Short runs with ranks of several whole planes, in wide tiles and others. */
    {.experts = 3, .hidden = 264, .inter = 136, .rows = 50, .k = 2, .adapters = 9, .rank = 64, .skipped = 5},
    {.experts = 1, .hidden = 72, .inter = 136, .rows = 200, .k = 1, .adapters = 21, .rank = 48},
    /* An expert's rows just more than one tile takes, and just fewer than the widest; two chunks of them beside many tiles of weights. */
    {.experts = 2, .hidden = 72, .inter = 40, .rows = 275, .k = 1, .spread = SPREAD_ONE, .adapters = 3, .rank = 16},
    {.experts = 2, .hidden = 64, .inter = 136, .rows = 139, .k = 1, .spread = SPREAD_ONE, .adapters = 2, .subset = true},
    {.experts = 1, .hidden = 8, .inter = 8300, .rows = 258, .k = 1},
    /* More slots than one block of threads sorts: with few pairs of expert and adapter, with more than it has counters for, and with more
     * slots than the products' blocks count for themselves. */
    {.experts = 9, .hidden = 24, .inter = 16, .rows = 530, .k = 2, .adapters = 3, .rank = 4, .skipped = 5},
    {.experts = 4, .hidden = 8, .inter = 8, .rows = 515, .k = 2, .adapters = 1300, .rank = 1},
    {.experts = 40, .hidden = 8, .inter = 8, .rows = 700, .k = 6, .spread = SPREAD_ENDS},
};

#define CASES (sizeof cases / sizeof cases[0])

/* Of the environment: KERNEL_CASE, the only one to run; KERNEL_PART, as "2/4": every fourth, from the third on; KERNEL_ADAPTERS, the most that
 * a case may have. */
static bool left_out(size_t i)
{
    const char *only = getenv("KERNEL_CASE"), *part = getenv("KERNEL_PART"), *adapters = getenv("KERNEL_ADAPTERS");
    unsigned which, parts;
    if (part && sscanf(part, "%u/%u", &which, &parts) == 2 && parts > 0 && i % parts != which)
        return true;
    return (only && (size_t)atoi(only) != i) || (adapters && cases[i].adapters > atoi(adapters));
}

/* KERNEL_HALVES, of the environment: for emulated devices and instrumented code, which take minutes for everything. A case then has half of the
 * combinations of operand type and path in each test, those of cases_check_steps and cases_check_forward being the two operand types. */
static bool other_half(size_t i) { return getenv("KERNEL_HALVES") && i % 2; }

static const enum kernel_path paths[] = {KERNEL_DECODE, KERNEL_PREFILL};

static struct problem *make_case(size_t i, enum dtype op)
{
    struct problem_options o = cases[i];
    o.op = op;
    o.seed = (uint32_t)i + 1;
    return problem_create(&o);
}

static struct body_target reference(void) { return (struct body_target){kernels_ref(), NULL, &body_host_memory}; }

/* One step of the operand type at `v`. */
static float ulp(enum dtype op, float v) { return fmaxf(fabsf(v), 0x1p-14f) * (op == DTYPE_BF16 ? 0x1p-7f : 0x1p-10f); }

/* Values that were rounded to `op` from sums which differ in order only: seldom and never by more than a step. */
static void check_close(const char *what, enum dtype op, const float *got, const float *want, size_t n)
{
    double error = 0, norm = 0;
    float scale = 0;
    for (size_t i = 0; i < n; i++)
        if (isfinite(want[i]))
            scale = fmaxf(scale, fabsf(want[i]));
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(want[i])) {
            if (isfinite(got[i]))
                fail_msg("%s: element %zu is %g, reference %g", what, i, got[i], want[i]);
            continue;
        }
        float diff = fabsf(got[i] - want[i]);
        if (!(diff <= 1.01f * ulp(op, want[i]) + 1e-5f * scale))
            fail_msg("%s: element %zu is %.9g, reference %.9g", what, i, got[i], want[i]);
        error += (double)diff * diff;
        norm += (double)want[i] * want[i];
    }
    /* With few elements one step of one of them is over the limit already. */
    if (n >= 256 && error > 1e-6 * norm)
        fail_msg("%s: relative error %.3g", what, sqrt(error / norm));
}

static void check_routing(struct body *got, struct body *want)
{
    struct body_routing g, w;
    body_routing_get(got, &g);
    body_routing_get(want, &w);
    assert_int_equal(g.valid, w.valid);
    assert_int_equal(g.segments, w.segments);
    int32_t top = 0;
    while (g.expert_offset[top] < w.valid || w.expert_offset[top] < w.valid)
        top++;
    assert_memory_equal(g.expert_offset, w.expert_offset, (size_t)(top + 1) * 4);
    assert_memory_equal(g.order, w.order, (size_t)w.valid * 4);
    assert_memory_equal(g.begin, w.begin, ((size_t)w.segments + 1) * 4);
    assert_memory_equal(g.expert, w.expert, (size_t)w.segments * 4);
    assert_memory_equal(g.adapter, w.adapter, (size_t)w.segments * 4);
    body_routing_finish(&g);
    body_routing_finish(&w);
}

/* Only ranks of adapted positions are written; the reference's poison shows which. */
static void check_shrink(const char *what, struct body *got, struct body *want, enum dtype op, enum body_array array)
{
    int32_t rows, width;
    float *g = body_get(got, array, &rows, &width), *w = body_get(want, array, &rows, &width);
    for (int32_t i = 0; i < rows; i++) {
        int32_t n = 0;
        while (n < width && !isnan(w[(size_t)i * (size_t)width + (size_t)n]))
            n++;
        check_close(what, op, g + (size_t)i * (size_t)width, w + (size_t)i * (size_t)width, (size_t)n);
    }
    body_put(got, array, w, rows, width);
    free(g);
    free(w);
}

static void check_array(const char *what, struct body *got, struct body *want, enum dtype op, enum body_array array)
{
    int32_t rows, width;
    float *g = body_get(got, array, &rows, &width), *w = body_get(want, array, &rows, &width);
    check_close(what, op, g, w, (size_t)rows * (size_t)width);
    body_put(got, array, w, rows, width);
    free(g);
    free(w);
}

/* Row `t` of both outputs, as floats: at most `limit` apart in relative norm. Where sums differ in order only, an element may round to
 * the next of its type: with `steps` that counts for nothing. */
static void check_row(const char *what, const struct problem *p, int32_t t, const char *got, const char *want, bool steps, double limit)
{
    const struct kernel_row *row = &p->row[t];
    double error = 0, norm = 0;
    for (int32_t i = 0; i < p->o.hidden && row->out != UINT64_MAX; i++) {
        size_t at = row->out + (size_t)i * dtype_size((enum dtype)row->dtype);
        float g = dtype_load_f32(got + at, (enum dtype)row->dtype), w = dtype_load_f32(want + at, (enum dtype)row->dtype);
        if (!isfinite(w)) {
            if (isfinite(g))
                fail_msg("%s: row %d element %d is %g, reference %g", what, t, i, g, w);
            continue;
        }
        if (!isfinite(g))
            fail_msg("%s: row %d element %d is %g, reference %g", what, t, i, g, w);
        norm += (double)w * w;
        if (!steps || !(fabsf(g - w) <= 1.01f * (row->dtype == DTYPE_FP32 ? 0x1p-20f * fabsf(w) : ulp((enum dtype)row->dtype, w))))
            error += ((double)g - w) * ((double)g - w);
    }
    if (error > limit * limit * norm)
        fail_msg("%s: row %d differs by %.3g", what, t, sqrt(error / norm));
}

/* Bytes that belong to no row stay as they were. */
static void check_untouched(const struct problem *p, const char *out)
{
    char *mine = problem_alloc(p->io_bytes);
    for (int32_t t = 0; t < p->o.rows; t++)
        if (p->row[t].out != UINT64_MAX)
            memset(mine + p->row[t].out, 1, (size_t)p->o.hidden * dtype_size((enum dtype)p->row[t].dtype));
    for (size_t i = 0; i < p->io_bytes; i++)
        if (!mine[i] && (unsigned char)out[i] != 0xff)
            fail_msg("output byte %zu lies outside all rows and was written", i);
    free(mine);
}

static void check_steps(const struct body_target *target, const struct problem *p, enum kernel_path path)
{
    struct body_target ref = reference();
    struct body *got = body_create(target, p), *want = body_create(&ref, p);
    body_set_batch(got, p, path, true);
    body_set_batch(want, p, path, true);
    for (enum body_step s = BODY_ENTER; s < BODY_STEPS; s++) {
        const char *name = body_step_name[s];
        bool shrink = s == BODY_SHRINK_GATE_UP || s == BODY_SHRINK_DOWN;
        if (shrink && !p->o.adapters)
            continue;
        body_step(want, s);
        body_step(got, s);
        /* The arrays' lengths come from the routing, so x waits for it. */
        if (s == BODY_ROUTE) {
            check_routing(got, want);
            check_array("enter", got, want, p->o.op, BODY_X);
        } else if (s == BODY_SHRINK_GATE_UP) {
            check_shrink(name, got, want, p->o.op, BODY_S_GATE);
            check_shrink(name, got, want, p->o.op, BODY_S_UP);
        } else if (s == BODY_SHRINK_DOWN) {
            check_shrink(name, got, want, p->o.op, BODY_S_DOWN);
        } else if (s == BODY_GATE_UP || s == BODY_DOWN) {
            check_array(name, got, want, p->o.op, s == BODY_GATE_UP ? BODY_H : BODY_Y);
        }
    }
    char *g = body_output(got), *w = body_output(want);
    for (int32_t t = 0; t < p->o.rows; t++)
        check_row("combine", p, t, g, w, true, 1e-4);
    check_untouched(p, g);
    free(g);
    free(w);
    body_destroy(got);
    body_destroy(want);
}

void cases_check_steps(const struct body_target *target)
{
    for (size_t i = 0; i < 2 * CASES; i++) {
        if (left_out(i / 2) || other_half(i / 2 + i))
            continue;
        struct problem *p = make_case(i / 2, i % 2 ? DTYPE_FP16 : DTYPE_BF16);
        for (size_t j = 0; j < 2; j++) {
            print_message("    case %zu %s %s\n", i / 2, dtype_name(p->o.op), j ? "prefill" : "decode");
            check_steps(target, p, paths[j]);
        }
        problem_destroy(p);
    }
}

static char *run(struct body *b, const struct problem *p, enum kernel_path path, bool adapters)
{
    body_set_batch(b, p, path, adapters);
    body_run(b);
    return body_output(b);
}

/* The roundings on the way and at the end make elements differ: a row of few can't average that, where one may be most of the row, and one
 * step of the s of an adapter of rank 1 moves all of its row. */
static double row_limit(const struct problem *p, int32_t t)
{
    const bool bf16 = p->o.op == DTYPE_BF16 || p->row[t].dtype == DTYPE_BF16;
    if (p->o.hidden < 64)
        return bf16 ? 8e-3 : 4e-3;
    return bf16 ? 4e-3 : 1e-3;
}

/* All rows together must stay below the promised 1e-3, unless there are too few elements to say, or so few rows that one step of one s of
 * an adapter shows (three rows of rank 24: 1.8e-3, where an s lies between two values and the tensor cores truncate). */
static void check_whole(const char *what, const struct problem *p, const char *got, const char *want)
{
    double error = 0, norm = 0;
    for (int32_t t = 0; t < p->o.rows; t++) {
        const struct kernel_row *row = &p->row[t];
        for (int32_t i = 0; i < p->o.hidden && row->out != UINT64_MAX; i++) {
            size_t at = row->out + (size_t)i * dtype_size((enum dtype)row->dtype);
            double g = dtype_load_f32(got + at, (enum dtype)row->dtype), w = dtype_load_f32(want + at, (enum dtype)row->dtype);
            error += (g - w) * (g - w);
            norm += w * w;
        }
        check_row(what, p, t, got, want, false, row_limit(p, t));
    }
    if (p->o.rows * p->o.hidden >= 1000 && (p->o.rows >= 8 || p->o.adapters == 0) && error > 1e-6 * norm)
        fail_msg("%s: relative error %.3g", what, sqrt(error / norm));
}

void cases_check_forward(const struct body_target *target)
{
    struct body_target ref = reference();
    for (size_t i = 0; i < 2 * CASES; i++) {
        if (left_out(i / 2) || other_half(i / 2 + i + 1))
            continue;
        struct problem *p = make_case(i / 2, i % 2 ? DTYPE_FP16 : DTYPE_BF16);
        struct body *got = body_create(target, p), *want = body_create(&ref, p);
        char *w = run(want, p, KERNEL_DECODE, true), *d = run(got, p, KERNEL_DECODE, true), *f = run(got, p, KERNEL_PREFILL, true);
        print_message("    case %zu %s\n", i / 2, dtype_name(p->o.op));
        check_whole("decode against the reference", p, d, w);
        check_whole("prefill against the reference", p, f, w);
        check_whole("prefill against decode", p, f, d);
        check_untouched(p, d);
        char *again = run(got, p, KERNEL_PREFILL, true);
        assert_memory_equal(again, f, p->io_bytes);
        free(again);
        free(w);
        free(d);
        free(f);
        body_destroy(got);
        body_destroy(want);
        problem_destroy(p);
    }
}

void cases_check_rule(const struct body_target *target)
{
    static const struct problem_options shapes[] = {
        {.rank = 16},
        {.rank = 5, .activation = KERNEL_ACT_GELU, .bias = true},
        {.rank = 8, .activation = KERNEL_ACT_GELU_TANH, .share_a = true},
        {.rank = 9, .activation = KERNEL_ACT_GPT_OSS, .bias = true, .subset = true},
        {.rank = 16, .weight_on_input = true, .skipped = 5},
    };
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof shapes[0]); i++) {
        struct problem_options o = shapes[i / 2];
        o.experts = 4, o.hidden = 64, o.inter = 96, o.rows = 42, o.k = 2, o.adapters = 2, o.mixed_dtypes = true, o.seed = (uint32_t)i + 1;
        o.op = i % 2 ? DTYPE_FP16 : DTYPE_BF16;
        struct problem *p = problem_create(&o);
        /* Some rows are so large that clamps count. */
        for (int32_t t = 0; t < o.rows; t += 4)
            for (int32_t j = 0; j < o.hidden; j++) {
                size_t at = p->row[t].in + (size_t)j * dtype_size((enum dtype)p->row[t].dtype);
                problem_poke(p, t, j, 5 * dtype_load_f32(p->input + at, (enum dtype)p->row[t].dtype));
            }
        double *want = rule_forward(p);
        struct body *b = body_create(target, p);
        for (size_t j = 0; j < 2; j++) {
            char *out = run(b, p, paths[j], true);
            int32_t off = 0, n = o.rows * o.hidden;
            for (int32_t at = 0; at < n; at++) {
                const struct kernel_row *row = &p->row[at / o.hidden];
                enum dtype d = (enum dtype)row->dtype;
                double got = dtype_load_f32(out + row->out + (size_t)(at % o.hidden) * dtype_size(d), d);
                off += !(fabs(got - want[at]) <= 1e-5 * fabs(want[at]));
            }
            /* Sums near the middle between two operands may go either way. Another rounding, or one less, moves every third element. */
            if (off > n / 8)
                fail_msg("case %zu %s %s: %d of %d elements are not what the rule gives", i / 2, dtype_name(o.op), j ? "prefill" : "decode",
                         off, n);
            print_message("    case %zu %s %s: %d of %d differ\n", i / 2, dtype_name(o.op), j ? "prefill" : "decode", off, n);
            free(out);
        }
        free(want);
        body_destroy(b);
        problem_destroy(p);
    }
}

static void check_same_row(const char *what, const struct problem *p, int32_t t, const char *got, const char *want)
{
    const struct kernel_row *row = &p->row[t];
    if (row->out != UINT64_MAX && memcmp(got + row->out, want + row->out, (size_t)p->o.hidden * dtype_size((enum dtype)row->dtype)))
        fail_msg("%s: the bits of row %d differ", what, t);
}

/* Runs the listed rows by themselves and compares each with its bits in `whole`. */
static void check_part(const char *what, struct body *b, const struct problem *p, const int32_t *rows, int32_t count, enum kernel_path path,
                       const char *whole)
{
    struct problem *part = problem_select(p, rows, count);
    char *out = run(b, part, path, true);
    for (int32_t i = 0; i < count; i++)
        check_same_row(what, p, rows[i], out, whole);
    free(out);
    problem_select_destroy(part);
}

void cases_check_company(const struct body_target *target)
{
    for (size_t i = 0; i < 4 * CASES; i++) {
        if (left_out(i / 4) || other_half(i / 4 + i / 2 + i))
            continue;
        struct problem *p = make_case(i / 4, i / 2 % 2 ? DTYPE_FP16 : DTYPE_BF16);
        enum kernel_path path = paths[i % 2];
        struct body *b = body_create(target, p);
        char *whole = run(b, p, path, true);
        int32_t *row = problem_alloc((size_t)p->o.rows * sizeof *row);
        for (int32_t t = 0; t < p->o.rows; t++)
            check_part("alone", b, p, &t, 1, path, whole);
        for (int32_t t = 0; t < p->o.rows; t++)
            row[t] = p->o.rows - 1 - t;
        check_part("reversed", b, p, row, p->o.rows, path, whole);
        for (int32_t window = 3; window < 40; window += 17)
            for (int32_t t = 0; t < p->o.rows; t += window) {
                int32_t n = 0;
                for (; n < window && t + n < p->o.rows; n++)
                    row[n] = t + n;
                check_part("in windows", b, p, row, n, path, whole);
            }
        free(row);
        free(whole);
        body_destroy(b);
        problem_destroy(p);
    }
}

void cases_check_base(const struct body_target *target)
{
    for (size_t i = 0; i < 2 * CASES; i++) {
        if (left_out(i / 2) || other_half(i / 2 + i))
            continue;
        struct problem *p = make_case(i / 2, DTYPE_BF16);
        struct body *b = body_create(target, p);
        char *with = run(b, p, paths[i % 2], true), *without = run(b, p, paths[i % 2], false);
        for (int32_t t = 0; t < p->o.rows; t++)
            if (p->row[t].adapter < 0)
                check_same_row("without adapters", p, t, without, with);
        free(with);
        free(without);
        body_destroy(b);
        problem_destroy(p);
    }
}

/* `forwards` at once, the last with adapters, then the output's bits. */
static void check_row_of_forwards(struct body *b, const struct problem *p, enum kernel_path path, int forwards, const char *want)
{
    body_set_batch(b, p, path, true);
    for (int n = 0; n < forwards; n++) {
        body_set_adapters(b, (forwards - n) % 2);
        body_launch(b);
    }
    body_wait(b);
    char *out = body_output(b);
    for (int32_t t = 0; t < p->o.rows; t++)
        check_same_row("after others", p, t, out, want);
    free(out);
}

static char *run_stepwise(struct body *b, const struct problem *p, enum kernel_path path)
{
    body_set_batch(b, p, path, true);
    for (enum body_step s = BODY_ENTER; s < BODY_STEPS; s++)
        if (p->o.adapters || (s != BODY_SHRINK_GATE_UP && s != BODY_SHRINK_DOWN))
            body_step(b, s);
    return body_output(b);
}

void cases_check_stream(const struct body_target *target)
{
    for (size_t i = 0; i < CASES; i++) {
        if (left_out(i))
            continue;
        struct problem *p = make_case(i, i % 2 ? DTYPE_FP16 : DTYPE_BF16);
        struct body *b = body_create(target, p);
        for (size_t j = 0; j < 2; j++) {
            if (other_half(i / 2 + j))
                continue;
            char *want = run_stepwise(b, p, paths[j]);
            for (int forwards = 1; forwards <= 4; forwards += 3)
                check_row_of_forwards(b, p, paths[j], forwards, want);
            free(want);
        }
        body_destroy(b);
        problem_destroy(p);
    }
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

void cases_soak(const struct body_target *target, double seconds)
{
    static const struct problem_options shapes[] = {
        {.experts = 8, .hidden = 4096, .inter = 1024, .rows = 8, .k = 2, .adapters = 8, .rank = 16, .seed = 1},
        {.experts = 64, .hidden = 1024, .inter = 512, .rows = 300, .k = 8, .adapters = 8, .rank = 16, .seed = 2},
        {.experts = 16, .hidden = 512, .inter = 768, .rows = 64, .k = 4, .adapters = 6, .subset = true, .skipped = 9, .seed = 3},
    };
    enum { SHAPES = sizeof shapes / sizeof shapes[0] };
    struct problem *problem[SHAPES];
    struct body *body[SHAPES];
    char *want[SHAPES][2];
    for (int i = 0; i < SHAPES; i++) {
        struct problem_options o = shapes[i];
        o.op = i % 2 ? DTYPE_FP16 : DTYPE_BF16;
        problem[i] = problem_create(&o);
        body[i] = body_create(target, problem[i]);
        for (int j = 0; j < 2; j++)
            want[i][j] = run_stepwise(body[i], problem[i], paths[j]);
    }
    long rounds = 0;
    for (double end = now_us() + 1e6 * seconds; now_us() < end; rounds++)
        for (int i = 0; i < SHAPES; i++)
            for (int j = 0; j < 2; j++)
                check_row_of_forwards(body[i], problem[i], paths[j], 1 + (int)(rounds % 5), want[i][j]);
    print_message("    %ld rounds of %d shapes on both paths\n", rounds, SHAPES);
    for (int i = 0; i < SHAPES; i++) {
        for (int j = 0; j < 2; j++)
            free(want[i][j]);
        body_destroy(body[i]);
        problem_destroy(problem[i]);
    }
}

void cases_check_sums(const struct body_target *target)
{
    const struct problem_options o = {.experts = 3,
                                      .hidden = 128,
                                      .inter = 64,
                                      .op = DTYPE_BF16,
                                      .rows = 45,
                                      .k = 2,
                                      .adapters = 1,
                                      .rank = 8,
                                      .mixed_dtypes = true,
                                      .cancelling = true,
                                      .seed = 1};
    struct problem *p = problem_create(&o);
    struct body *b = body_create(target, p);
    int32_t row[45];
    for (size_t j = 0; j < 2; j++) {
        char *with = run(b, p, paths[j], true), *without = run(b, p, paths[j], false);
        for (int32_t n = 1; n < o.rows; n = 2 * n + 1)
            for (int32_t t = 0; t + n <= o.rows; t += n) {
                for (int32_t i = 0; i < n; i++)
                    row[i] = t + i;
                check_part("sums", b, p, row, n, paths[j], with);
            }
        int32_t base = 0;
        for (int32_t t = 0; t < o.rows; t++)
            if (p->row[t].adapter < 0) {
                check_same_row("sums without adapters", p, t, without, with);
                base++;
            }
        assert_true(base > 10);
        free(with);
        free(without);
    }
    body_destroy(b);
    problem_destroy(p);
}

void cases_check_nan(const struct body_target *target)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, 3e38f};
    struct body_target ref = reference();
    for (size_t i = 0; i < 2 * CASES; i++) {
        if (left_out(i / 2) || other_half(i / 2 + i + 1))
            continue;
        struct problem *p = make_case(i / 2, DTYPE_BF16);
        enum kernel_path path = paths[i % 2];
        struct body *b = body_create(target, p), *r = body_create(&ref, p);
        char *clean = run(b, p, path, true);
        for (int32_t t = 0; t < p->o.rows; t += 3)
            for (int32_t j = 0; j <= t % 2 && p->row[t].in != UINT64_MAX; j++)
                problem_poke(p, t, (t * 7 + j * 5) % p->o.hidden, bad[t / 3 % 4]);
        char *dirty = run(b, p, path, true), *want = run(r, p, path, true);
        for (int32_t t = 0; t < p->o.rows; t++) {
            bool some = false; /* a slot that counts */
            for (int32_t s = p->row[t].first_slot; s < p->row[t].first_slot + p->row[t].slots; s++)
                some = some || p->slot_expert[s] >= 0;
            if (t % 3 || !some) {
                check_same_row("beside NaN", p, t, dirty, clean);
                continue;
            }
            for (int32_t k = 0; k < p->o.hidden && t / 3 % 4 < 3; k++) {
                enum dtype d = (enum dtype)p->row[t].dtype;
                size_t at = p->row[t].out + (size_t)k * dtype_size(d);
                float got = dtype_load_f32(dirty + at, d), exact = dtype_load_f32(want + at, d);
                if (isfinite(got) != isfinite(exact) || (t / 3 % 4 == 0 && !isnan(got)))
                    fail_msg("row %d element %d became %g, reference %g", t, k, got, exact);
            }
        }
        free(clean);
        free(dirty);
        free(want);
        body_destroy(b);
        body_destroy(r);
        problem_destroy(p);
    }
}

void cases_check_order(const struct body_target *target)
{
    /* Summed from left to right these give 1, in any other order 0: fp32 can't hold 2^27 + 1. */
    static const float terms[] = {0x1p27f, -0x1p27f, 1};
    struct problem_options o = {.experts = 3, .hidden = 40, .inter = 8, .rows = 4, .k = 3, .seed = 5};
    struct problem *p = problem_create(&o);
    for (int32_t s = 0; s < p->slots; s++)
        p->slot_weight[s] = 1;
    struct body *b = body_create(target, p);
    body_step(b, BODY_ENTER);
    body_step(b, BODY_ROUTE);
    struct body_routing r;
    body_routing_get(b, &r);
    float *y = problem_alloc((size_t)(p->slots * o.hidden) * sizeof *y);
    for (int32_t s = 0; s < p->slots; s++)
        for (int32_t i = 0; i < o.hidden; i++)
            y[r.position[s] * o.hidden + i] = terms[s % 3];
    body_put(b, BODY_Y, y, p->slots, o.hidden);
    body_step(b, BODY_COMBINE);
    char *out = body_output(b);
    for (int32_t t = 0; t < o.rows; t++)
        for (int32_t i = 0; i < o.hidden; i++)
            if (dtype_load_f32(out + p->row[t].out + (size_t)i * 2, DTYPE_BF16) != 1)
                fail_msg("row %d element %d was not summed in slot order", t, i);
    free(out);
    free(y);
    body_routing_finish(&r);
    body_destroy(b);
    problem_destroy(p);
}

void cases_check_same(const struct body_target *target, const struct body_target *other)
{
    for (size_t i = 0; i < 4 * CASES; i++) {
        if (left_out(i / 4) || other_half(i / 4 + i / 2 + i + 1))
            continue;
        struct problem *p = make_case(i / 4, i / 2 % 2 ? DTYPE_FP16 : DTYPE_BF16);
        struct body *a = body_create(target, p), *b = body_create(other, p);
        char *one = run(a, p, paths[i % 2], true), *two = run(b, p, paths[i % 2], true);
        assert_memory_equal(one, two, p->io_bytes);
        free(one);
        free(two);
        body_destroy(a);
        body_destroy(b);
        problem_destroy(p);
    }
}

void cases_check_large(const struct body_target *target)
{
    static const struct problem_options large[] = {
        /* Several tiles of rows of one expert, several runs of adapters in each. */
        {.experts = 3, .hidden = 192, .inter = 320, .op = DTYPE_BF16, .rows = 700, .k = 2, .adapters = 6, .rank = 16, .seed = 1},
        {.experts = 2,
         .hidden = 136,
         .inter = 200,
         .op = DTYPE_FP16,
         .rows = 333,
         .k = 1,
         .adapters = 3,
         .share_a = true,
         .bias = true,
         .skipped = 9,
         .activation = KERNEL_ACT_GPT_OSS,
         .seed = 2},
        /* Few rows an expert, but more slots than one block of threads sorts. */
        {.experts = 70,
         .hidden = 24,
         .inter = 16,
         .op = DTYPE_BF16,
         .rows = 1500,
         .k = 4,
         .adapters = 9,
         .subset = true,
         .rank = 8,
         .skipped = 5,
         .filler = true,
         .seed = 3},
        {.experts = 70, .hidden = 24, .inter = 16, .op = DTYPE_BF16, .rows = 1500, .k = 4, .spread = SPREAD_ENDS, .seed = 4},
    };
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        struct problem *p = problem_create(&large[i]);
        struct body *b = body_create(target, p);
        int32_t *row = problem_alloc((size_t)p->o.rows * sizeof *row);
        for (size_t j = 0; j < 2; j++) {
            print_message("    large %zu %s\n", i, j ? "prefill" : "decode");
            check_steps(target, p, paths[j]);
            char *whole = run(b, p, paths[j], true), *without = run(b, p, paths[j], false);
            for (int32_t t = 0; t < p->o.rows; t++)
                if (p->row[t].adapter < 0)
                    check_same_row("without adapters", p, t, without, whole);
            for (int32_t n = 1; n <= 300; n = n * 4 + 3) {
                for (int32_t t = 0; t < n; t++)
                    row[t] = (t * 7 + n) % p->o.rows;
                check_part("in company", b, p, row, n, paths[j], whole);
            }
            free(whole);
            free(without);
        }
        free(row);
        body_destroy(b);
        problem_destroy(p);
    }
}

void cases_bench(const struct body_target *target)
{
    static const struct problem_options shapes[] = {
        {.experts = 16, .hidden = 1024, .inter = 512, .rows = 1, .k = 8, .adapters = 2, .rank = 16, .seed = 1},
        {.experts = 16, .hidden = 1024, .inter = 512, .rows = 64, .k = 4, .adapters = 2, .rank = 16, .seed = 1},
    };
    enum { REPEATS = 9 };
    for (size_t i = 0; i < 2 * (sizeof shapes / sizeof shapes[0]); i++) {
        struct problem_options o = shapes[i / 2];
        o.op = i % 2 ? DTYPE_FP16 : DTYPE_BF16;
        struct problem *p = problem_create(&o);
        struct body *b = body_create(target, p);
        double us[BODY_STEPS];
        for (int n = 0; n < REPEATS; n++) {
            body_set_batch(b, p, o.rows > 1 ? KERNEL_PREFILL : KERNEL_DECODE, true);
            for (enum body_step s = BODY_ENTER; s < BODY_STEPS; s++) {
                double start = now_us();
                body_step(b, s);
                double took = now_us() - start;
                us[s] = n && us[s] < took ? us[s] : took;
            }
        }
        printf("%-16s %s T=%-3d", target->table->name, dtype_name(o.op), o.rows);
        for (enum body_step s = BODY_ENTER; s < BODY_STEPS; s++)
            printf("  %s %.1f", body_step_name[s], us[s]);
        printf(" us\n");
        body_destroy(b);
        problem_destroy(p);
    }
}
