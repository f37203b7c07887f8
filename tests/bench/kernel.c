/* SPDX-License-Identifier: Apache-2.0
 *
 * Times whole forwards of one layer, replayed from CUDA graphs in turns. The same run checks rows of the result against the scalar
 * reference and that eager and captured runs give the same bits. The floor is what no version can beat: every touched expert's
 * weights and adapters read once and the rows in and out, at the read bandwidth, or the products' operations at the dense rate.
 */
#include "tests/bench/kernel.h"
#include "tests/bench/blas.h"
#include "tests/bench/sweep.h"

#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LIST 32
#define ORACLE_ROWS 4
#define ORACLE_FAR 8e-3 /* cuBLAS rounds gate and up to bf16, which alone is about 5e-3 of the result; the reference keeps fp32 */
#define MOST_CONTENDERS 16

struct settings {
    const char *code, *path, *csv_name, *sweep, *cublas;
    struct shape shape[MOST_LIST];
    int shape_count, rows[MOST_LIST], row_count;
    int adapters, rank, sets;
    bool steps, check, installed, baseline[BLAS_KINDS];
    double milliseconds;
    struct limits limits;
    FILE *csv;
};

static int wrong; /* results */

struct one { /* a forward under measurement: a path with or without adapters, or one of the servers that base rows may meet */
    struct contender *contender;
    uint64_t bits; /* of set 0's result, a digest */
    struct kernel_forward f[MOST_SETS];
    struct figure figure;
};

static bool path_wanted(const struct settings *s, const struct layer *l, int rows, enum kernel_path path)
{
    if (!strcmp(s->path, "both"))
        return true;
    return path == (!strcmp(s->path, "auto") ? layer_automatic(l, rows) : !strcmp(s->path, "prefill") ? KERNEL_PREFILL : KERNEL_DECODE);
}

static uint64_t digest(const void *data, size_t bytes)
{
    uint64_t v = 0, word;
    for (size_t i = 0; i + sizeof word <= bytes; i += sizeof word) { /* rows are multiples of 16 bytes */
        memcpy(&word, (const char *)data + i, sizeof word);
        v = (v ^ word) * 0x9e3779b97f4a7c15u;
        v ^= v >> 29;
    }
    return v;
}

/* Runs set 0 eagerly and again from a graph, and checks its bits and values. */
static void prepare_one(const struct settings *s, const struct layer *l, struct one *one, const struct set *set, int sets)
{
    const size_t bytes = (size_t)set[0].mix.rows * (size_t)l->shape.hidden * 2;
    char *eager = host_alloc(bytes), *replayed = host_alloc(bytes);
    cuda_check(cudaMemset(set[0].out, 0xff, bytes), "poison");
    cuda_check(cudaDeviceSynchronize(), "poison");
    status_check(forward_run(l->table, l->wrapped, &one->f[0]), "eager run");
    status_check(l->table->wait(l->wrapped), "eager run");
    if (s->check)
        one->figure.error = set_error(l, &set[0]);
    cuda_check(cudaMemcpy(eager, set[0].out, bytes, cudaMemcpyDeviceToHost), "download");
    cuda_check(cudaMemset(set[0].out, 0xff, bytes), "poison");
    cuda_check(cudaDeviceSynchronize(), "poison");
    one->contender->sets = sets;
    one->contender->exec = forwards_capture(l, one->f, sets, FORWARD_STEPS);
    cuda_check(cudaGraphLaunch(one->contender->exec, l->stream), "replay");
    cuda_check(cudaStreamSynchronize(l->stream), "replay");
    cuda_check(cudaMemcpy(replayed, set[0].out, bytes, cudaMemcpyDeviceToHost), "download");
    one->figure.same = memcmp(eager, replayed, bytes) == 0;
    one->bits = digest(eager, bytes);
    free(eager);
    free(replayed);
}

static void finish_one(const struct settings *s, struct one *one, const char *more)
{
    one->figure.us = one->contender->us;
    one->figure.least_us = one->contender->least_us;
    wrong += !figure_print(&one->figure, more);
    figure_csv(s->csv, &one->figure);
}

static void print_steps(const struct settings *s, const struct layer *l, const struct one *one)
{
    static const char *const name[FORWARD_STEPS] = {"enter", "route", "shrink_gate_up", "gate_up", "shrink_down", "down", "combine"};
    double before = 0;
    printf("           ");
    for (int i = 1; i <= FORWARD_STEPS; i++) {
        if (!one->f[0].lora.entry && (i == 3 || i == 5))
            continue;
        struct contender c = {.sets = one->contender->sets, .exec = forwards_capture(l, one->f, one->contender->sets, i)};
        take_turns(l, &c, 1, s->milliseconds);
        contender_drop(&c);
        printf("  %s %.1f", name[i - 1], c.us - before);
        before = c.us;
    }
    printf("\n");
    fflush(stdout);
}

