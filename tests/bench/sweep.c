/* SPDX-License-Identifier: Apache-2.0
 *
 * Growth of cost; see sweep.h.
 *
 * A cliff is a step from T to T + 1 rows, on one path, of more than 1.3 times, where the floor itself does not step (a second row
 * touches experts that the first did not: from 1 to 2 rows the floor nearly doubles, and so may the time). The rows of T + 1 are
 * those of T and one more, so that routing makes no difference.
 */
#include "tests/bench/sweep.h"

#include <math.h>
#include <string.h>

#define CLIFF 1.3
#define NOISE 1.03
#define FEW_ADAPTERS 8
#define MANY_ADAPTERS 64

static const int default_rows[] = {8, 512};

static const char *const kind_name[] = {"rows", "experts", "adapters", "skew", "rank"};

static bool listed(const char *list, const char *name)
{
    const size_t n = strlen(name);
    if (!strcmp(list, "all"))
        return true;
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, name, n) && (at[n] == ',' || at[n] == 0))
            return true;
    return false;
}

bool sweep_known(const char *kinds)
{
    if (!strcmp(kinds, "all"))
        return true;
    for (const char *at = kinds; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        bool known = false;
        for (size_t i = 0; i < sizeof kind_name / sizeof kind_name[0]; i++) {
            const size_t n = strlen(kind_name[i]);
            known |= !strncmp(at, kind_name[i], n) && (at[n] == ',' || at[n] == 0);
        }
        if (!known)
            return false;
    }
    return true;
}

int sweep_most_rows(const struct sweep *s)
{
    int most = s->rows ? s->rows : default_rows[1];
    return listed(s->kinds, "rows") && s->most_rows > most ? s->most_rows : most;
}

/* One mix on the paths asked for, in turns; fills us of each. */
struct point {
    struct set set[MOST_SETS];
    int sets;
    struct contender c[KERNEL_PATHS];
    struct figure figure[KERNEL_PATHS];
    bool run[KERNEL_PATHS];
};

static void measure(const struct layer *l, const struct sweep *s, const char *kind, const struct mix *mix, bool check, struct point *p)
{
    struct kernel_forward f[MOST_SETS];
    struct contender c[KERNEL_PATHS] = {{0}};
    int n = 0, of[KERNEL_PATHS] = {0};
    p->sets = mix->rows >= 512 ? 2 : 4;
    for (int i = 0; i < p->sets; i++)
        set_make(l, &p->set[i], mix, i);
    for (enum kernel_path path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
        if (!p->run[path])
            continue;
        p->figure[path] = figure_of(l, p->set, p->sets, &s->limits);
        p->figure[path].run = kind;
        p->figure[path].path = path_name(path);
        for (int i = 0; i < p->sets; i++)
            f[i] = set_forward(l, &p->set[i], path);
        of[path] = n;
        c[n++] = (struct contender){.sets = p->sets, .exec = forwards_capture(l, f, p->sets, FORWARD_STEPS)};
        if (check) {
            cuda_check(cudaGraphLaunch(c[n - 1].exec, l->stream), "replay");
            cuda_check(cudaStreamSynchronize(l->stream), "replay");
            p->figure[path].error = set_error(l, &p->set[0]);
        }
    }
    take_turns(l, c, n, s->milliseconds);
    for (enum kernel_path path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
        if (!p->run[path])
            continue;
        p->c[path] = c[of[path]];
        p->figure[path].us = p->c[path].us;
        p->figure[path].least_us = p->c[path].least_us;
        figure_csv(s->csv, &p->figure[path]);
    }
    for (int i = 0; i < n; i++)
        contender_drop(&c[i]);
    for (int i = 0; i < p->sets; i++)
        set_drop(&p->set[i]);
}

/* ---- rows ---------------------------------------------------------------------------------------------- */

static bool step_is_cliff(const struct point *before, const struct point *now, enum kernel_path path)
{
    const struct figure *a = &before->figure[path], *b = &now->figure[path];
    if (!before->run[path] || !now->run[path] || b->mix.rows != a->mix.rows + 1)
        return false;
    if (b->us / a->us <= CLIFF * fmax(1, b->floor_us / a->floor_us))
        return false;
    printf("CLIFF %s %s from %d to %d rows: %.1f to %.1f us (%.2f), floor %.1f to %.1f\n", b->shape, b->path, a->mix.rows, b->mix.rows,
           a->us, b->us, b->us / a->us, a->floor_us, b->floor_us);
    return true;
}

static bool choice_is_bad(const struct layer *l, const struct point *p)
{
    if (!p->run[KERNEL_DECODE] || !p->run[KERNEL_PREFILL])
        return false;
    const int rows = p->figure[0].mix.rows;
    const enum kernel_path path = layer_automatic(l, rows), other = path == KERNEL_DECODE ? KERNEL_PREFILL : KERNEL_DECODE;
    const double ratio = turns_ratio(&p->c[path], &p->c[other]);
    if (ratio <= NOISE)
        return false;
    printf("PATH %s, %d rows: auto takes %s, %.1f us, where %s takes %.1f (%.3f)\n", l->shape.name, rows, path_name(path), p->c[path].us,
           path_name(other), p->c[other].us, ratio);
    return true;
}

