/* SPDX-License-Identifier: Apache-2.0
 *
 * What the two halves of the runtime share: runtime.cpp has what programs call, queue.cpp carries out what they queued. All of it is under
 * `lock`, which functions that take `hold` give up while they wait.
 */
#ifndef EXPERTD_TESTS_EMULATOR_QUEUE_H
#define EXPERTD_TESTS_EMULATOR_QUEUE_H

#include "internal.h"

#include <mutex>
#include <thread>

typedef std::unique_lock<std::mutex> holding;

struct event_state {
    uint64_t recorded, done; /* turns */
    double at; /* seconds, of the last one done */
};

struct operation {
    enum { LAUNCH, COPY, SET, RECORD, WAIT, TRAP, OCCUPY } kind;
    uint64_t number; /* in order of all streams' queueing */
    struct launch launch;
    void *dst;
    const void *src;
    size_t width, height, dst_pitch, src_pitch;
    int byte;
    std::shared_ptr<event_state> event;
    uint64_t turn; /* of the event */
    double seconds; /* to occupy the device for */
};

struct emulator_graph {
    std::vector<operation> operations;
};
struct emulator_graph_exec {
    std::vector<operation> operations;
};

struct emulator_stream {
    std::deque<operation> queue;
    uint64_t running; /* number of the operation that is being carried out, and no longer in the queue; 0: none */
    bool blocking; /* waits for the default stream, and it for this one */
    emulator_graph *capture;
    cudaStreamCaptureMode mode; /* of the capture */
    bool spoilt; /* it is */
    std::thread::id capturer;
};

struct emulator_event {
    std::shared_ptr<event_state> state;
};

extern std::mutex &lock;
extern std::vector<emulator_stream *> &streams;
extern emulator_stream &default_stream;
extern uint64_t last_number; /* of operations */
extern cudaError_t fault; /* that the device will never recover from */

/* A thread of the host that waits for an event, a stream, or all of them; or for one step of the device and what it may have brought. */
struct waiter {
    std::shared_ptr<event_state> event;
    uint64_t turn;
    emulator_stream *stream;
    uint64_t number; /* of the last operation to be waited for, of one stream or, with neither, of all */
    bool once;
};

bool reached(const waiter &w);
void await(holding &hold, waiter &w);
/* Is it done? Whoever asks often enough sees the device get on, but may be told that it isn't ready, as often as there are steps to take and
 * by chance now and then. When a step took long the rest is waited for, since the host has limits of time that are not meant for this. */
cudaError_t query(holding &hold, waiter w);
void drain(holding &hold); /* all that has been queued is carried out, and the device at rest */
void drain_stream(holding &hold, emulator_stream *s);
bool occupied(void); /* the multiprocessors, by emulator_occupy */

#endif
