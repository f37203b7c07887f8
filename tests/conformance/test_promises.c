/* SPDX-License-Identifier: Apache-2.0
 *
 * The promises about bits, on one back end: repetition, company, windows, adapters next door, skipped slots, values that are no
 * numbers, and shares of the experts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "subject.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Every kind of model: plain, biases with interleaving, weight on the input, several shapes. */
static const char *const kinds[] = {"olmoe", "gpt_oss", "llama4", "mixtral"};
enum { KINDS = 4 };
static const enum engine_mode modes[] = {ENGINE_DECODE, ENGINE_PREFILL};
static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_FP16, DTYPE_FP32};

static void same_bits(const char *what, const struct call *a, int32_t i, const struct call *b, int32_t j)
{
    if (!call_row_equal(a, i, b, j))
        fail_msg("%s: row %d of %d, K %d, %s: bits differ", what, i, a->request.rows, a->request.k, dtype_name(a->request.dtype));
}

static void the_same_request_gives_the_same_bits(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++) {
        struct subject s;
        struct call first, again;
        subject_open(&s, &(struct subject_options){.fixture = "olmoe", .adapters = true});
        call_init(&first, &s, 0, modes[m], DTYPE_BF16, 50, 4, 1);
        call_mix_adapters(&first, &s, 2);
        call_run(&s, &first);
        for (int n = 0; n < 15; n++) {
            if (!subject_takes())
                continue;
            call_init(&again, &s, 0, modes[m], DTYPE_BF16, 50, 4, 1);
            call_mix_adapters(&again, &s, 2);
            call_run(&s, &again);
            assert_memory_equal(again.out, first.out, 50 * call_row_bytes(&first));
            call_finish(&again);
        }
        call_finish(&first);
        subject_close(&s);
    }
}

/* Requests of different K, datatypes and adapters are merged into one batch; then each row runs alone. */
static void a_row_does_not_depend_on_its_company(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS * 2; i++) {
        struct subject crowd, alone;
        struct call c[6], *list[6], row;
        enum engine_mode mode = modes[i % 2];
        subject_open(&crowd, &(struct subject_options){.fixture = kinds[i / 2], .adapters = true, .batch_wait_us = 20000});
        subject_open(&alone, &(struct subject_options){.fixture = kinds[i / 2], .adapters = true});
        for (int n = 0; n < 6; n++) {
            int32_t k = 1 + (int32_t)(n * 7 % crowd.info->experts);
            call_init(&c[n], &crowd, crowd.info->held_layers[0], mode, dtypes[n % 3], 1 + n * 3, k, (uint64_t)(100 + n));
            if (n % 3)
                call_mix_adapters(&c[n], &crowd, (uint64_t)n);
            list[n] = &c[n];
        }
        calls_run(&crowd, list, 6);
        int32_t merged = 0;
        for (int n = 0; n < 6; n++) {
            if (c[n].request.batch_rows > merged)
                merged = c[n].request.batch_rows;
            c[n].request.adapters = alone.adapter;
            for (int32_t t = 0; t < c[n].request.rows; t++) {
                if (!subject_takes())
                    continue;
                call_init_row(&row, &c[n], t);
                call_run(&alone, &row);
                assert_int_equal(row.request.batch_rows, 1);
                same_bits(kinds[i / 2], &c[n], t, &row, 0);
                call_finish(&row);
            }
            call_finish(&c[n]);
        }
        assert_true(merged > 16); /* more than the largest request has: there was company */
        subject_close(&crowd);
        subject_close(&alone);
    }
}

