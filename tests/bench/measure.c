/* SPDX-License-Identifier: Apache-2.0
 *
 * Contenders that take turns, and lines of a table; see measure.h.
 */
#include "tests/bench/measure.h"

#include <math.h>
#include <stdlib.h>

/* Relative error of a row: twice what bf16 results and activations leave at these sizes. */
#define WRONG_FROM 4e-3

cudaGraphExec_t forwards_capture(const struct layer *l, const struct kernel_forward *f, int sets, int steps)
{
    enum kernel_status (*const step[FORWARD_STEPS])(struct kernel_stream *, const struct kernel_forward *) = {
        l->table->enter,       l->table->route, l->table->shrink_gate_up, l->table->gate_up,
        l->table->shrink_down, l->table->down,  l->table->combine};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cuda_check(cudaStreamBeginCapture(l->stream, cudaStreamCaptureModeThreadLocal), "capture");
    if (steps == FORWARD_STEPS) {
        for (int s = 0; s < sets; s++)
            status_check(forward_run(l->table, l->wrapped, &f[s]), "a forward under capture");
    } else {
        for (int s = 0; s < sets; s++)
            for (int i = 0; i < steps; i++)
                if (f[s].lora.entry || (i != 2 && i != 4))
                    status_check(step[i](l->wrapped, &f[s]), "a step under capture");
    }
    cuda_check(cudaStreamEndCapture(l->stream, &graph), "capture");
    cuda_check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
    cuda_check(cudaGraphDestroy(graph), "graph");
    return exec;
}

void contender_drop(struct contender *c)
{
    if (c->exec)
        cuda_check(cudaGraphExecDestroy(c->exec), "graph");
    c->exec = NULL;
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median(const float *sample, int n)
{
    float sorted[MOST_ROUNDS];
    for (int i = 0; i < n; i++)
        sorted[i] = sample[i];
    qsort(sorted, (size_t)n, sizeof *sorted, by_value);
    return n % 2 ? (double)sorted[n / 2] : 0.5 * ((double)sorted[n / 2 - 1] + (double)sorted[n / 2]);
}

static float run(const struct layer *l, const struct contender *c, cudaEvent_t begin, cudaEvent_t end)
{
    float ms;
    cuda_check(cudaEventRecord(begin, l->stream), "event");
    if (c->exec)
        cuda_check(cudaGraphLaunch(c->exec, l->stream), "replay");
    else
        c->launch(c->arg);
    cuda_check(cudaEventRecord(end, l->stream), "event");
    cuda_check(cudaEventSynchronize(end), "replay");
    cuda_check(cudaEventElapsedTime(&ms, begin, end), "event");
    return ms;
}

void take_turns(const struct layer *l, struct contender *c, int n, double milliseconds)
{
    cudaEvent_t begin, end;
    cuda_check(cudaEventCreate(&begin), "event");
    cuda_check(cudaEventCreate(&end), "event");
    double total = 0;
    for (int round = -2, most = MOST_ROUNDS; round < most; round++) {
        for (int i = 0; i < n; i++) {
            struct contender *of = &c[round & 1 ? n - 1 - i : i];
            float ms = run(l, of, begin, end);
            if (round < 0)
                continue;
            of->sample[round] = ms * 1e3f / (float)of->sets;
            of->rounds = round + 1;
            total += (double)ms / n;
        }
        if (round >= 4 && total >= milliseconds)
            break;
    }
    for (int i = 0; i < n; i++) {
        c[i].us = median(c[i].sample, c[i].rounds);
        c[i].least_us = (double)c[i].sample[0];
        for (int j = 1; j < c[i].rounds; j++)
            c[i].least_us = fmin(c[i].least_us, (double)c[i].sample[j]);
    }
    cuda_check(cudaEventDestroy(begin), "event");
    cuda_check(cudaEventDestroy(end), "event");
}

double turns_ratio(const struct contender *a, const struct contender *b)
{
    float ratio[MOST_ROUNDS];
    const int n = a->rounds < b->rounds ? a->rounds : b->rounds;
    for (int i = 0; i < n; i++)
        ratio[i] = a->sample[i] / b->sample[i];
    return median(ratio, n);
}

struct figure figure_of(const struct layer *l, const struct set *set, int sets, const struct limits *limits)
{
    const struct mix *mix = &set[0].mix;
    const double matrix = (double)l->shape.hidden * l->shape.inter, rows = mix->rows;
    struct figure f = {.run = "layer",
                       .code = l->table->name,
                       .shape = l->shape.name,
                       .mix = *mix,
                       .rank = mix->adapters ? l->rank : 0,
                       .error = (double)NAN,
                       .same = true};
    for (int i = 0; i < sets; i++) {
        f.touched += (double)set[i].touched / sets;
        f.pairs += (double)set[i].pairs / sets;
    }
    f.lora_bytes = f.pairs * 6 * f.rank * (l->shape.hidden + l->shape.inter);
    f.bytes = f.touched * 6 * matrix + 4 * rows * l->shape.hidden + f.lora_bytes;
    f.flops = 6 * rows * l->shape.k * matrix;
    f.floor_us = fmax(f.bytes / limits->bandwidth, f.flops / limits->rate) * 1e6;
    return f;
}

const char *path_name(enum kernel_path path) { return path == KERNEL_DECODE ? "decode" : "prefill"; }

void figure_csv_head(FILE *csv)
{
    if (csv)
        fputs("run,code,shape,rows,path,adapters,rank,experts,skew,touched,pairs,floor_us,time_us,least_us,tb_s,tflop_s,error,"
              "same_bits_as_eager,ratio\n",
              csv);
}

void figure_csv(FILE *csv, const struct figure *f)
{
    if (!csv)
        return;
    fprintf(csv, "%s,%s,%s,%d,%s,%d,%d,%d,%g,%.1f,%.1f,%.2f,%.2f,%.2f,%.3f,%.1f,", f->run, f->code, f->shape, f->mix.rows, f->path,
            f->mix.adapters, f->rank, f->mix.experts, f->mix.skew, f->touched, f->pairs, f->floor_us, f->us, f->least_us,
            f->bytes / f->us * 1e-6, f->flops / f->us * 1e-6);
    if (f->error == f->error)
        fprintf(csv, "%.3e,%d,", f->error, f->same);
    else
        fputs(",,", csv);
    if (f->ratio > 0)
        fprintf(csv, "%.4f", f->ratio);
    fputc('\n', csv);
    fflush(csv);
}

bool figure_print(const struct figure *f, const char *more)
{
    char adapters[48] = "base", verdict[48] = "unchecked";
    if (f->mix.adapters)
        snprintf(adapters, sizeof adapters, "%d x r%d", f->mix.adapters, f->rank);
    const bool good = f->same && !(f->error >= WRONG_FROM);
    if (f->error == f->error)
        snprintf(verdict, sizeof verdict, "error %.1e %s", f->error, good ? "ok" : f->same ? "WRONG" : "NOT SAME AS EAGER");
    else if (!good)
        snprintf(verdict, sizeof verdict, "NOT SAME AS EAGER");
    printf("%-10s T=%-5d %-7s %-9s floor %7.1f us  time %7.1f us  %5.1f%% of floor  %5.2f TB/s  %6.1f TFLOP/s  %s%s\n", f->shape,
           f->mix.rows, f->path, adapters, f->floor_us, f->us, 100 * f->floor_us / f->us, f->bytes / f->us * 1e-6, f->flops / f->us * 1e-6,
           verdict, more);
    fflush(stdout);
    return good;
}
