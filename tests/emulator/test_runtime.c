/* SPDX-License-Identifier: Apache-2.0
 *
 * The stand-in for the runtime: late copies, events between streams, what may not be called during a capture, memory that runs out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(e) assert_int_equal(e, cudaSuccess)

static cudaStream_t make_stream(void)
{
    cudaStream_t stream;
    SUCCEEDS(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static void copies_see_memory_as_it_is_when_they_are_carried_out(void **state)
{
    (void)state;
    cudaStream_t stream = make_stream();
    unsigned char host[64], back[64], *device;
    SUCCEEDS(cudaMalloc((void **)&device, sizeof host));
    memset(host, 1, sizeof host);
    memset(back, 9, sizeof back);
    SUCCEEDS(cudaMemcpyAsync(device, host, sizeof host, cudaMemcpyHostToDevice, stream));
    SUCCEEDS(cudaMemcpyAsync(back, device, sizeof back, cudaMemcpyDeviceToHost, stream));
    memset(host, 2, sizeof host);
    assert_int_equal(back[0], 9);
    SUCCEEDS(cudaStreamSynchronize(stream));
    for (size_t i = 0; i < sizeof back; i++)
        assert_int_equal(back[i], 2);
    SUCCEEDS(cudaStreamDestroy(stream));
    SUCCEEDS(cudaFree(device));
}

/* Without the event the second stream's copy is at times before the first's, and at times in its middle. */
static int order_of_streams(bool ordered)
{
    enum { BYTES = 4096, ROUNDS = 64 };
    cudaStream_t first = make_stream(), second = make_stream();
    cudaEvent_t event;
    unsigned char *device, *back = malloc(BYTES);
    int wrong = 0;
    SUCCEEDS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    SUCCEEDS(cudaMalloc((void **)&device, 2 * (size_t)BYTES));
    for (int i = 0; i < ROUNDS; i++) {
        SUCCEEDS(cudaMemset(device, 0, 2 * (size_t)BYTES));
        SUCCEEDS(cudaMemset(device + BYTES, 1, BYTES));
        SUCCEEDS(cudaMemcpyAsync(device, device + BYTES, BYTES, cudaMemcpyDeviceToDevice, first));
        SUCCEEDS(cudaEventRecord(event, first));
        if (ordered)
            SUCCEEDS(cudaStreamWaitEvent(second, event, 0));
        SUCCEEDS(cudaMemcpyAsync(back, device, BYTES, cudaMemcpyDeviceToHost, second));
        SUCCEEDS(cudaStreamSynchronize(second));
        wrong += back[0] != 1 || back[BYTES - 1] != 1;
        SUCCEEDS(cudaDeviceSynchronize());
    }
    SUCCEEDS(cudaEventDestroy(event));
    SUCCEEDS(cudaStreamDestroy(first));
    SUCCEEDS(cudaStreamDestroy(second));
    SUCCEEDS(cudaFree(device));
    free(back);
    return wrong;
}

static void streams_are_in_order_by_events_alone(void **state)
{
    (void)state;
    assert_int_equal(order_of_streams(true), 0);
    assert_true(order_of_streams(false) > 10);
}

static void whoever_asks_may_have_to_ask_again(void **state)
{
    (void)state;
    cudaStream_t stream = make_stream();
    cudaEvent_t event;
    unsigned char *device;
    int not_ready = 0, most = 0;
    SUCCEEDS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    SUCCEEDS(cudaMalloc((void **)&device, 64));
    SUCCEEDS(cudaEventQuery(event)); /* never recorded */
    for (int i = 0; i < 64; i++) {
        int n = 0;
        for (int j = 0; j < 3; j++)
            SUCCEEDS(cudaMemsetAsync(device, j, 64, stream));
        SUCCEEDS(cudaEventRecord(event, stream));
        for (cudaError_t e; (e = cudaEventQuery(event)) != cudaSuccess; n++)
            assert_int_equal(e, cudaErrorNotReady);
        SUCCEEDS(cudaStreamQuery(stream));
        not_ready += n;
        most = n > most ? n : most;
    }
    assert_true(not_ready > 64 && most < 64);
    assert_int_equal(cudaGetLastError(), cudaSuccess); /* that it is not ready is no error */
    SUCCEEDS(cudaEventDestroy(event));
    SUCCEEDS(cudaStreamDestroy(stream));
    SUCCEEDS(cudaFree(device));
}

static void *take_memory(void *arg)
{
    void *p = NULL;
    cudaError_t *e = arg;
    *e = cudaMalloc(&p, 64);
    if (*e == cudaSuccess)
        *e = cudaFree(p);
    return NULL;
}

static cudaError_t take_memory_elsewhere(void)
{
    cudaError_t e;
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, take_memory, &e), 0);
    pthread_join(thread, NULL);
    return e;
}