/* From one row to more than a batch holds: the first rows of every length are the same. */
static void neither_length_nor_windows_change_bits(void **state)
{
    (void)state;
    static const int32_t lengths[] = {1,  2,  3,  4,  5,  7,  8,  9,  12, 15,  16,  17,  24, 31,
                                      32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 129, 150};
    enum { LENGTHS = sizeof lengths / sizeof *lengths, MOST = 150 };
    for (int i = 0; i < 4; i++) {
        struct subject windows, whole;
        struct call all, part;
        const char *fixture = i < 2 ? "olmoe" : "gpt_oss";
        subject_open(&windows, &(struct subject_options){.fixture = fixture, .adapters = true, .max_batch_rows = 48});
        subject_open(&whole, &(struct subject_options){.fixture = fixture, .adapters = true, .max_batch_rows = 512});
        call_init(&all, &whole, 0, modes[i % 2], DTYPE_BF16, MOST, 3, 9);
        call_mix_adapters(&all, &whole, 10);
        call_run(&whole, &all);
        assert_int_equal(all.request.batch_rows, MOST);
        for (int n = 0; n < LENGTHS; n++) {
            if (!subject_takes())
                continue;
            /* The seeds make the first rows of a shorter call those of the longer. */
            call_init(&part, &windows, 0, modes[i % 2], DTYPE_BF16, lengths[n], 3, 9);
            memcpy(part.hidden, all.hidden, (size_t)lengths[n] * call_row_bytes(&all));
            memcpy(part.ids, all.ids, (size_t)lengths[n] * 3 * sizeof *part.ids);
            memcpy(part.weights, all.weights, (size_t)lengths[n] * 3 * sizeof *part.weights);
            call_mix_adapters(&part, &windows, 10);
            call_run(&windows, &part);
            assert_true(part.request.batch_rows <= 48);
            for (int32_t t = 0; t < lengths[n]; t++)
                same_bits("windows", &part, t, &all, t);
            call_finish(&part);
        }
        call_finish(&all);
        subject_close(&windows);
        subject_close(&whole);
    }
}

/* Every K up to E, and more slots than top-k would need; experts repeat. */
static void any_number_of_slots(void **state)
{
    (void)state;
    for (int m = 0; m < 2; m++) {
        struct subject s;
        subject_open(&s, &(struct subject_options){.fixture = "qwen3_moe", .max_batch_rows = 5});
        for (int32_t k = 1; k <= s.info->experts; k++) {
            struct call c, row;
            if (!subject_takes())
                continue;
            call_init(&c, &s, 1, modes[m], DTYPE_FP32, 6, k, (uint64_t)k);
            call_run(&s, &c);
            for (int32_t t = 0; t < 6; t += 5) {
                call_init_row(&row, &c, t);
                call_run(&s, &row);
                same_bits("slots", &c, t, &row, 0);
                call_finish(&row);
            }
            call_finish(&c);
        }
        subject_close(&s);
    }
}

/* Base rows: on a server without adapters, with adapters installed, and in a batch with adapted rows. */
static void base_rows_do_not_notice_adapters(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS * 2; i++) {
        struct subject s;
        struct call bare, installed, mixed;
        subject_open(&s, &(struct subject_options){.fixture = kinds[i / 2]});
        int32_t layer = s.info->held_layers[s.info->layers_held - 1];
        call_init(&bare, &s, layer, modes[i % 2], DTYPE_FP16, 30, 2, 5);
        call_init(&installed, &s, layer, modes[i % 2], DTYPE_FP16, 30, 2, 5);
        call_init(&mixed, &s, layer, modes[i % 2], DTYPE_FP16, 30, 2, 5);
        call_run(&s, &bare);
        subject_install(&s);
        call_run(&s, &installed);
        call_mix_adapters(&mixed, &s, 6);
        call_run(&s, &mixed);
        int changed = 0;
        for (int32_t t = 0; t < 30; t++) {
            same_bits(kinds[i / 2], &installed, t, &bare, t);
            if (mixed.row_adapter[t] < 0)
                same_bits(kinds[i / 2], &mixed, t, &bare, t);
            else
                changed += !call_row_equal(&mixed, t, &bare, t);
        }
        assert_true(changed > 0);
        call_finish(&bare);
        call_finish(&installed);
        call_finish(&mixed);
        subject_close(&s);
    }
}

static void poison(struct call *c, int32_t t, float value, size_t step)
{
    for (size_t j = 0; j < c->columns; j += step)
        dtype_store_f32((char *)c->hidden + ((size_t)t * c->columns + j) * dtype_size(c->request.dtype), c->request.dtype, value);
}