static void make_sets(const struct layer *l, struct set *set, int sets, int rows, int adapters)
{
    for (int i = 0; i < sets; i++)
        set_make(l, &set[i], &(struct mix){.rows = rows, .adapters = adapters}, i);
}

/* ---- cuBLAS beside ours -------------------------------------------------------------------------------- */

struct baseline {
    struct blas_run *run;
    struct contender *both, *gate_up;
    double from_reference, from_ours;
};

/* Some rows by cuBLAS against the reference and, more of them, against ours, which set 0 holds. */
static bool compare_rows(const struct settings *s, const struct layer *l, struct baseline *base, const struct set *set, char *why,
                         size_t why_size)
{
    const int hidden = l->shape.hidden, rows = set[0].mix.rows;
    uint16_t *got = host_alloc((size_t)hidden * 2), *want = host_alloc((size_t)hidden * 2);
    bool good = true;
    base->from_reference = base->from_ours = s->check ? 0 : (double)NAN;
    for (int i = 0; i < ORACLE_ROWS && i < rows && good; i++) {
        int t = i * (rows - 1) / (rows < ORACLE_ROWS ? rows : ORACLE_ROWS);
        good = blas_run_row(base->run, l, t, got, why, why_size);
        if (!good || !s->check)
            break;
        cuda_check(cudaMemcpy(want, set[0].out + (size_t)t * (size_t)hidden, (size_t)hidden * 2, cudaMemcpyDeviceToHost), "download");
        base->from_ours = fmax(base->from_ours, row_distance(want, got, hidden));
        if (i)
            continue;
        layer_reference(l, &set[0], t, want);
        base->from_reference = row_distance(got, want, hidden);
    }
    free(got);
    free(want);
    return good;
}

static void prepare_baseline(const struct settings *s, struct blas *blas, const struct layer *l, enum blas_kind kind, struct baseline *base,
                             const struct set *set, int sets, struct contender *c, int *count)
{
    char why[256];
    base->run = blas_run_create(blas, l, kind, set, sets, why, sizeof why);
    if (!base->run || !compare_rows(s, l, base, set, why, sizeof why)) {
        printf("            cublas %s: %s\n", blas_kind_name(kind), why);
        blas_run_destroy(base->run);
        base->run = NULL;
        return;
    }
    base->both = &c[(*count)++];
    base->gate_up = &c[(*count)++];
    *base->both = blas_run_contender(base->run, true);
    *base->gate_up = blas_run_contender(base->run, false);
}

static void finish_baseline(const struct settings *s, const struct layer *l, enum blas_kind kind, struct baseline *base,
                            const struct set *set, int sets, double ours)
{
    char code[32];
    snprintf(code, sizeof code, "cublas-%s", blas_kind_name(kind));
    struct figure f = figure_of(l, set, sets, &s->limits);
    f.code = code;
    f.path = base->both->exec ? "products" : "launched";
    f.us = base->both->us;
    f.least_us = base->both->least_us;
    f.error = base->from_reference;
    figure_csv(s->csv, &f);
    printf("            cublas %-8s gate_up %7.1f + down %7.1f = %7.1f us (%s), %.2f times our whole forward, %.1f TFLOP/s",
           blas_kind_name(kind), base->gate_up->us, base->both->us - base->gate_up->us, base->both->us,
           base->both->exec ? "captured" : "launched", base->both->us / ours, f.flops / f.us * 1e-6);
    const bool good = base->from_reference < ORACLE_FAR && base->from_ours < ORACLE_FAR;
    if (s->check)
        printf(", error %.1e, ours from it %.1e %s", base->from_reference, base->from_ours, good ? "ok" : "WRONG");
    wrong += s->check && !good;
    printf("\n");
    fflush(stdout);
}

/* ---- one batch size ------------------------------------------------------------------------------------ */

/* Base rows on a server without adapters, on one that has some installed, which is told that no row of the batch uses them, and
 * with the adapters' steps run all the same. */