static void captures_are_spoilt_by_what_is_forbidden(void **state)
{
    (void)state;
    cudaStream_t stream = make_stream(), other = make_stream();
    cudaEvent_t event;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    enum cudaStreamCaptureStatus status;
    unsigned char *device, back[64] = {0}, *p;
    SUCCEEDS(cudaMalloc((void **)&device, 64));
    SUCCEEDS(cudaMemset(device, 1, 64));
    SUCCEEDS(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    assert_int_not_equal(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    for (int forbidden = 0; forbidden < 6; forbidden++) {
        SUCCEEDS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        SUCCEEDS(cudaMemsetAsync(device, 2, 64, stream));
        cudaError_t e = forbidden == 0   ? cudaMalloc((void **)&p, 64)
                        : forbidden == 1 ? cudaFree(device)
                        : forbidden == 2 ? cudaMemcpy(back, device, 64, cudaMemcpyDeviceToHost)
                        : forbidden == 3 ? cudaStreamSynchronize(stream)
                        : forbidden == 4 ? cudaEventQuery(event)
                                         : cudaDeviceSynchronize();
        assert_int_equal(e, cudaErrorStreamCaptureUnsupported);
        assert_int_equal(cudaGetLastError(), e);
        SUCCEEDS(cudaStreamIsCapturing(stream, &status));
        assert_int_equal(status, cudaStreamCaptureStatusInvalidated);
        assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
        assert_null(graph);
    }
    /* Of others only by a capture for all. */
    SUCCEEDS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    assert_int_equal(take_memory_elsewhere(), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    SUCCEEDS(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    SUCCEEDS(cudaMemsetAsync(device, 3, 64, stream));
    SUCCEEDS(take_memory_elsewhere());
    SUCCEEDS(cudaMemcpyAsync(back, device, 64, cudaMemcpyDeviceToHost, other));
    SUCCEEDS(cudaStreamEndCapture(stream, &graph));
    SUCCEEDS(cudaStreamSynchronize(other));
    assert_int_equal(back[63], 1); /* what was captured did not run */
    SUCCEEDS(cudaGraphInstantiate(&exec, graph, 0));
    SUCCEEDS(cudaGraphDestroy(graph));
    SUCCEEDS(cudaGraphLaunch(exec, stream));
    SUCCEEDS(cudaGraphExecDestroy(exec)); /* while it is queued */
    SUCCEEDS(cudaStreamSynchronize(stream));
    SUCCEEDS(cudaMemcpy(back, device, 64, cudaMemcpyDeviceToHost));
    assert_int_equal(back[0], 3);
    SUCCEEDS(cudaEventDestroy(event));
    SUCCEEDS(cudaStreamDestroy(stream));
    SUCCEEDS(cudaStreamDestroy(other));
    SUCCEEDS(cudaFree(device));
}

static void memory_ends_somewhere(void **state)
{
    (void)state;
    unsigned char *device, *pinned, pageable[64];
    size_t unused, total, after;
    struct cudaPointerAttributes a;
    SUCCEEDS(cudaMemGetInfo(&unused, &total));
    void *p;
    assert_int_equal(cudaMalloc(&p, unused + 1), cudaErrorMemoryAllocation);
    assert_int_equal(cudaMalloc(&p, SIZE_MAX), cudaErrorMemoryAllocation);
    SUCCEEDS(cudaMalloc((void **)&device, 64));
    SUCCEEDS(cudaHostAlloc((void **)&pinned, 64, cudaHostAllocPortable));
    SUCCEEDS(cudaPointerGetAttributes(&a, device + 63));
    assert_int_equal(a.type, cudaMemoryTypeDevice);
    SUCCEEDS(cudaPointerGetAttributes(&a, pinned + 63));
    assert_int_equal(a.type, cudaMemoryTypeHost);
    SUCCEEDS(cudaPointerGetAttributes(&a, pageable));
    assert_int_equal(a.type, cudaMemoryTypeUnregistered);
    assert_int_equal(cudaMemcpy(device + 1, pinned, 64, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(pageable, pinned, 64, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(pageable, 0, 64), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(pinned), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(device + 1), cudaErrorInvalidValue);
    SUCCEEDS(cudaFreeHost(pinned));
    SUCCEEDS(cudaFree(device));
    SUCCEEDS(cudaMemGetInfo(&after, &total));
    assert_int_equal(after, unused);
}

/* The last: nothing works any more after it. */
static void a_trap_is_the_end(void **state)
{
    (void)state;
    cudaStream_t stream = make_stream(), other = make_stream();
    unsigned char *device, host[64] = {0};
    SUCCEEDS(cudaMalloc((void **)&device, 64));
    SUCCEEDS(emulator_occupy(stream, 0.05));
    SUCCEEDS(cudaMemcpyAsync(device, host, 64, cudaMemcpyHostToDevice, other)); /* copies go on */
    SUCCEEDS(cudaStreamSynchronize(other));
    assert_int_equal(cudaStreamQuery(stream), cudaErrorNotReady);
    SUCCEEDS(cudaStreamSynchronize(stream));
    SUCCEEDS(emulator_trap(stream));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);
    assert_int_equal(cudaGetLastError(), cudaErrorLaunchFailure);
    assert_int_equal(cudaFree(device), cudaErrorLaunchFailure);
    assert_int_equal(cudaMemcpyAsync(device, host, 64, cudaMemcpyHostToDevice, other), cudaErrorLaunchFailure);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_see_memory_as_it_is_when_they_are_carried_out),
        cmocka_unit_test(streams_are_in_order_by_events_alone),
        cmocka_unit_test(whoever_asks_may_have_to_ask_again),
        cmocka_unit_test(captures_are_spoilt_by_what_is_forbidden),
        cmocka_unit_test(memory_ends_somewhere),
        cmocka_unit_test(a_trap_is_the_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