/* Every count up to 34, and what lies about multiples of tiles and the switch between paths. */
static int next_rows(const struct layer *l, int rows)
{
    static const int middle[] = {48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384};
    const int switched = l->table->decode_rows;
    if (rows < 34)
        return rows + 1;
    int next = 1 << 17;
    for (size_t i = 0; i < sizeof middle / sizeof middle[0]; i++)
        for (int d = -1; d <= 1; d++)
            next = middle[i] + d > rows && middle[i] + d < next ? middle[i] + d : next;
    for (int d = 0; d <= 1; d++)
        next = switched + d > rows && switched + d < next ? switched + d : next;
    return next;
}

static int sweep_rows(const struct layer *l, const struct sweep *s, int adapters)
{
    struct point before = {0}, now = {0};
    int faults = 0, cliffs = 0, bad = 0;
    double steepest = 0;
    bool decode = true;
    for (int rows = 1; rows <= s->most_rows; rows = next_rows(l, rows)) {
        const enum kernel_path automatic = layer_automatic(l, rows);
        now = (struct point){.run = {[KERNEL_DECODE] = decode || automatic == KERNEL_DECODE, [KERNEL_PREFILL] = true}};
        measure(l, s, "sweep-rows", &(struct mix){.rows = rows, .adapters = adapters}, false, &now);
        for (enum kernel_path path = KERNEL_DECODE; path < KERNEL_PATHS; path++) {
            cliffs += step_is_cliff(&before, &now, path);
            if (before.run[path] && now.run[path] && rows == before.figure[path].mix.rows + 1)
                steepest = fmax(steepest, now.figure[path].us / before.figure[path].us /
                                              fmax(1, now.figure[path].floor_us / before.figure[path].floor_us));
        }
        bad += choice_is_bad(l, &now);
        /* Far past the switch the decode path is of no interest, and slow. */
        if (now.run[KERNEL_DECODE] && automatic == KERNEL_PREFILL && now.c[KERNEL_DECODE].us > 3 * now.c[KERNEL_PREFILL].us)
            decode = false;
        before = now;
    }
    faults = cliffs + bad;
    printf("%-10s rows 1 to %d, %d adapters: steepest step %.2f of the floor's, %d cliffs, %d choices of path that cost more than 3%%\n",
           l->shape.name, s->most_rows, adapters, steepest, cliffs, bad);
    fflush(stdout);
    return faults;
}

/* ---- the others, at given rows ------------------------------------------------------------------------- */

static int measure_one(const struct layer *l, const struct sweep *s, const char *kind, const struct mix *mix)
{
    struct point p = {0};
    char more[96];
    const enum kernel_path path = layer_automatic(l, mix->rows);
    p.run[path] = true;
    measure(l, s, kind, mix, true, &p);
    snprintf(more, sizeof more, "  %s: %.0f experts, %.0f pairs, skew %g", kind, p.figure[path].touched, p.figure[path].pairs, mix->skew);
    return !figure_print(&p.figure[path], more);
}

static int sweep_fixed(struct layer *l, const struct sweep *s, int rows)
{
    static const int ranks[] = {8, 16, 32, 64, 128, 256, 512};
    static const double skews[] = {0, 0.125, 0.25, 0.5};
    int faults = 0;
    if (listed(s->kinds, "experts"))
        for (int n = l->shape.k; n; n = n == l->shape.experts ? 0 : 2 * n < l->shape.experts ? 2 * n : l->shape.experts)
            faults += measure_one(l, s, "sweep-experts", &(struct mix){.rows = rows, .experts = n});
    if (listed(s->kinds, "skew")) {
        layer_install(l, FEW_ADAPTERS, s->rank);
        for (int adapters = 0; adapters <= FEW_ADAPTERS; adapters += FEW_ADAPTERS)
            for (size_t i = 0; i < sizeof skews / sizeof skews[0]; i++)
                faults += measure_one(l, s, "sweep-skew", &(struct mix){.rows = rows, .adapters = adapters, .skew = skews[i]});
    }
    if (listed(s->kinds, "adapters")) {
        layer_install(l, MANY_ADAPTERS, s->rank);
        for (int n = 0; n <= MANY_ADAPTERS; n = n ? 2 * n : 1)
            faults += measure_one(l, s, "sweep-adapters", &(struct mix){.rows = rows, .adapters = n});
    }
    if (listed(s->kinds, "rank"))
        for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
            layer_install(l, FEW_ADAPTERS, ranks[i]);
            faults += measure_one(l, s, "sweep-rank", &(struct mix){.rows = rows, .adapters = FEW_ADAPTERS});
        }
    layer_install(l, 0, 0);
    return faults;
}

int sweep_run(struct layer *l, const struct sweep *s)
{
    int faults = 0;
    if (listed(s->kinds, "rows")) {
        faults += sweep_rows(l, s, 0);
        layer_install(l, FEW_ADAPTERS, s->rank);
        faults += sweep_rows(l, s, FEW_ADAPTERS);
        layer_install(l, 0, 0);
    }
    if (s->rows)
        return faults + sweep_fixed(l, s, s->rows);
    for (size_t i = 0; i < sizeof default_rows / sizeof default_rows[0]; i++)
        faults += sweep_fixed(l, s, default_rows[i]);
    return faults;
}