static void run_installed(const struct settings *s, const struct layer *l, const struct set *set, int sets, int rows, enum kernel_path path)
{
    static const char *const name[] = {"base-alone", "base-installed", "base-walked"};
    struct contender c[3] = {{0}};
    struct one one[3];
    for (int i = 0; i < 3; i++) {
        one[i] = (struct one){.contender = &c[i], .figure = figure_of(l, set, sets, &s->limits)};
        one[i].figure.run = name[i];
        one[i].figure.path = path_name(path);
        for (int j = 0; j < sets; j++) {
            one[i].f[j] = i ? l->lora_forward : l->forward;
            one[i].f[j].batch = set[j].batch;
            one[i].f[j].path = path;
            if (i == 1)
                one[i].f[j].lora.entry = NULL;
        }
        struct settings quick = *s;
        quick.check = false; /* these were checked as base rows; what counts here is that bits are the same */
        prepare_one(&quick, l, &one[i], set, sets);
    }
    const bool same =
        one[0].bits == one[1].bits && one[0].bits == one[2].bits && one[0].figure.same && one[1].figure.same && one[2].figure.same;
    wrong += !same;
    take_turns(l, c, 3, 2 * s->milliseconds);
    for (int i = 0; i < 3; i++) {
        one[i].figure.ratio = i ? turns_ratio(&c[i], &c[0]) : 1;
        one[i].figure.us = c[i].us;
        one[i].figure.least_us = c[i].least_us;
        figure_csv(s->csv, &one[i].figure);
    }
    printf("%-10s T=%-5d %-7s base rows: no adapters %.1f us, %d x r%d installed %.1f us (ratio %.4f %s), steps run for nobody %.1f us "
           "(%.4f)%s\n",
           l->shape.name, rows, path_name(path), c[0].us, l->adapters, l->rank, c[1].us, one[1].figure.ratio,
           one[1].figure.ratio <= 1.02 ? "ok" : "MORE THAN 2%", c[2].us, one[2].figure.ratio, same ? ", same bits" : " OTHER BITS");
    fflush(stdout);
    for (int i = 0; i < 3; i++)
        contender_drop(&c[i]);
}

static void run_rows(const struct settings *s, const struct layer *l, struct blas *blas, int rows)
{
    const int sets = rows >= 2048 && s->sets > 4 ? 4 : s->sets;
    struct set base[MOST_SETS], adapted[MOST_SETS];
    struct contender c[MOST_CONTENDERS] = {{0}};
    struct one one[2 * KERNEL_PATHS];
    struct baseline baseline[BLAS_KINDS] = {{0}};
    int count = 0, ones = 0;
    make_sets(l, base, sets, rows, 0);
    if (l->adapters)
        make_sets(l, adapted, sets, rows, l->adapters);
    for (enum kernel_path path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
        for (int a = 0; a < (l->adapters ? 2 : 1) && path_wanted(s, l, rows, path); a++) {
            struct one *now = &one[ones++];
            const struct set *set = a ? adapted : base;
            *now = (struct one){.contender = &c[count++], .figure = figure_of(l, set, sets, &s->limits)};
            now->figure.path = path_name(path);
            for (int i = 0; i < sets; i++)
                now->f[i] = set_forward(l, &set[i], path);
            prepare_one(s, l, now, set, sets);
        }
    }
    for (enum blas_kind kind = 0; blas && kind < BLAS_KINDS; kind++)
        if (s->baseline[kind])
            prepare_baseline(s, blas, l, kind, &baseline[kind], base, sets, c, &count);
    take_turns(l, c, count, s->milliseconds);
    double ours = INFINITY;
    for (int i = 0; i < ones; i++) {
        char more[64] = "";
        if (one[i].figure.mix.adapters)
            snprintf(more, sizeof more, "  adds %.1f (bytes %.1f)", one[i].contender->us - one[i - 1].contender->us,
                     one[i].figure.lora_bytes / s->limits.bandwidth * 1e6);
        else
            ours = fmin(ours, one[i].contender->us);
        finish_one(s, &one[i], more);
        if (s->steps)
            print_steps(s, l, &one[i]);
    }
    for (enum blas_kind kind = 0; kind < BLAS_KINDS; kind++)
        if (baseline[kind].run)
            finish_baseline(s, l, kind, &baseline[kind], base, sets, ours);
    for (int i = 0; i < count; i++)
        contender_drop(&c[i]);
    for (enum blas_kind kind = 0; kind < BLAS_KINDS; kind++)
        blas_run_destroy(baseline[kind].run);
    for (enum kernel_path path = KERNEL_DECODE; s->installed && path < KERNEL_PATHS; path++)
        if (path_wanted(s, l, rows, path))
            run_installed(s, l, base, sets, rows, path);
    for (int i = 0; i < sets; i++) {
        set_drop(&base[i]);
        if (l->adapters)
            set_drop(&adapted[i]);
    }
}