/* Rows of NaN and of infinities, base and adapted, among sound ones. */
static void values_that_are_no_numbers_stay_in_their_row(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS * 2; i++) {
        struct subject s;
        struct call sound, sick;
        enum { ROWS = 21, K = 2 };
        subject_open(&s, &(struct subject_options){.fixture = kinds[i / 2], .adapters = true});
        int32_t layer = s.info->held_layers[0];
        call_init(&sound, &s, layer, modes[i % 2], DTYPE_BF16, ROWS, K, 5);
        call_init(&sick, &s, layer, modes[i % 2], DTYPE_BF16, ROWS, K, 5);
        call_mix_adapters(&sound, &s, 6);
        call_mix_adapters(&sick, &s, 6);
        for (int32_t t = 0; t < ROWS; t++) {
            if (t % 4 == 0)
                poison(&sick, t, NAN, t % 8 == 0 ? 1 : sick.columns); /* all of it, or its first element */
            else if (t % 4 == 2)
                poison(&sick, t, t % 8 == 2 ? INFINITY : -INFINITY, 3);
        }
        /* A sick row that goes nowhere gives zeros. */
        sick.ids[20 * K] = sick.ids[20 * K + 1] = -1;
        call_run(&s, &sound);
        call_run(&s, &sick);
        for (int32_t t = 0; t < ROWS; t++) {
            if (t % 2) {
                same_bits(kinds[i / 2], &sick, t, &sound, t);
                continue;
            }
            for (size_t j = 0; j < sick.columns; j++) {
                float v = call_value(&sick, t, j);
                if (t == 20)
                    assert_true(v == 0);
                else if (t % 4 == 0)
                    assert_true(isnan(v));
            }
        }
        call_finish(&sound);
        call_finish(&sick);
        subject_close(&s);
    }
}

/* Skipped slots anywhere: the same as if they had not been sent. And the ragged form is the same as the square one. */
static void skipped_slots_contribute_nothing(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS * 2; i++) {
        struct subject s;
        struct call square, skipped, ragged;
        enum { ROWS = 12, K = 3, WIDE = 5 };
        subject_open(&s, &(struct subject_options){.fixture = kinds[i / 2], .adapters = true});
        int32_t layer = s.info->held_layers[0];
        call_init(&square, &s, layer, modes[i % 2], DTYPE_FP32, ROWS, K, 7);
        call_init(&skipped, &s, layer, modes[i % 2], DTYPE_FP32, ROWS, WIDE, 7);
        call_init(&ragged, &s, layer, modes[i % 2], DTYPE_FP32, ROWS, K, 7);
        memcpy(skipped.hidden, square.hidden, ROWS * call_row_bytes(&square));
        int32_t n = 0;
        ragged.row_slots = calloc(ROWS + 1, sizeof *ragged.row_slots);
        for (int32_t t = 0; t < ROWS; t++) {
            /* Row t leaves slots out: a pattern of WIDE slots, of which those in `mask` are K or fewer. */
            static const unsigned masks[] = {0x15, 0x07, 0x1c, 0x0b, 0x16, 0x02, 0x00, 0x18, 0x13, 0x0e, 0x19, 0x10};
            int32_t used = 0;
            for (int32_t k = 0; k < WIDE; k++) {
                int32_t at = t * WIDE + k, from = t * K + used;
                bool keep = masks[t] >> k & 1;
                skipped.ids[at] = keep ? square.ids[from] : -1;
                skipped.weights[at] = keep ? square.weights[from] : NAN; /* never looked at */
                if (keep) {
                    ragged.ids[n] = square.ids[from];
                    ragged.weights[n++] = square.weights[from];
                    used++;
                }
            }
            for (int32_t k = used; k < K; k++)
                square.ids[t * K + k] = -1;
            ragged.row_slots[t + 1] = n;
        }
        ragged.request.k = 0;
        ragged.request.row_slots = ragged.row_slots;
        call_mix_adapters(&square, &s, 8);
        call_mix_adapters(&skipped, &s, 8);
        call_mix_adapters(&ragged, &s, 8);
        call_run(&s, &square);
        call_run(&s, &skipped);
        call_run(&s, &ragged);
        for (int32_t t = 0; t < ROWS; t++) {
            same_bits("skipped", &skipped, t, &square, t);
            same_bits("ragged", &ragged, t, &square, t);
        }
        for (size_t j = 0; j < square.columns; j++)
            assert_true(call_value(&ragged, 6, j) == 0); /* the row without any slot */
        call_finish(&square);
        call_finish(&skipped);
        call_finish(&ragged);
        subject_close(&s);
    }
}

