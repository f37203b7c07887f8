/* SPDX-License-Identifier: Apache-2.0
 *
 * Results against float64, against the other path and against the reference back end (promises 6 and 7), on one back end.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "subject.h"

#include <stdlib.h>
#include <string.h>

#define LIMIT_BASE 4e-3
#define LIMIT_ADAPTED 7e-3
#define LIMIT_PATHS 1e-3

static const enum engine_mode modes[] = {ENGINE_DECODE, ENGINE_PREFILL};
static const char *const mode_names[] = {"auto", "decode", "prefill"};
static double worst_base, worst_adapted, worst_paths;

/* One call of every row on adapter `all` (-1 base, -2 mixed) against the golden tensor. */
static void compare(struct subject *s, int32_t layer, enum engine_mode mode, enum dtype dtype, int all)
{
    char name[128] = "expected";
    struct call c;
    size_t n;
    if (!subject_takes())
        return;
    if (all == -2)
        strcat(name, "_mixed");
    else if (all >= 0)
        snprintf(name, sizeof name, "expected_%s", s->adapter_name[all] + strlen("adapter_"));
    float *expected = subject_golden_f32(s, layer, name, &n);
    call_init_golden(&c, s, layer, mode, dtype, all);
    assert_int_equal(n, (size_t)c.request.rows * c.columns);
    call_run(s, &c);
    assert_int_equal(c.request.path, mode);
    double error = call_error(&c, expected), limit = all == -1 ? LIMIT_BASE : LIMIT_ADAPTED;
    double *worst = all == -1 ? &worst_base : &worst_adapted;
    if (error > *worst)
        *worst = error;
    if (!(error <= limit))
        fail_msg("%s layer %d %s %s %s: error %g over %g", s->folder, layer, name, mode_names[mode], dtype_name(dtype), error, limit);
    call_finish(&c);
    free(expected);
}

static void compare_all(const char *fixture, const char *held)
{
    static const enum dtype dtypes[] = {DTYPE_BF16, DTYPE_FP16, DTYPE_FP32};
    struct subject s;
    subject_open(&s, &(struct subject_options){.fixture = fixture, .dtype = held});
    assert_int_equal(s.info->weight_dtype, held && !strcmp(held, "fp16") ? DTYPE_FP16 : DTYPE_BF16);
    for (int installed = 0; installed < 2; installed++) {
        if (installed)
            subject_install(&s);
        for (int32_t l = 0; l < s.info->layers_held; l++) {
            for (int m = 0; m < 2; m++) {
                for (int d = 0; d < 3; d++) {
                    for (int a = installed ? -2 : -1; a < (installed ? s.adapters : 0); a++)
                        compare(&s, s.info->held_layers[l], modes[m], dtypes[d], a);
                }
            }
        }
    }
    subject_close(&s);
}

static void fixtures_agree_with_float64(void **state)
{
    (void)state;
    for (int i = 0; subject_fixtures[i]; i++)
        compare_all(subject_fixtures[i], NULL);
    print_message("%s: largest error of base rows %.3g, of adapted rows %.3g\n", subject_backend, worst_base, worst_adapted);
}

/* Weights held as fp16 carry more fraction bits than they had in the files, so the limits hold all the more. */
static void fixtures_held_as_fp16_agree_with_float64(void **state)
{
    (void)state;
    for (int i = 0; subject_fixtures[i]; i++)
        compare_all(subject_fixtures[i], "fp16");
}

/* Random rows, mixed adapters: the paths of one back end, and each path of it and the reference. */
static void distances(const struct subject_options *options, int32_t rows, int32_t k)
{
    struct subject_options o = *options;
    struct subject mine, ref;
    struct call c[4];
    if (!subject_takes())
        return;
    subject_open(&mine, &o);
    o.backend = "ref";
    subject_open(&ref, &o);
    int32_t layer = mine.info->held_layers[0];
    for (int i = 0; i < 4; i++) {
        struct subject *s = i < 2 ? &mine : &ref;
        call_init(&c[i], s, layer, modes[i % 2], DTYPE_FP32, rows, k, 42);
        if (s->adapters)
            call_mix_adapters(&c[i], s, 43);
        call_run(s, &c[i]);
    }
    const double d[] = {call_distance(&c[0], &c[1]), call_distance(&c[0], &c[2]), call_distance(&c[1], &c[3])};
    for (int i = 0; i < 3; i++) {
        if (d[i] > worst_paths)
            worst_paths = d[i];
        if (!(d[i] <= LIMIT_PATHS))
            fail_msg("%s: distance %d is %g", options->fixture ? options->fixture : options->synthetic, i, d[i]);
    }
    for (int i = 0; i < 4; i++)
        call_finish(&c[i]);
    subject_close(&mine);
    subject_close(&ref);
}

static void paths_and_back_ends_agree(void **state)
{
    (void)state;
    for (int i = 0; subject_fixtures[i]; i++)
        distances(&(struct subject_options){.fixture = subject_fixtures[i], .adapters = true}, 40, 2);
    distances(&(struct subject_options){.fixture = "gpt_oss", .adapters = true, .dtype = "fp16"}, 40, 3);
    /* Sizes that fill no tile, every activation, K = E. */
    distances(&(struct subject_options){.synthetic = "E=5,K=3,H=200,I=104,L=1"}, 33, 5);
    distances(&(struct subject_options){.synthetic = "E=3,K=1,H=8,I=8,L=1,ACT=gelu"}, 9, 1);
    distances(&(struct subject_options){.synthetic = "E=16,K=2,H=264,I=72,L=1,ACT=gelu_tanh"}, 70, 4);
    distances(&(struct subject_options){.synthetic = "E=4,K=2,H=72,I=136,L=1,ACT=gpt_oss"}, 17, 2);
    print_message("%s: largest distance between paths and from ref %.3g\n", subject_backend, worst_paths);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixtures_agree_with_float64),
        cmocka_unit_test(fixtures_held_as_fp16_agree_with_float64),
        cmocka_unit_test(paths_and_back_ends_agree),
    };
    if (!subject_choose_backend(argc, argv)) {
        print_message("SKIP: this machine or build has no %s\n", subject_backend);
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