/* ---- the command line ---------------------------------------------------------------------------------- */

static int usage(FILE *out, int status)
{
    fputs("usage: expert-bench kernel [OPTIONS]\n"
          "  --shape LIST      olmoe64, qwen3-30b, mixtral, dsv3, or E:K:H:I (default olmoe64)\n"
          "  --rows LIST       rows of a batch (default 1,8,32,128,512,2048,8192)\n"
          "  --path PATH       auto, decode, prefill or both (default auto)\n"
          "  --adapters N      also with every row on a random one of N adapters\n"
          "  --rank R          of the adapters (default 16)\n"
          "  --installed       also base rows with and without these adapters installed, in turns\n"
          "  --baseline LIST   none, plain, grouped, pointers or all: both products by cuBLAS beside ours (default none)\n"
          "  --cublas FILE     where libcublas is, when not where the loader looks\n"
          "  --sweep LIST      instead: how cost grows with rows, experts, adapters, skew, rank, or all; one batch size of --rows\n"
          "                    is used where rows don't grow, else 8 and 512; with them, its greatest is the end\n"
          "  --code CODE       auto, sm90 or portable (default auto)\n"
          "  --sets N          batches that a replay goes round (default 8)\n"
          "  --time MS         of measuring, a contender (default 60)\n"
          "  --bandwidth TB/s, --rate TFLOP/s   the limits that the floor is drawn from (default 4.57, 790)\n"
          "  --steps           also the time of each step\n"
          "  --no-check        no comparison with the reference\n"
          "  --csv FILE        one line a measurement\n"
          "  --help            print this\n",
          out);
    return status;
}

static bool parse_shapes(struct settings *s, char *list)
{
    for (char *save, *name = strtok_r(list, ",", &save); name; name = strtok_r(NULL, ",", &save))
        if (s->shape_count == MOST_LIST || !shape_parse(name, &s->shape[s->shape_count++]))
            return false;
    return s->shape_count > 0;
}

static bool parse_rows(struct settings *s, char *list)
{
    s->row_count = 0;
    for (char *save, *item = strtok_r(list, ",", &save); item && s->row_count < MOST_LIST; item = strtok_r(NULL, ",", &save)) {
        s->rows[s->row_count] = atoi(item);
        if (s->rows[s->row_count] < 1 || s->rows[s->row_count++] > 1 << 17)
            return false;
    }
    return s->row_count > 0;
}

static bool parse_baseline(struct settings *s, char *list)
{
    for (char *save, *item = strtok_r(list, ",", &save); item; item = strtok_r(NULL, ",", &save)) {
        bool known = !strcmp(item, "none") || !strcmp(item, "all");
        for (enum blas_kind kind = 0; kind < BLAS_KINDS; kind++) {
            bool this = !strcmp(item, blas_kind_name(kind));
            s->baseline[kind] |= this || !strcmp(item, "all");
            known |= this;
        }
        if (!known)
            return false;
    }
    return true;
}

static bool parse_options(struct settings *s, int argc, char **argv, bool *help)
{
    static const struct option options[] = {
        {"shape", required_argument, NULL, 's'},
        {"rows", required_argument, NULL, 't'},
        {"path", required_argument, NULL, 'p'},
        {"adapters", required_argument, NULL, 'a'},
        {"rank", required_argument, NULL, 'r'},
        {"code", required_argument, NULL, 'c'},
        {"sets", required_argument, NULL, 'n'},
        {"steps", no_argument, NULL, 'S'},
        {"no-check", no_argument, NULL, 'C'},
        {"bandwidth", required_argument, NULL, 'b'},
        {"rate", required_argument, NULL, 'f'},
        {"csv", required_argument, NULL, 'o'},
        {"baseline", required_argument, NULL, 'B'},
        {"cublas", required_argument, NULL, 'L'},
        {"installed", no_argument, NULL, 'I'},
        {"sweep", required_argument, NULL, 'w'},
        {"time", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    bool good = true;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 's': good = good && parse_shapes(s, optarg); break;
        case 't': good = good && parse_rows(s, optarg); break;
        case 'p': s->path = optarg; break;
        case 'a': s->adapters = atoi(optarg); break;
        case 'r': s->rank = atoi(optarg); break;
        case 'c': s->code = optarg; break;
        case 'n': s->sets = atoi(optarg); break;
        case 'S': s->steps = true; break;
        case 'C': s->check = false; break;
        case 'b': s->limits.bandwidth = atof(optarg) * 1e12; break;
        case 'f': s->limits.rate = atof(optarg) * 1e12; break;
        case 'o': s->csv_name = optarg; break;
        case 'B': good = good && parse_baseline(s, optarg); break;
        case 'L': s->cublas = optarg; break;
        case 'I': s->installed = true; break;
        case 'w': s->sweep = optarg; break;
        case 'm': s->milliseconds = atof(optarg); break;
        case 'h': *help = true; break;
        default: good = false;
        }
    }
    bool known = !strcmp(s->path, "both") || !strcmp(s->path, "auto") || !strcmp(s->path, "decode") || !strcmp(s->path, "prefill");
    return good && known && optind == argc && s->sets >= 1 && s->sets <= MOST_SETS && s->adapters >= 0 && s->adapters <= 1024 &&
           s->rank >= 1 && s->rank <= KERNEL_MAX_RANK && s->limits.bandwidth > 0 && s->limits.rate > 0 && s->milliseconds > 0 &&
           (!s->installed || s->adapters) && (!s->sweep || sweep_known(s->sweep));
}