/* A batch without a single slot, in both forms. */
static void rows_without_slots_give_zeros(void **state)
{
    (void)state;
    struct subject s;
    subject_open(&s, &(struct subject_options){.fixture = "olmoe", .adapters = true});
    for (int i = 0; i < 4; i++) {
        struct call c;
        call_init(&c, &s, 0, modes[i % 2], DTYPE_FP32, 5, 1, 7);
        call_mix_adapters(&c, &s, 1);
        for (int32_t t = 0; t < 5; t++)
            c.ids[t] = -1;
        if (i >= 2) {
            c.row_slots = calloc(6, sizeof *c.row_slots);
            c.request.k = 0;
            c.request.row_slots = c.row_slots;
        }
        poison(&c, 3, NAN, 1);
        call_run(&s, &c);
        for (int32_t t = 0; t < 5; t++) {
            for (size_t j = 0; j < c.columns; j++)
                assert_true(call_value(&c, t, j) == 0);
        }
        call_finish(&c);
    }
    subject_close(&s);
}

/* Two servers with a share of the experts each: their sums are what one with all of them gives. */
static void shares_of_the_experts_add_up(void **state)
{
    (void)state;
    for (int i = 0; i < KINDS * 2; i++) {
        struct subject s[3];
        struct call c[3];
        char low[32], high[32];
        subject_open(&s[0], &(struct subject_options){.fixture = kinds[i / 2], .adapters = true});
        int32_t experts = s[0].info->experts;
        snprintf(low, sizeof low, "0-%d", experts / 2 - 1);
        snprintf(high, sizeof high, "%d-%d", experts / 2, experts - 1);
        subject_open(&s[1], &(struct subject_options){.fixture = kinds[i / 2], .adapters = true, .experts = low});
        subject_open(&s[2], &(struct subject_options){.fixture = kinds[i / 2], .adapters = true, .experts = high});
        assert_int_equal(s[1].info->experts, experts);
        assert_int_equal(s[1].info->experts_held, experts / 2);
        for (int n = 0; n < 3; n++) {
            call_init(&c[n], &s[n], s[n].info->held_layers[0], modes[i % 2], DTYPE_FP32, 20, 4, 3);
            call_mix_adapters(&c[n], &s[n], 4);
            call_run(&s[n], &c[n]);
        }
        float *sum = malloc(20 * c[0].columns * sizeof *sum);
        for (int32_t t = 0; t < 20; t++) {
            for (size_t j = 0; j < c[0].columns; j++)
                sum[(size_t)t * c[0].columns + j] = call_value(&c[1], t, j) + call_value(&c[2], t, j);
        }
        double error = call_error(&c[0], sum);
        if (!(error < 1e-5))
            fail_msg("%s: the shares differ from the whole by %g", kinds[i / 2], error);
        free(sum);
        for (int n = 0; n < 3; n++) {
            call_finish(&c[n]);
            subject_close(&s[n]);
        }
    }
}

static void layers_that_are_not_held_are_not_found(void **state)
{
    (void)state;
    struct subject s;
    struct call c;
    struct engine_error error = {0};
    subject_open(&s, &(struct subject_options){.fixture = "olmoe", .layers = "1"});
    assert_int_equal(s.info->layers_held, 1);
    assert_true(engine_has_layer(s.engine, 1));
    assert_false(engine_has_layer(s.engine, 0));
    call_init(&c, &s, 1, ENGINE_AUTO, DTYPE_BF16, 2, 2, 1);
    call_run(&s, &c);
    static const int32_t absent[] = {-1, 0, 2, INT32_MAX};
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
        c.request.layer = absent[i];
        assert_int_equal(engine_submit(s.engine, &c.request, &error), ENGINE_LAYER_NOT_FOUND);
        assert_non_null(strstr(error.message, "layer"));
    }
    call_finish(&c);
    subject_close(&s);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_request_gives_the_same_bits),   cmocka_unit_test(a_row_does_not_depend_on_its_company),
        cmocka_unit_test(neither_length_nor_windows_change_bits), cmocka_unit_test(any_number_of_slots),
        cmocka_unit_test(base_rows_do_not_notice_adapters),       cmocka_unit_test(values_that_are_no_numbers_stay_in_their_row),
        cmocka_unit_test(skipped_slots_contribute_nothing),       cmocka_unit_test(rows_without_slots_give_zeros),
        cmocka_unit_test(shares_of_the_experts_add_up),           cmocka_unit_test(layers_that_are_not_held_are_not_found),
    };
    if (!subject_choose_backend(argc, argv)) {
        print_message("SKIP: this machine or build has no %s\n", subject_backend);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
