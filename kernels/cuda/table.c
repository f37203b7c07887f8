/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA back end's tables, its choice of code for a device, and streams. Two tables: "sm90" for Hopper's own instructions,
 * "portable" for any GPU from compute capability 8.0 on, of which newer ones compile its PTX. All else is shared.
 */
#include "kernels/cuda/launch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum kernel_status status(cudaError_t e)
{
    if (e == cudaSuccess)
        return KERNEL_OK;
    return e == cudaErrorMemoryAllocation ? KERNEL_OUT_OF_MEMORY : KERNEL_DEVICE_FAILED;
}

static size_t work_bytes(const struct kernel_dims *dims, int32_t max_rows, int32_t max_slots, int32_t max_rank)
{
    return cuda_route_bytes(dims, max_slots);
}

static enum kernel_status enter(struct kernel_stream *s, const struct kernel_forward *f)
{
    return f->batch.rows ? status(cuda_enter(s, f)) : KERNEL_OK;
}

static enum kernel_status route(struct kernel_stream *s, const struct kernel_forward *f) { return status(cuda_route(s, f)); }

static enum kernel_status shrink_sm90(struct kernel_stream *s, const struct kernel_forward *f, bool down)
{
    if (f->batch.slots == 0 || !f->lora.entry)
        return KERNEL_OK;
    return status(f->path == KERNEL_DECODE ? cuda_shrink(s, f, down) : cuda_shrink_sm90(s, f, down));
}

static enum kernel_status shrink_portable(struct kernel_stream *s, const struct kernel_forward *f, bool down)
{
    return f->batch.slots && f->lora.entry ? status(cuda_shrink(s, f, down)) : KERNEL_OK;
}

static enum kernel_status shrink_gate_up_sm90(struct kernel_stream *s, const struct kernel_forward *f) { return shrink_sm90(s, f, false); }
static enum kernel_status shrink_down_sm90(struct kernel_stream *s, const struct kernel_forward *f) { return shrink_sm90(s, f, true); }
static enum kernel_status shrink_gate_up_portable(struct kernel_stream *s, const struct kernel_forward *f)
{
    return shrink_portable(s, f, false);
}
static enum kernel_status shrink_down_portable(struct kernel_stream *s, const struct kernel_forward *f)
{
    return shrink_portable(s, f, true);
}

static enum kernel_status combine(struct kernel_stream *s, const struct kernel_forward *f)
{
    return f->batch.rows ? status(cuda_combine(s, f)) : KERNEL_OK;
}

static enum kernel_status product_sm90(struct kernel_stream *s, const struct kernel_forward *f, bool down)
{
    if (f->batch.slots == 0)
        return KERNEL_OK;
    if (f->path == KERNEL_DECODE)
        return status(cuda_decode_sm90(s, f, down));
    /* Settled by the model, so that a model's rows always meet the same instructions. */
    const bool gelu = f->weights.activation == KERNEL_ACT_GELU || f->weights.activation == KERNEL_ACT_GELU_TANH;
    if (gelu)
        return status(cuda_prefill_portable(s, f, down));
    return status(f->dims.op == DTYPE_BF16 ? cuda_prefill_sm90_bf16(s, f, down) : cuda_prefill_sm90_fp16(s, f, down));
}

static enum kernel_status product_portable(struct kernel_stream *s, const struct kernel_forward *f, bool down)
{
    if (f->batch.slots == 0)
        return KERNEL_OK;
    return status(f->path == KERNEL_DECODE ? cuda_decode_portable(s, f, down) : cuda_prefill_portable(s, f, down));
}

static enum kernel_status gate_up_sm90(struct kernel_stream *s, const struct kernel_forward *f) { return product_sm90(s, f, false); }
static enum kernel_status down_sm90(struct kernel_stream *s, const struct kernel_forward *f) { return product_sm90(s, f, true); }
static enum kernel_status gate_up_portable(struct kernel_stream *s, const struct kernel_forward *f)
{
    return product_portable(s, f, false);
}
static enum kernel_status down_portable(struct kernel_stream *s, const struct kernel_forward *f) { return product_portable(s, f, true); }

static enum kernel_status wait(struct kernel_stream *s) { return status(cudaStreamSynchronize(s->stream)); }

/* Where the paths cross, measured (see tests/bench/results): with 64 experts without adapters at 22 rows, with 8 adapters of rank 16 at 15; with
 * larger experts sooner. Here neither loses more than 4%. The portable prefill product works on 128 rows of an expert at a time and pays later. */