static void run_sweep(const struct settings *s, struct layer *l, const struct shape *shape, bool rows_given)
{
    int most = 1;
    for (int i = 0; i < s->row_count; i++)
        most = s->rows[i] > most ? s->rows[i] : most;
    struct sweep sweep = {.kinds = s->sweep,
                          .rows = rows_given && s->row_count == 1 ? s->rows[0] : 0,
                          .rank = s->rank,
                          .most_rows = most,
                          .milliseconds = s->milliseconds,
                          .limits = s->limits,
                          .csv = s->csv};
    layer_load(l, shape, sweep_most_rows(&sweep));
    int faults = sweep_run(l, &sweep);
    printf("%s: %d cliffs, wrong choices of path or wrong results\n", shape->name, faults);
    layer_unload(l);
}

static void run_shape(const struct settings *s, struct layer *l, struct blas *blas, const struct shape *shape)
{
    int most = 0;
    for (int i = 0; i < s->row_count; i++)
        most = s->rows[i] > most ? s->rows[i] : most;
    layer_load(l, shape, most);
    layer_install(l, s->adapters, s->rank);
    if (blas)
        blas_load(blas, l);
    for (int i = 0; i < s->row_count; i++)
        run_rows(s, l, blas, s->rows[i]);
    layer_unload(l);
}

int kernel_main(int argc, char **argv)
{
    char default_rows[] = "1,8,32,128,512,2048,8192", default_shape[] = "olmoe64", why[256] = "";
    struct settings s = {
        .path = "auto", .rank = 16, .sets = MOST_SETS, .check = true, .milliseconds = 60, .limits = {.bandwidth = 4.57e12, .rate = 790e12}};
    bool help = false, good = parse_options(&s, argc, argv, &help), rows_given = s.row_count > 0;
    if (help)
        return usage(stdout, 0);
    if (!s.shape_count)
        parse_shapes(&s, default_shape);
    if (!rows_given)
        parse_rows(&s, default_rows);
    if (!good)
        return usage(stderr, 2);
    struct layer l;
    layer_open(&l, s.code);
    s.csv = s.csv_name ? fopen(s.csv_name, "w") : NULL;
    if (s.csv_name && !s.csv) {
        fprintf(stderr, "expert-bench: %s can't be written\n", s.csv_name);
        return 1;
    }
    figure_csv_head(s.csv);
    struct cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, 0), "properties");
    printf("%s, %s, limits %.2f TB/s and %.0f TFLOP/s\n", properties.name, l.table->name, s.limits.bandwidth * 1e-12,
           s.limits.rate * 1e-12);
    bool compare = false;
    for (enum blas_kind kind = 0; kind < BLAS_KINDS; kind++)
        compare |= s.baseline[kind];
    struct blas *blas = compare ? blas_open(s.cublas, l.stream, why, sizeof why) : NULL;
    if (compare && !blas) {
        fprintf(stderr, "expert-bench: --baseline: %s\n", why);
        return 1;
    }
    if (blas)
        printf("cuBLAS %d\n", blas_version(blas));
    for (int i = 0; i < s.shape_count; i++) {
        if (s.sweep)
            run_sweep(&s, &l, &s.shape[i], rows_given);
        else
            run_shape(&s, &l, blas, &s.shape[i]);
    }
    if (s.csv && fclose(s.csv))
        fprintf(stderr, "expert-bench: %s can't be written\n", s.csv_name);
    blas_close(blas);
    layer_close(&l);
    if (wrong)
        fprintf(stderr, "expert-bench: %d results are wrong\n", wrong);
    return wrong ? 1 : 0;
}
