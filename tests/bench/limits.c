/* SPDX-License-Identifier: Apache-2.0
 *
 * What this GPU and its link reach at best, measured now: reading device memory, a dense bf16 matrix product, copies each way, and
 * beside these what the engine's own uploads make of the link.
 */
#include "tests/bench/blas.h"
#include "tests/bench/kernel.h"
#include "tests/bench/probe.h"

#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { READ_BYTES = 1 << 30, READS = 9, READ_GIB = 8, DENSE = 8192, COPY_BYTES = 256 << 20, COPIES = 9 };
/* As the loader does it: several threads, pinned pieces of this size, over and over. */
enum { UPLOADERS = 8, UPLOADS = 64, UPLOAD_BYTES = 4 << 20 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void tell(FILE *csv, const char *name, double value, const char *unit, const char *what)
{
    printf("%-16s %9.2f %-8s %s\n", name, value, unit, what);
    fflush(stdout);
    if (csv)
        fprintf(csv, "%s,%.4f,%s\n", name, value, unit);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static float ended(cudaEvent_t begin, cudaEvent_t end, cudaStream_t stream)
{
    float ms;
    cuda_check(cudaEventRecord(end, stream), "event");
    cuda_check(cudaEventSynchronize(end), "measuring");
    cuda_check(cudaEventElapsedTime(&ms, begin, end), "event");
    return ms;
}

/* Bytes a second of reading memory that is far larger than the cache, the median. */
static double read_rate(cudaStream_t stream, cudaEvent_t begin, cudaEvent_t end)
{
    int processors = 0;
    const size_t bytes = (size_t)READ_GIB * READ_BYTES;
    char *memory = device_alloc(bytes);
    uint32_t *sink = device_alloc(4);
    float ms[READS];
    cuda_check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "attribute");
    cuda_check(cudaMemsetAsync(memory, 0x3c, bytes, stream), "memory");
    for (int i = -2; i < READS; i++) {
        cuda_check(cudaEventRecord(begin, stream), "event");
        cuda_check((cudaError_t)probe_read(memory, bytes, sink, processors, stream), "reading");
        float took = ended(begin, end, stream);
        if (i >= 0)
            ms[i] = took;
    }
    qsort(ms, READS, sizeof *ms, by_value);
    cuda_check(cudaFree(memory), "free");
    cuda_check(cudaFree(sink), "free");
    return (double)bytes / (double)ms[READS / 2] * 1e3;
}

static double copy_rate(void *to, const void *from, enum cudaMemcpyKind kind, cudaStream_t stream, cudaEvent_t begin, cudaEvent_t end)
{
    float ms[COPIES];
    for (int i = -1; i < COPIES; i++) {
        cuda_check(cudaEventRecord(begin, stream), "event");
        cuda_check(cudaMemcpyAsync(to, from, COPY_BYTES, kind, stream), "copy");
        float took = ended(begin, end, stream);
        if (i >= 0)
            ms[i] = took;
    }
    qsort(ms, COPIES, sizeof *ms, by_value);
    return COPY_BYTES / (double)ms[COPIES / 2] * 1e3;
}

/* ---- the engine's uploads ------------------------------------------------------------------------------ */

struct uploader {
    struct device *device;
    uint64_t to;
    size_t width; /* of a piece; its place is twice as wide when that is less than all */
    void *from; /* pinned */
    pthread_t thread;
    pthread_barrier_t *ready;
    double begin, end;
    enum engine_code code;
};

static void *upload_main(void *arg)
{
    struct uploader *u = arg;
    struct engine_error error;
    const size_t pitch = u->width < UPLOAD_BYTES ? 2 * u->width : u->width;
    u->code = u->device->ops->upload(u->device, u->to, pitch, u->from, u->width, u->width, UPLOAD_BYTES / u->width, &error);
    pthread_barrier_wait(u->ready); /* after a first one, which sets its lane up */
    u->begin = now();
    for (int i = 0; i < UPLOADS && u->code == ENGINE_OK; i++)
        u->code = u->device->ops->upload(u->device, u->to, pitch, u->from, u->width, u->width, UPLOAD_BYTES / u->width, &error);
    u->end = now();
    return NULL;
}

/* From the first thread's beginning to the last one's end; 0 when one fails. */
static double upload_rate(struct device *device, uint64_t to, void *const *from, size_t width)
{
    struct uploader u[UPLOADERS];
    pthread_barrier_t ready;
    bool good = pthread_barrier_init(&ready, NULL, UPLOADERS) == 0;
    int started = 0;
    for (; good && started < UPLOADERS; started++) {
        u[started] = (struct uploader){
            .device = device, .to = to + (uint64_t)started * 2 * UPLOAD_BYTES, .width = width, .from = from[started], .ready = &ready};
        if (pthread_create(&u[started].thread, NULL, upload_main, &u[started])) {
            fprintf(stderr, "expert-bench: no thread\n"); /* the others wait for it */
            exit(1);
        }
    }
    double begin = INFINITY, end = 0;
    for (int i = 0; i < started; i++) {
        pthread_join(u[i].thread, NULL);
        good &= u[i].code == ENGINE_OK;
        begin = fmin(begin, u[i].begin);
        end = fmax(end, u[i].end);
    }
    pthread_barrier_destroy(&ready);
    return good ? (double)UPLOADERS * UPLOADS * UPLOAD_BYTES / (end - begin) : 0;
}

static void measure_uploads(FILE *csv, double link)
{
    const struct device_options options = {.device = "cuda", .threads = 2};
    static const struct {
        size_t width;
        const char *name, *what;
    } form[] = {{UPLOAD_BYTES, "upload_whole", "engine uploads, 8 threads, 4 MiB each"},
                {1024, "upload_pieces", "engine uploads, 8 threads, 4 MiB in pieces of 1 KiB"}};
    struct device *device = NULL;
    struct engine_error error;
    void *from[UPLOADERS];
    uint64_t to;
    if (device_create(&options, &device, &error) != ENGINE_OK ||
        device->ops->alloc(device, (size_t)UPLOADERS * 2 * UPLOAD_BYTES, &to, &error) != ENGINE_OK) {
        fprintf(stderr, "expert-bench: %s\n", error.message);
        exit(1);
    }
    for (int i = 0; i < UPLOADERS; i++) {
        from[i] = device->ops->host_alloc(device, UPLOAD_BYTES);
        if (!from[i]) {
            fprintf(stderr, "expert-bench: no pinned memory\n");
            exit(1);
        }
        memset(from[i], 1, UPLOAD_BYTES);
    }
    for (size_t i = 0; i < sizeof form / sizeof form[0]; i++) {
        char what[128];
        double rate = 0;
        for (int again = 0; again < 3; again++)
            rate = fmax(rate, upload_rate(device, to, from, form[i].width));
        snprintf(what, sizeof what, "%s: %.0f%% of the link", form[i].what, 100 * rate / link);
        tell(csv, form[i].name, rate * 1e-9, "GB/s", what);
    }
    for (int i = 0; i < UPLOADERS; i++)
        device->ops->host_free(device, from[i], UPLOAD_BYTES);
    device->ops->free(device, to, (size_t)UPLOADERS * 2 * UPLOAD_BYTES);
    device_destroy(device);
}

/* ---- the command line ---------------------------------------------------------------------------------- */

static int usage(FILE *out, int status)
{
    fputs("usage: expert-bench limits [OPTIONS]\n"
          "  --cublas FILE     where libcublas is, when not where the loader looks; without it the dense rate is left out\n"
          "  --csv FILE        one line a figure\n"
          "  --help            print this\n",
          out);
    return status;
}

int limits_main(int argc, char **argv)
{
    static const struct option options[] = {{"cublas", required_argument, NULL, 'L'},
                                            {"csv", required_argument, NULL, 'o'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *cublas = NULL, *csv_name = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        switch (c) {
        case 'L': cublas = optarg; break;
        case 'o': csv_name = optarg; break;
        case 'h': return usage(stdout, 0);
        default: return usage(stderr, 2);
        }
    }
    if (optind != argc)
        return usage(stderr, 2);
    cudaStream_t stream;
    cudaEvent_t begin, end;
    struct cudaDeviceProp properties;
    char why[256];
    cuda_check(cudaGetDeviceProperties(&properties, 0), "properties");
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    cuda_check(cudaEventCreate(&begin), "event");
    cuda_check(cudaEventCreate(&end), "event");
    FILE *csv = csv_name ? fopen(csv_name, "w") : NULL;
    if (csv_name && !csv) {
        fprintf(stderr, "expert-bench: %s can't be written\n", csv_name);
        return 1;
    }
    if (csv)
        fputs("limit,value,unit\n", csv);
    printf("%s\n", properties.name);
    tell(csv, "read", read_rate(stream, begin, end) * 1e-12, "TB/s", "plain read of 8 GiB, the median");
    struct blas *blas = blas_open(cublas, stream, why, sizeof why);
    if (blas)
        tell(csv, "dense", blas_dense_rate(blas, DENSE) * 1e-12, "TFLOP/s", "dense bf16 product of 8192 x 8192 by cuBLAS, the mean");
    else
        fprintf(stderr, "expert-bench: no dense rate: %s\n", why);
    blas_close(blas);
    void *host, *device = device_alloc(COPY_BYTES);
    cuda_check(cudaMallocHost(&host, COPY_BYTES), "pinned memory");
    memset(host, 1, COPY_BYTES);
    const double link = copy_rate(device, host, cudaMemcpyHostToDevice, stream, begin, end);
    tell(csv, "link_up", link * 1e-9, "GB/s", "pinned copies of 256 MiB to the device, the median");
    tell(csv, "link_down", copy_rate(host, device, cudaMemcpyDeviceToHost, stream, begin, end) * 1e-9, "GB/s", "and back");
    cuda_check(cudaFree(device), "free");
    cuda_check(cudaFreeHost(host), "free");
    measure_uploads(csv, link);
    cuda_check(cudaEventDestroy(begin), "event");
    cuda_check(cudaEventDestroy(end), "event");
    cuda_check(cudaStreamDestroy(stream), "stream");
    if (csv && fclose(csv))
        fprintf(stderr, "expert-bench: %s can't be written\n", csv_name);
    return 0;
}