#define CODE_DECODE_ROWS_sm90 18
#define CODE_DECODE_ROWS_portable 128

#define TABLE(code)                                                                                                                        \
    {                                                                                                                                      \
        .name = "cuda-" #code, .device = "cuda", .decode_rows = CODE_DECODE_ROWS_##code, .dims_init = cuda_dims_init,                      \
        .gate_up_bytes = cuda_gate_up_bytes, .down_bytes = cuda_down_bytes, .work_bytes = work_bytes, .pack_rows = CUDA_PACK_ROWS,         \
        .span = cuda_span, .pack = cuda_pack, .lora_a_bytes = cuda_lora_a_bytes, .lora_b_bytes = cuda_lora_b_bytes,                        \
        .pack_lora_a = cuda_pack_lora_a, .pack_lora_b = cuda_pack_lora_b, .enter = enter, .route = route,                                  \
        .shrink_gate_up = shrink_gate_up_##code, .gate_up = gate_up_##code, .shrink_down = shrink_down_##code, .down = down_##code,        \
        .combine = combine, .wait = wait,                                                                                                  \
    }

static const struct kernel_table table_sm90 = TABLE(sm90), table_portable = TABLE(portable);

static cudaError_t load_shared_code(void)
{
    cudaError_t e = cuda_load_move();
    if (e == cudaSuccess)
        e = cuda_load_route();
    return e == cudaSuccess ? cuda_load_shrink() : e;
}

static cudaError_t load_sm90(void)
{
    cudaError_t e = cuda_load_decode_sm90();
    if (e == cudaSuccess)
        e = cuda_load_shrink_sm90();
    if (e == cudaSuccess)
        e = cuda_load_prefill_sm90_bf16();
    if (e == cudaSuccess)
        e = cuda_load_prefill_sm90_fp16();
    return e == cudaSuccess ? cuda_load_prefill_portable() : e;
}

static cudaError_t load_portable(void)
{
    cudaError_t e = cuda_load_decode_portable();
    return e == cudaSuccess ? cuda_load_prefill_portable() : e;
}

const struct kernel_table *kernels_cuda(const char *code, int device, char *why, size_t why_size)
{
    const bool automatic = !code || strcmp(code, "auto") == 0;
    if (!automatic && strcmp(code, "sm90") != 0 && strcmp(code, "portable") != 0) {
        snprintf(why, why_size, "\"%s\" is none of the CUDA back end's code (auto, sm90, portable)", code);
        return NULL;
    }
    int devices = 0, major = 0, minor = 0;
    cudaError_t e = cudaGetDeviceCount(&devices);
    if (e != cudaSuccess || device < 0 || device >= devices) {
        if (e != cudaSuccess)
            snprintf(why, why_size, "no CUDA device can be used: %s", cudaGetErrorString(e));
        else
            snprintf(why, why_size, "there is no CUDA device %d, only %d in all", device, devices);
        (void)cudaGetLastError();
        return NULL;
    }
    e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const bool hopper = e == cudaSuccess && major == 9 && minor == 0;
    const struct kernel_table *table = hopper && (automatic || strcmp(code, "sm90") == 0) ? &table_sm90 : &table_portable;
    if (e == cudaSuccess && (major < 8 || (table == &table_portable && !automatic && strcmp(code, "sm90") == 0))) {
        snprintf(why, why_size, "CUDA device %d has compute capability %d.%d; %s", device, major, minor,
                 major < 8 ? "8.0 or newer is needed" : "the code \"sm90\" needs 9.0");
        return NULL;
    }
    if (e == cudaSuccess)
        e = load_shared_code();
    if (e == cudaSuccess)
        e = table == &table_sm90 ? load_sm90() : load_portable();
    if (e != cudaSuccess) {
        snprintf(why, why_size, "code for CUDA device %d can't be loaded: %s", device, cudaGetErrorString(e));
        (void)cudaGetLastError();
        return NULL;
    }
    return table;
}

struct kernel_stream *kernels_cuda_stream_create(int device, void *cuda_stream)
{
    struct kernel_stream *s = calloc(1, sizeof *s);
    int major = 0, minor = 0;
    if (!s)
        return NULL;
    s->stream = cuda_stream;
    s->device = device;
    if (cudaDeviceGetAttribute(&s->processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&s->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        (void)cudaGetLastError();
        free(s);
        return NULL;
    }
    s->overlap = major == 9 && minor == 0; /* where the code for sm_90a runs */
    return s;
}

void kernels_cuda_stream_destroy(struct kernel_stream *stream) { free(stream); }
