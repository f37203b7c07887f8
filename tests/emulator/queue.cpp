/* SPDX-License-Identifier: Apache-2.0
 *
 * The device's one thread, and those who wait for it.
 *
 * Work is carried out when somebody waits for it or asks after it and not before: so a program with one thread of its own is the same each
 * time, and whoever changes memory that a queued copy has yet to read, or reads what one has yet to write, finds that out. Which stream goes
 * on is drawn by chance: streams that nothing orders get ahead of each other, and a copy may be half done while others go on. Launches of
 * different streams do not overlap.
 */
#include "queue.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLOW_NS 20000000

/* Never ended: the device outlives main. */
std::mutex &lock = *new std::mutex;
std::vector<emulator_stream *> &streams = *new std::vector<emulator_stream *>;
emulator_stream &default_stream = *new emulator_stream();
uint64_t last_number;
cudaError_t fault;
static uint32_t launches;

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static std::condition_variable &device_asked = *new std::condition_variable, &device_done = *new std::condition_variable;
static std::vector<waiter *> &waiters = *new std::vector<waiter *>;
static int resting; /* threads that want the device at rest */
static double occupied_until; /* the multiprocessors, by a kernel of emulator_occupy */

bool occupied(void) { return occupied_until != 0; }

static bool stream_reached(const emulator_stream *s, uint64_t number)
{
    return (s->running == 0 || s->running > number) && (s->queue.empty() || s->queue.front().number > number);
}

bool reached(const waiter &w)
{
    if (fault)
        return true;
    if (w.event)
        return w.event->done >= w.turn;
    if (w.stream)
        return stream_reached(w.stream, w.number);
    for (const emulator_stream *s : streams)
        if (!stream_reached(s, w.number))
            return false;
    return stream_reached(&default_stream, w.number);
}

static bool can_step(const emulator_stream *s)
{
    if (s->queue.empty())
        return false;
    const operation &o = s->queue.front();
    return o.kind == operation::WAIT     ? o.event->done >= o.turn
           : o.kind == operation::LAUNCH ? !occupied()
           : o.kind == operation::OCCUPY ? !occupied() || seconds() >= occupied_until
                                         : true;
}

/* Of those that can go on: mostly the one that somebody waits for, or any. */
static emulator_stream *choose(void)
{
    std::vector<emulator_stream *> able;
    for (emulator_stream *s : streams)
        if (can_step(s))
            able.push_back(s);
    if (can_step(&default_stream))
        able.push_back(&default_stream);
    if (able.empty())
        return NULL;
    for (const waiter *w : waiters)
        if (w->stream && can_step(w->stream) && random_next() % 2)
            return w->stream;
    return able[random_next() % able.size()];
}

static void copy_piece(const operation &o)
{
    for (size_t i = 0; i < o.height; i++) {
        memcpy((uint8_t *)o.dst + i * o.dst_pitch, (const uint8_t *)o.src + i * o.src_pitch, o.width);
        memory_written((uint8_t *)o.dst + i * o.dst_pitch, o.width);
    }
}

/* Carries out the first operation of a stream, or a part of it; consecutive launches together, as they may overlap. */
static void stream_step(emulator_stream *s, holding &hold)
{
    operation &o = s->queue.front();
    switch (o.kind) {
    case operation::LAUNCH: {
        std::vector<operation> run;
        while (!s->queue.empty() && s->queue.front().kind == operation::LAUNCH && (run.empty() || s->queue.front().launch.overlap)) {
            s->queue.front().launch.number = ++launches;
            run.push_back(std::move(s->queue.front()));
            s->queue.pop_front();
        }
        std::vector<struct launch *> order;
        for (operation &each : run)
            order.push_back(&each.launch);
        s->running = run.front().number;
        hold.unlock();
        emulator_run(order);
        hold.lock();
        s->running = 0;
        return;
    }
    case operation::COPY: {
        const bool rows = o.height > 1;
        const size_t half = (rows ? o.height : o.width) / 2;
        if (half < 16 || random_next() % 4) {
            copy_piece(o);
            break;
        }
        operation first = o;
        (rows ? first.height : first.width) = half;
        copy_piece(first);
        (rows ? o.height : o.width) -= half;
        o.dst = (uint8_t *)o.dst + (rows ? half * o.dst_pitch : half);
        o.src = (const uint8_t *)o.src + (rows ? half * o.src_pitch : half);
        return;
    }
    case operation::SET:
        memset(o.dst, o.byte, o.width);
        memory_written(o.dst, o.width);
        break;
    case operation::RECORD:
        o.event->done = std::max(o.event->done, o.turn);
        o.event->at = seconds();
        break;
    case operation::WAIT: break;
    case operation::TRAP:
        fault = cudaErrorLaunchFailure;
        for (emulator_stream *t : streams)
            t->queue.clear();
        default_stream.queue.clear();
        return;
    case operation::OCCUPY:
        if (!occupied()) {
            occupied_until = seconds() + o.seconds;
            return;
        }
        occupied_until = 0;
        break;
    }
    s->queue.pop_front();
}

/* The thread that is the device. */
static void device_main(void)
{
    holding hold(lock);
    for (;;) {
        device_asked.wait(
            hold, [] { return !resting && std::any_of(waiters.begin(), waiters.end(), [](const waiter *w) { return !reached(*w); }); });
        emulator_stream *s = choose();
        if (s)
            stream_step(s, hold);
        else if (!occupied())
            emulator_fatal("streams wait for each other");
        for (size_t i = waiters.size(); i-- > 0;) {
            if (waiters[i]->once || reached(*waiters[i])) {
                waiters[i] = waiters.back();
                waiters.pop_back();
            }
        }
        device_done.notify_all();
        if (!s)
            device_asked.wait_for(hold, std::chrono::milliseconds(1));
    }
}

/* The caller's `hold` is given up meanwhile. */
void await(holding &hold, waiter &w)
{
    static std::thread *device;
    if (reached(w))
        return;
    if (!device) {
        device = new std::thread(device_main);
        device->detach();
    }
    waiters.push_back(&w);
    device_asked.notify_one();
    device_done.wait(hold, [&w] { return std::find(waiters.begin(), waiters.end(), &w) == waiters.end(); });
}

cudaError_t query(holding &hold, waiter w)
{
    static uint64_t chance = 1;
    if (reached(w))
        return fault;
    chance = chance * 6364136223846793005u + 1442695040888963407u;
    if (chance >> 62 == 0)
        return cudaErrorNotReady;
    if (occupied()) {
        /* Nobody gains by asking faster. */
        hold.unlock();
        usleep(500);
        hold.lock();
    }
    const double begin = seconds();
    for (;;) {
        w.once = true;
        await(hold, w);
        if (reached(w))
            return fault;
        if (occupied() || (seconds() - begin) * 1e9 < SLOW_NS)
            return cudaErrorNotReady;
    }
}

void drain(holding &hold)
{
    waiter all = {};
    all.number = last_number;
    auto at_work = [] {
        return default_stream.running || std::any_of(streams.begin(), streams.end(), [](const emulator_stream *s) { return s->running; });
    };
    await(hold, all);
    resting++;
    device_done.wait(hold, [&] { return !at_work(); });
    resting--;
    device_asked.notify_one();
}

void drain_stream(holding &hold, emulator_stream *s)
{
    waiter w = {};
    w.stream = s;
    w.number = last_number;
    await(hold, w);
}
